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
    found = comparison_tables.comparisons("a-mix", "a-mix", "present rules", content, is_live=True)
    return list(found)


BEHIND = {
    "tandem": {"overall": 0.9, "interactive": 0.7, "batch": 1.0},
    "plain": {"overall": 0.92, "interactive": 0.8, "batch": 0.9},
    "static-split": {"overall": 0.5, "interactive": 1.0, "batch": 1.0},
    "tandem-no-forecast": {"overall": 0.91, "interactive": 0.7, "batch": 1.0},
}


LINK = "[a-mix](#a-mix)"


UNKNOWN = "not examined; by class: interactive -10.0, batch +10.0"


def test_a_lost_cell_of_more_than_a_point_states_that_its_reason_was_not_examined_and_the_classes() -> None:
    (loss,) = comparison_tables.losses(compared(results(BEHIND)))
    assert loss[:2] == (LINK, "50 % load") and loss.points == pytest.approx(-2.0)
    assert loss[3:] == ("-2.0 (-2.0 to -2.0)", "plain", f"14 of 720 requests; {UNKNOWN}")


@pytest.mark.parametrize(
    ("requests", "share", "reason"),
    [(240, 0.918, "too few to tell a reason"), (240, 0.912, UNKNOWN), (20, 0.9, UNKNOWN)],
)
def test_only_a_loss_of_few_requests_and_at_most_a_point_is_too_small(
    requests: int, share: float, reason: str
) -> None:
    """Even a loss of one request is examined where it is more than a point."""
    content = results({**BEHIND, "tandem": BEHIND["tandem"] | {"overall": share}})
    for run in content["runs"]:
        run["duration_s"] = requests / run["offered_rps"]
    (loss,) = comparison_tables.losses(compared(content))
    assert loss.reason.endswith(reason)


def test_a_known_reason_is_stated_for_its_load_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison_tables, "REASONS", {("a-mix", 0.5): "passes wait"})
    (loss,) = comparison_tables.losses(compared(results(BEHIND)))
    assert loss.reason == "14 of 720 requests; passes wait"
    monkeypatch.setattr(comparison_tables, "REASONS", {("a-mix", 1.0): "passes wait"})
    (loss,) = comparison_tables.losses(compared(results(BEHIND)))
    assert loss.reason == f"14 of 720 requests; {UNKNOWN}"


def test_a_cell_in_which_a_baseline_was_not_measured_is_marked_and_counted_apart() -> None:
    content = results(BEHIND)
    at_another = [run | {"load": 1.0} for run in content["runs"]]
    content["runs"] += [run for run in at_another if run["system"] != "plain"]
    both = compared(content)
    assert comparison_tables.points(both[0]) == "50 %: -2.0, 100 %: +40.0 (1 of 2 baselines)"
    assert comparison_tables.summary(both) == (
        "ahead in 0 of 1 cells on real engines and behind in 1, by at most 2.0 points "
        "(of 1 more, which lack a baseline or most of the seeds, ahead in 1)"
    )


def test_a_baseline_with_fewer_than_half_of_the_seeds_is_not_measured() -> None:
    content = results(BEHIND)
    (whole,) = compared(content)
    assert whole.is_complete(whole.leads[0])
    content["runs"] = [run for run in content["runs"] if (run["system"], run["seed"] > 1) != ("plain", True)]
    (partial,) = compared(content)
    assert comparison_tables.points(partial) == "50 %: -2.0 (1 of 3 seeds)"
    better = {**BEHIND, "static-split": BEHIND["plain"] | {"overall": 0.93}}
    content = results(better)
    content["runs"] = [run for run in content["runs"] if (run["system"], run["seed"] > 1) != ("plain", True)]
    (partial,) = compared(content)
    assert comparison_tables.points(partial) == "50 %: -3.0 (1 of 2 baselines)"


def test_a_mechanism_is_compared_at_loads_without_a_baseline() -> None:
    content = results(BEHIND)
    baselines = ("plain", "static-split")
    content["runs"] += [run | {"load": 1.0} for run in content["runs"] if run["system"] not in baselines]
    lines = comparison_tables.mechanisms_table(compared(content))
    assert "| 50 %: -1.0, 100 %: -1.0 |" in lines[2]
    kept = [
        run for run in content["runs"] if run["load"] < 1.0 or run["seed"] == 1 or run["system"] == "tandem"
    ]
    lines = comparison_tables.mechanisms_table(compared({**content, "runs": kept}))
    assert "| 50 %: -1.0 |" in lines[2]


