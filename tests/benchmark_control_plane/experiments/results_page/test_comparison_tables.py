"""The first tables of docs/results.md name what is lost, with its size, and compare like with like."""

from pathlib import Path
from typing import Any

import pytest

from benchmark_control_plane.experiments.results_page import (
    comparison_tables,
    other_losses,
    proposal_table,
)
from benchmark_control_plane.report.leads import pairings
from tests import experiments

FILE = Path("mix-memory.json")


def results(attained: dict[str, dict[str, float]]) -> Any:
    """Three seeds of 240 requests each at one load, with these shares by system and class."""
    content: Any = experiments.results(loads=(0.5,))
    content["systems"] = [system for system in content["systems"] if system["name"] in attained]
    content["runs"] = [
        run | {"valid": True, "attainment": attained[run["system"]]}
        for run in content["runs"]
        if run["system"] in attained
    ]
    return content


def compared(content: Any) -> list[comparison_tables.BaselineComparison]:
    return comparison_tables.comparisons([(FILE, FILE.stem, content)])


BEHIND = {
    "tandem": {"overall": 0.9, "interactive": 0.7, "batch": 1.0},
    "plain": {"overall": 0.92, "interactive": 0.8, "batch": 0.9},
    "static-split": {"overall": 0.5, "interactive": 1.0, "batch": 1.0},
    "tandem-no-forecast": {"overall": 0.91, "interactive": 0.7, "batch": 1.0},
}


def test_a_lost_cell_states_its_size_and_that_no_reason_is_known() -> None:
    (row,) = comparison_tables.lost_rows(compared(results(BEHIND)), source=str)
    assert row == [
        "mix-memory, 50 % load", "-2.0 (-2.0 to -2.0)", "plain", "14 of 720 requests; not examined",
        "mix-memory.json",
    ]  # fmt: skip


def test_a_known_reason_is_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison_tables, "REASONS", {"mix-memory": "passes wait"})
    (row,) = comparison_tables.lost_rows(compared(results(BEHIND)), source=str)
    assert row[3] == "14 of 720 requests; passes wait"


def test_a_class_that_gives_way_states_what_the_others_have_of_it() -> None:
    lines = comparison_tables.classes_table(compared(results(BEHIND)), source=str)
    assert lines[2:-1] == [
        "| mix-memory | interactive | 50 %: -10.0 | batch +10.0, all -2.0 | mix-memory.json |"
    ]


def test_the_rate_is_relative_to_the_best_baseline_of_each_seed() -> None:
    content = results(BEHIND)
    rates = {"tandem": [3.0, 3.0, 3.0], "plain": [2.0, 1.0, 1.0], "static-split": [1.0, 1.5, 1.5]}
    content["max_goodput_rate"] = [
        {"system": name, "target": 0.9, "rps": sorted(found)[1], "per_seed": found, "seeds": [1, 2, 3]}
        for name, found in rates.items()
    ]
    lines = comparison_tables.ahead_table(compared(content), source=str)
    assert "| 2.00\N{MULTIPLICATION SIGN} (1.50\N{MULTIPLICATION SIGN} to 2.00" in lines[2]
    del content["max_goodput_rate"][1]
    assert "| unknown: a baseline has no valid runs near it |" in "".join(
        comparison_tables.ahead_table(compared(content), source=str)
    )


def test_a_mechanism_that_costs_is_negative() -> None:
    lines = comparison_tables.mechanisms_table(compared(results(BEHIND)), source=str)
    assert "| 50 %: -1.0 |" in lines[2] and lines[2].startswith("| mix-memory | tandem-no-forecast (")


def test_the_summary_counts_cells_ahead_and_behind() -> None:
    ahead = {**BEHIND, "tandem": BEHIND["tandem"] | {"overall": 0.95}}
    both = compared(results(BEHIND)) + compared(results(ahead))
    assert comparison_tables.summary(both, [FILE.name]) == (
        "ahead in 1 of 2 cells on real engines and behind in 1, by at most 2.0 points"
    )


def test_conditions_are_compared_with_their_own_baseline() -> None:
    kinds = {"tandem, CV 3": "tandem", "ungated, CV 3": "baseline", "tandem, CV 6": "tandem",
             "ungated, CV 6": "baseline"}  # fmt: skip
    content: Any = {"systems": [{"name": name, "kind": kind} for name, kind in kinds.items()]}
    assert list(pairings(content)) == [
        ("tandem, CV 3", ["ungated, CV 3"]), ("tandem, CV 6", ["ungated, CV 6"])
    ]  # fmt: skip
    content["systems"] = [{"name": name, "kind": "tandem"} for name in ("shares", "budgets")]
    content["systems"].append({"name": "all that remains", "kind": "baseline"})
    assert list(pairings(content)) == []


def test_an_experiment_of_which_a_baseline_is_missing_is_not_compared() -> None:
    content = results(BEHIND)
    content["runs"] = [run for run in content["runs"] if run["system"] != "plain"]
    assert compared(content) == []


def test_a_policy_that_is_ahead_is_a_lost_cell() -> None:
    def row(policy: str, met: float, period: float | None) -> dict[str, Any]:
        return {"policy": policy, "met_percent": met, "met_spread": 0.5, "period": period}

    rows = [row("TANDEM", 86.0, 0.2), row("BEST_OF_ALL", 90.0, 0.2), row("ROUND_ROBIN", 87.1, None)]
    rows += [row("TANDEM", 87.0, 1.0), row("TANDEM", 80.0, 5.0)]
    found = list(other_losses.policies({"boxes": [8], "rate_per_box": 37.0, "rows": rows}))
    assert [(points, other) for _, points, other, _ in found] == [
        ("-4.0 points", "best of all"), ("-0.1 points", "round robin"), ("-7.1 points", "round robin"),
    ]  # fmt: skip
    assert found[0][0] == "routing on 8 simulated boxes, 37 requests/s, reports every 0.2 s"
    assert found[1][3] == "less than the range of the seeds" and "what the others have sent" in found[2][3]


def test_the_table_of_the_proposal_names_what_is_not_measured(tmp_path: Path) -> None:
    (tmp_path / "traces.json").touch()
    lines = proposal_table.table(tmp_path, lambda file: file.stem)
    (row,) = (line for line in lines if "1: recorded arrivals" in line)
    assert "| traces; **not measured:** traces-code, workflow-trace |" in row
    assert "traces" not in proposal_table.missing(tmp_path)
