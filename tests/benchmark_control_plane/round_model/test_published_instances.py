"""The round model equals the reference: starts exactly, continuous figures to the digit."""

import json
from pathlib import Path
from typing import Any

import pytest

from backends.cost_models.step_time import LLAMA2_70B_TP1, STEP_TIME_FORMS, tile
from benchmark_control_plane.round_model.schedules import PolicySetting, Schedule, run_policy
from benchmark_control_plane.round_model.workloads import RoundRequest

FIXTURES = json.loads((Path(__file__).parents[2] / "golden/scheduling.json").read_text())

NAMES = {
    "mcsf": "mc-sf",
    "mcbench": "mc-benchmark",
    "alpha": "alpha-protection",
    "fcfs_reserve": "fcfs-reserve",
}


def round_requests(requests: list[dict[str, Any]]) -> list[RoundRequest]:
    return [RoundRequest(r["a"], r["s"], r["o"], r.get("pred", r["o"])) for r in requests]


def columns(case: dict[str, Any]) -> list[RoundRequest]:
    predicted = case.get("pred", case["o"])
    return [RoundRequest(*row) for row in zip(case["a"], case["s"], case["o"], predicted, strict=True)]


def run(requests: list[dict[str, Any]], memory: int, policy: str) -> Schedule:
    return run_policy(round_requests(requests), memory, PolicySetting(policy))


@pytest.mark.parametrize(
    "case", FIXTURES["exact"] + FIXTURES["large"], ids=lambda c: f"{c['model']}-{c['seed']}"
)
@pytest.mark.parametrize(("key", "policy"), [("mcsf", "mc-sf"), ("mcbench", "mc-benchmark")])
def test_starts_equal_the_reference(case: dict[str, Any], key: str, policy: str) -> None:
    schedule = run(case["requests"], case["M"], policy)
    assert schedule.start == case[f"{key}_start"]
    assert schedule.total_latency == case[key]


def test_shortest_first_is_not_optimal_even_when_all_arrive_at_once() -> None:
    case = FIXTURES["counterexample_semi_online"]
    schedule = run(case["requests"], case["M"], "mc-sf")
    assert (schedule.start, schedule.total_latency) == (case["mcsf_start"], case["mcsf"])


@pytest.mark.parametrize("case", FIXTURES["theorem41"])
def test_one_long_request_blocks_many_short_ones(case: dict[str, Any]) -> None:
    short = {key: case["short"][key] for key in "aso"}
    schedule = run([case["long"], *[short] * case["short"]["count"]], case["M"], "mc-sf")
    assert schedule.total_latency == case["mcsf"]


@pytest.mark.parametrize("case", FIXTURES["continuous"])
def test_continuous_runs_equal_the_reference(case: dict[str, Any]) -> None:
    for expected in case["runs"]:
        step_time = STEP_TIME_FORMS[expected["time"]](*expected["params"])
        setting = PolicySetting(NAMES[expected["policy"]], alpha=expected["alpha"], step_time=step_time)
        schedule = run_policy(columns(case), case["M"], setting)
        assert schedule.mean_latency == pytest.approx(expected["mean"], rel=1e-12), expected
        got = (schedule.totals.rounds, schedule.totals.max_usage, schedule.totals.clears)
        assert got == (expected["rounds"], expected["max_usage"], expected["clears"]), expected
        assert max(schedule.finish) == pytest.approx(expected["makespan"], rel=1e-12)


@pytest.mark.parametrize("case", FIXTURES["prediction"])
def test_wrong_predictions_give_the_reference_latency(case: dict[str, Any]) -> None:
    setting = PolicySetting("mc-sf", alpha=case["alpha"], step_time=tile(*LLAMA2_70B_TP1))
    schedule = run_policy(columns(case), case["M"], setting)
    assert schedule.mean_latency == pytest.approx(case["mean"], rel=1e-12)
    assert (schedule.totals.rounds, schedule.totals.clears) == (case["rounds"], case["clears"])


@pytest.mark.long
def test_tandem_beats_shortest_first_on_the_papers_sizes() -> None:
    to_best, to_shortest = [], []
    for case in FIXTURES["large"]:
        total = run(case["requests"], case["M"], "tandem").total_latency
        to_best.append(total / case["best_known"])
        to_shortest.append(total / case["mcsf"])
    assert sum(to_best) / len(to_best) <= 1.035
    assert max(to_shortest) <= 1.01


def test_idle_rounds_are_skipped_and_arrivals_rounded_up() -> None:
    schedule = run_policy([RoundRequest(0, 1, 2, 2), RoundRequest(7.5, 1, 2, 2)], 10, PolicySetting("mc-sf"))
    assert schedule.start == [0, 8]
    assert schedule.latency == [2, 2.5]
    assert schedule.totals.rounds == 4
