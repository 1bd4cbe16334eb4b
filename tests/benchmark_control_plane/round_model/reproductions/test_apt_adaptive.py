"""The reproduction of Apt-Serve's Table 5 at a tenth of its size: files written, orders as published."""

import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="plots need the `bench` extra")

from benchmark_control_plane.common.command_line import BadInput, data_folder
from benchmark_control_plane.round_model.reproductions import apt_adaptive


def test_error_names_the_missing_data_folder(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="TANDEM_DATA"):
        apt_adaptive.run(tmp_path, data=tmp_path)


@pytest.mark.data
@pytest.mark.slow
def test_adaptive_orders_beat_fcfs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        data_folder(None, "lengths")
    except BadInput as absent:
        pytest.skip(str(absent))
    found = apt_adaptive.run(tmp_path, requests=100, repeats=1)
    for row in found["table"]:
        ours = {label: one["published_metric"] for label, one in row["ours"].items()}
        assert ours["FCFS"] < ours["Apt-Serve's greedy"]
        assert ours["FCFS"] < ours["Tandem, engine"]
        for one in row["ours"].values():
            assert one["strict_metric"] <= one["published_metric"]
    assert json.loads((tmp_path / "apt-adaptive.json").read_text()) == found
    assert (tmp_path / "apt-adaptive.png").stat().st_size > 10_000
    assert "What differs" in capsys.readouterr().out
