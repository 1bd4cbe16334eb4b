"""The study of autoscaling on a recording that is written here."""

import gzip
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from benchmark_control_plane.fleet_studies.autoscaling_study import autoscaling, demand
from benchmark_control_plane.fleet_studies.study_file import AutoscalingStudy
from benchmark_control_plane.fleet_studies.study_reader import read_study
from benchmark_control_plane.judge.traces import NAMED, TracedRequest
from controlplane.cli import main
from controlplane.config import ConfigError
from tests.benchmark_control_plane.fleet_studies.test_study_file import ROOT

FILE = ROOT / "configs/bench/fleet-autoscaling.yaml"


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Half an hour at one request per second, then half an hour at five."""
    file, columns = NAMED["servegen-steady"]
    times = [*range(1_800), *(1_800 + at / 5 for at in range(9_000))]
    rows = [f"{columns.at},{columns.prompt},{columns.output}", *(f"{at},100,10" for at in times)]
    (tmp_path / file).parent.mkdir()
    with gzip.open(tmp_path / file, "wt", encoding="utf-8") as written:
        written.write("\n".join(rows))
    return tmp_path


def test_work_is_averaged_over_bins_and_scaled_to_the_mean() -> None:
    requests = [TracedRequest(at, 100, 10) for at in (0.0, 1.0, 2.0, 10.0, 20.0)]
    assert demand(requests, 8.0, 10).tolist() == pytest.approx([12.0] * 10 + [4.0] * 10)
    # A long prompt is more work than a short one.
    longer = [TracedRequest(0.0, 200, 20), *requests[3:]]
    assert demand(longer, 3.0, 10).tolist() == pytest.approx([4.0] * 10 + [2.0] * 10)


def test_the_rule_overloads_less_than_as_many_boxes_all_the_time(recorded: Path) -> None:
    study = read_study(FILE)
    assert isinstance(study, AutoscalingStudy)
    found = autoscaling(replace(study, traces=("servegen-steady",)), recorded)
    scaled, average, most = found["rows"]
    assert [row["boxes"] for row in found["rows"]] == ["scaled", "average", "most"]
    # A mean of 20 boxes' work is 6.7, then 33.3 boxes' work at 0.7.
    assert 48 <= scaled["most_boxes"] == most["mean_boxes"] <= 52
    assert 0 < scaled["overload_percent"] < average["overload_percent"]
    assert most["overload_percent"] == 0
    assert scaled["mean_boxes"] < 0.75 * most["mean_boxes"]


def test_a_trace_that_is_missing_ends_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "run", str(FILE), "--out", str(tmp_path / "out"), "--data", str(tmp_path)]) == 2
    assert "azure2023_conv.csv.gz" in capsys.readouterr().err


def test_fewest_boxes_above_the_most_are_refused(tmp_path: Path) -> None:
    stated = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump(stated | {"min_boxes": stated["autoscale"]["max_boxes"] + 1}))
    with pytest.raises(ConfigError, match=r"min_boxes=\d+ exceeds autoscale\.max_boxes"):
        read_study(file)
