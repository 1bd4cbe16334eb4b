"""The studies of routing run, write their results and refuse impossible sizes."""

import json
from pathlib import Path

import pytest

from benchmark_control_plane.experiments.fleet import report_cost
from benchmark_control_plane.fleet_studies import oracle_accuracy, routing_policies

TINY = ["--boxes", "4", "--seconds", "1", "--seeds", "1", "--rate", "10"]


# The event model is compiled where no earlier run has done it.
@pytest.mark.long
@pytest.mark.parametrize(
    ("study", "rows"),
    [
        pytest.param("staleness", 16, marks=pytest.mark.slow),
        pytest.param("policies", 36, marks=pytest.mark.slow),
        pytest.param("faults", 6, marks=pytest.mark.slow),
        pytest.param("choices", 16, marks=pytest.mark.slow),
        pytest.param("retries", 4, marks=pytest.mark.slow),
        pytest.param("router-lost", 12, marks=pytest.mark.slow),
        pytest.param("capacity", 2, marks=pytest.mark.slow),
        ("scale", 1),
    ],
)
def test_a_study_writes_its_rows(study: str, rows: int, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    assert routing_policies.main([study, *TINY, "--results", str(file)]) == 0
    found = json.loads(file.read_text(encoding="utf-8"))
    assert len(found["rows"]) == rows
    for row in found["rows"]:
        assert 1 <= row["rate_per_box"] <= 100 if study == "capacity" else 0 <= row["met_percent"] <= 100


@pytest.mark.long
def test_accuracy_is_stated_by_cell_and_order(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    arguments = ["--boxes", "2", "--rates", "40", "--seconds", "2", "--policies", "TANDEM", "RANDOM"]
    assert oracle_accuracy.main([*arguments, "--results", str(file)]) == 0
    found = json.loads(file.read_text(encoding="utf-8"))
    assert [cell["policy"] for cell in found["cells"]] == ["TANDEM", "RANDOM"]
    assert 0 <= found["order"]["same_order"] <= found["order"]["pairs"] <= 1


@pytest.mark.parametrize(
    ("main", "arguments", "message"),
    [
        (routing_policies.main, ["scale", "--boxes", "0"], "all numbers must be above 0"),
        (routing_policies.main, ["scale", "--boxes", "9", "--cells", "2"], "--cells 2: does not divide"),
        (routing_policies.main, ["faults", "--warm-up", "30"], "--warm-up below --seconds"),
        (oracle_accuracy.main, ["--seconds", "0"], "--seconds 0.0"),
        (report_cost.main, ["--calls", "1"], "--calls 1: must be at least 10"),
    ],
)
def test_impossible_sizes_are_refused(main, arguments, message, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) != 0
    assert message in capsys.readouterr().err
