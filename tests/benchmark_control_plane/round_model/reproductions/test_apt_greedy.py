"""The reproduction of Apt-Serve's greedy: within its guarantee and its upper bound, files written."""

import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="plots need the `bench` extra")

from benchmark_control_plane.round_model.reproductions.apt_greedy import PUBLISHED_MS, run


@pytest.mark.long
def test_quality_stays_within_the_guarantee(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(tmp_path)
    brute = found["against_brute_force"]
    assert brute["guaranteed"] <= brute["worst_ratio"] <= brute["mean_ratio"] <= 1 + 1e-9
    assert [row["candidates"] for row in found["cost"]] == list(PUBLISHED_MS)
    for row in found["against_relaxation"]:
        assert 0.95 < row["worst_ratio"] <= row["mean_ratio"] <= 1 + 1e-9
    assert json.loads((tmp_path / "apt-greedy.json").read_text()) == found
    assert (tmp_path / "apt-greedy.png").stat().st_size > 10_000
    assert "candidates  published ms" in capsys.readouterr().out