def test_losses_with_one_reason_share_a_row_the_largest_first() -> None:
    def loss(where: str, points: float | None, against: str, reason: str) -> other_losses.Loss:
        size = "0.93" if points is None else f"{points:+.1f}"
        return other_losses.Loss("routing", where, points, size, against, reason)

    found = [
        loss("", None, "encode", "one call"), loss("64 boxes, even", -1.0, "random", "small"),
        loss("64 boxes, bursts", -4.0, "random", "small"), loss("64 boxes, odd", -0.5, "best", "small"),
        loss("8 boxes", -2.0, "best", "small"), loss("alone", -3.0, "random", "other"),
    ]  # fmt: skip
    assert other_losses.table(found)[2:] == [
        "| routing | 64 boxes, even: -1.0, bursts: -4.0 against random; 64 boxes, odd: -0.5, 8 boxes: -2.0 "
        "against best | small |",
        "| routing | alone: -3.0 against random | other |",
        "| routing | 0.93 against encode | one call |",
        "",
    ]


def test_a_class_that_gives_way_states_what_all_requests_have() -> None:
    lines = comparison_tables.classes_table(compared(results(BEHIND)))
    assert lines[2:-1] == [f"| {LINK} | interactive 50 %: -10.0 | 50 %: -2.0 |"]


def test_the_rate_is_relative_to_the_best_baseline_of_each_seed() -> None:
    content = results({**BEHIND, "tandem": BEHIND["tandem"] | {"overall": 0.95}})
    rates = {"tandem": [3.0, 3.0, 3.0], "plain": [2.0, 1.0, 1.0], "static-split": [1.0, 1.5, 1.5]}
    content["max_goodput_rate"] = [
        {"system": name, "target": 0.9, "rps": sorted(found)[1], "per_seed": found, "seeds": [1, 2, 3]}
        for name, found in rates.items()
    ]
    lines = comparison_tables.ahead_table(compared(content))
    assert "| 2.00\N{MULTIPLICATION SIGN} (1.50\N{MULTIPLICATION SIGN} to 2.00" in lines[2]
    del content["max_goodput_rate"][1]
    assert "| unknown: a baseline has no valid runs near it |" in "".join(
        comparison_tables.ahead_table(compared(content))
    )


def test_a_comparison_that_is_lost_at_every_load_is_not_among_the_wins() -> None:
    assert len(comparison_tables.ahead_table(compared(results(BEHIND)))) == len(["head", "line", "end"])
    ahead = {**BEHIND, "tandem": BEHIND["tandem"] | {"overall": 0.95}}
    assert LINK in comparison_tables.ahead_table(compared(results(ahead)))[2]


def test_a_mechanism_that_costs_is_negative() -> None:
    lines = comparison_tables.mechanisms_table(compared(results(BEHIND)))
    text = "without forecasts of embedding work"
    assert lines[2] == f"| tandem-no-forecast ({text}) | 50 %: -1.0 | {LINK} |"
    small = {**BEHIND, "tandem-no-forecast": BEHIND["tandem"] | {"overall": 0.893}}
    assert comparison_tables.mechanisms_table(compared(results(small)))[2:] == [
        "", f"Less than a point at every load: tandem-no-forecast ({LINK}).", ""
    ]  # fmt: skip


def test_what_tandem_lacks_gains_points_and_hindsight_is_stated_beside_it() -> None:
    content = results(BEHIND)
    assert comparison_tables.what_if_table(compared(content))[2:] == [""]
    content["systems"] = [
        system | {"kind": "what-if", "description": ""} if system["name"] == "tandem-no-forecast" else system
        for system in content["systems"]
    ]
    for run in content["runs"]:
        run["bound"] = {"attainment": 0.98, "feasible": 0.88}
    assert comparison_tables.what_if_table(compared(content))[2:-1] == [
        f"| tandem-no-forecast | 50 %: +1.0 | {LINK} |",
        f"| the best schedule with hindsight that was found | 50 %: -2.0 | {LINK} |",
        f"| the bound that no schedule exceeds | 50 %: +8.0 | {LINK} |",
    ]


