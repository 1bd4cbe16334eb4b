"""The reproduced experiments run and rank the policies as published."""

import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="plots need the bench extra")

from benchmark_control_plane.reproduce import TABLES, main
from benchmark_control_plane.round_model.reproductions import mcsf_table
from benchmark_control_plane.round_model.scheduling_cost import decision_times, stream_run


@pytest.mark.long
def test_table_ranks_the_policies_as_published(tmp_path: Path) -> None:
    mcsf_table.run(tmp_path, seed=1, runs=2)
    found = json.loads((tmp_path / "mcsf-table.json").read_text())
    ratio = {row["policy"]: row["ratio"] for row in found["fixed_set"]}
    published = [row["policy"] for row in found["fixed_set"] if row["published_s"]]
    assert min(published, key=ratio.__getitem__) == "MC-SF"
    assert 1.3 < ratio["MC-Benchmark"] < 1.5
    assert all(1.35 < ratio[policy] < 1.8 for policy in published[2:])
    assert ratio["Tandem"] < min(ratio["MC-SF"], ratio["MC-SF, skipping"])
    assert (tmp_path / "mcsf-table.png").stat().st_size > 10_000


def test_results_are_written_only_into_the_results_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[Path] = []

    def run(results: Path, *, seed: int) -> dict[str, int]:
        written.append(results / "mcsf-table.json")
        written[-1].write_text(str(seed))
        return {"seed": seed}

    monkeypatch.setitem(TABLES, "mcsf-table", run)
    assert main(["mcsf-table", "--seed", "3"]) == 0
    assert json.loads(capsys.readouterr().out) == {"seed": 3}
    assert not written[0].exists()
    assert main(["mcsf-table", "--results", str(tmp_path)]) == 0
    assert (tmp_path / "mcsf-table.json").read_text() == "0"


def test_unknown_experiment_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mcsf-chair"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "mcsf-table" in err


def test_streamed_run_finishes_all_requests() -> None:
    assert stream_run(2_000)["requests"] == 2_000


@pytest.mark.long
def test_cost_is_measured_in_every_step() -> None:
    assert (decision_times("tandem") > 0).all()