def test_the_summary_counts_cells_ahead_and_behind() -> None:
    ahead = {**BEHIND, "tandem": BEHIND["tandem"] | {"overall": 0.95}}
    both = compared(results(BEHIND)) + compared(results(ahead))
    assert comparison_tables.summary(both) == (
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
    assert [(loss.size, loss.against) for loss in found] == [
        ("-4.0", "best of all"), ("-0.1", "round robin"), ("-7.1", "round robin"),
    ]  # fmt: skip
    assert found[0].where == "8 boxes at 37/s, reports every 0.2 s"
    assert found[1].reason == "less than the range of the seeds"
    assert "what the others have sent" in found[2].reason


def test_sessions_lose_by_homes_that_are_left_or_kept_in_vain() -> None:
    def row(policy: str, routers: int, met: float, cached: float) -> dict[str, Any]:
        found = {"policy": policy, "routers": routers, "met_percent": met, "cached_percent": cached}
        return {"cell": "turns", "met_spread": 0.5, **found}

    rows = [row("TANDEM", 1, 67.0, 26.0), row("PREFIX_STICKY", 1, 74.0, 36.0)]
    rows += [row("TANDEM", 4, 95.0, 0.1), row("LEAST_CONNECTIONS", 4, 97.0, 0.0)]
    left, useless = other_losses.policies({"boxes": [8], "rate_per_box": 37.0, "rows": rows})
    assert (left.where, useless.where) == (
        "8 boxes at 37/s, turns, 1 router",
        "8 boxes at 37/s, turns, 4 routers",
    )
    assert "leaves a box" in left.reason and "nothing of its prompt" in useless.reason


def test_a_cell_whose_loss_was_examined_states_the_reason_that_was_found() -> None:
    cell = "recorded answers over passages, with the prefixes of the recording"
    own = {"cell": cell, "policy": "TANDEM", "met_percent": 88.0, "met_spread": 2.5, "cached_percent": 87.8}
    rows = [own, own | {"policy": "ROUND_ROBIN", "met_percent": 95.0, "cached_percent": 88.3}]
    rates = {"rate_per_box": 20.0, "rate_per_box_by_cell": {cell: 8.0}}
    (loss,) = other_losses.policies({"boxes": [64], "rows": rows, **rates})
    assert loss.where == f"64 boxes at 8/s, {cell}" and "every box has them" in loss.reason


def test_a_server_that_takes_longer_is_a_loss_also_where_the_runs_do_not_agree() -> None:
    def ratio(low: float, middle: float, high: float) -> dict[str, float]:
        return {"min": low, "median": middle, "max": high}

    even = {
        name: ratio(1.0, 1.0, 1.0) for name in ("median_ttft_ratio", "median_tpot_ratio", "throughput_ratio")
    }
    half = even | {"median_ttft_ratio": ratio(1.1, 1.2, 1.3)}
    full = even | {"throughput_ratio": ratio(0.8, 0.96, 1.1), "median_tpot_ratio": ratio(0.8, 0.9, 1.1)}
    content = {"server_ratios": {"half": half, "nine_tenths": even, "saturated": full}}
    assert [(loss.where, loss.size[:4], loss.reason) for loss in other_losses.http_overhead(content)] == [
        ("TTFT at half of vLLM's rate", "1.20", "not examined"),
        ("throughput saturated", "0.96", "either is ahead in some of the runs"),
    ]


def test_workflows_are_lost_against_the_best_budgets() -> None:
    kinds = {"shares": "tandem", "budgets a": "baseline", "budgets b": "baseline"}
    content = {
        "experiment": {"name": "workflow-trace"},
        "systems": [
            {"name": name, "kind": kind, "description": "what answer() states" if kind == "tandem" else ""}
            for name, kind in kinds.items()
        ],
        "runs": [
            {"system": name, "load": load, "seed": 1, "valid": True, "attainment": {"answers": kept}}
            for load, shares in ((1.0, (0.9, 0.8, 0.5)), (1.5, (0.5, 0.4, 0.6)))
            for name, kept in zip(kinds, shares, strict=True)
        ],
    }
    (loss,) = other_losses.workflows(content)
    assert loss[:2] == ("workflows kept with shares", "RAGPulse, 150 % load")
    assert (loss.size, loss.against, loss.reason) == (
        "-10.0",
        "budgets b",
        "ahead on 0 of 1 seeds; the best budgets are known only afterwards",
    )


def test_the_table_of_the_proposal_names_what_is_not_measured(tmp_path: Path) -> None:
    (tmp_path / "traces.json").touch()
    lines = proposal_table.table(tmp_path, str)
    (row,) = (line for line in lines if "1: recorded arrivals" in line)
    assert "| traces; **not measured:** traces-code, workflow-trace |" in row
    assert "traces" not in proposal_table.missing(tmp_path)
