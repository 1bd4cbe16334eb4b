"""The hindsight optimum: proofs on small instances, feasible schedules and correct labels on all."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmark_control_plane.round_model.instance import (
    HindsightInstance,
    HindsightJob,
    read_instance,
)

pytest.importorskip("ortools", reason="the optimum needs the `bench` extra")

from benchmark_control_plane.optimum import best_schedule, main
from benchmark_control_plane.round_model.optimum_bound import fluid_latency_bound, lp_bound
from benchmark_control_plane.round_model.optimum_search import initial_orders, search

pytestmark = pytest.mark.long

GOLDEN = json.loads((Path(__file__).parents[2] / "golden/scheduling.json").read_text())
EXACT, LARGE = GOLDEN["exact"], GOLDEN["large"]
QUICK = {1, 4, 8, 11, 14}
"""Instances proven in well under a second; the others take seconds to minutes."""


def first_violation(instance: HindsightInstance, start: Sequence[int]) -> str | None:
    """Describes the first constraint that the schedule violates; None if it is feasible."""
    used: dict[int, int] = {}
    for i, (job, p) in enumerate(zip(instance.jobs, start, strict=True)):
        if p < job.arrival:
            return f"request {i} starts in round {p}, before its arrival at {job.arrival}"
        for k in range(1, job.output + 1):
            used[p + k] = used.get(p + k, 0) + job.prompt + k
    over = [t for t, cells in sorted(used.items()) if cells > instance.memory]
    return f"round {over[0]} holds {used[over[0]]} of {instance.memory} cells" if over else None


def recorded(*, quick: bool) -> list[Any]:
    return [pytest.param(case, id=str(i)) for i, case in enumerate(EXACT) if (i in QUICK) is quick]


def check_proven(case: dict[str, Any], seconds: float) -> None:
    instance = read_instance(case)
    found = best_schedule(instance, seconds=seconds)
    assert first_violation(instance, found["start"]) is None
    assert found["total_latency"] == case["opt"] == instance.total_latency(found["start"])
    assert (found["proof"], found["lower_bound"]) == ("optimal", case["opt"])


@pytest.mark.long
@pytest.mark.parametrize("case", recorded(quick=True))
def test_small_instances_are_proven(case: dict[str, Any]) -> None:
    check_proven(case, seconds=60)


@pytest.mark.slow
@pytest.mark.parametrize("case", recorded(quick=False))
def test_every_recorded_optimum(case: dict[str, Any]) -> None:
    instance = read_instance(case)
    if len(instance.jobs) <= 12:
        check_proven(case, seconds=300)
        return
    found = best_schedule(instance, seconds=60)
    assert found["lower_bound"] <= case["opt"] <= found["total_latency"] <= 1.01 * case["opt"]


def test_shortest_first_is_not_optimal_even_when_all_arrive_at_once() -> None:
    case = GOLDEN["counterexample_semi_online"]
    instance = read_instance(case)
    found = best_schedule(instance, seconds=30)
    assert (found["total_latency"], found["proof"]) == (case["opt"], "optimal")
    assert first_violation(instance, case["opt_start"]) is None
    assert instance.total_latency(case["opt_start"]) == case["opt"] < case["mcsf"]


@pytest.mark.parametrize("case", GOLDEN["theorem41"])
def test_with_hindsight_a_long_request_waits_for_many_short_ones(case: dict[str, Any]) -> None:
    short = case["short"]
    jobs = [HindsightJob(case["long"]["a"], case["long"]["s"], case["long"]["o"])]
    jobs += short["count"] * [HindsightJob(short["a"], short["s"], short["o"])]
    instance = HindsightInstance(case["M"], tuple(jobs))
    found = best_schedule(instance, seconds=1)
    assert first_violation(instance, found["start"]) is None
    assert found["lower_bound"] <= found["total_latency"] <= case["offline_feasible"] < case["mcsf"]


@pytest.mark.parametrize("case", [*EXACT, *LARGE], ids=range(len(EXACT) + len(LARGE)))
def test_recorded_schedules_keep_the_rules_and_bounds(case: dict[str, Any]) -> None:
    instance = read_instance(case)
    start = case.get("opt_start") or case["best_known_start"]
    best = case.get("opt") or case["best_known"]
    assert first_violation(instance, start) is None
    assert instance.total_latency(start) == best
    assert fluid_latency_bound(instance) <= best


@pytest.mark.parametrize("case", EXACT, ids=range(len(EXACT)))
def test_lp_bound_lies_between_the_fluid_bound_and_the_optimum(case: dict[str, Any]) -> None:
    instance = read_instance(case)
    bound = lp_bound(instance, case["mcsf_start"], seconds=60)
    assert bound is not None
    assert fluid_latency_bound(instance) - 1e-6 <= bound <= case["opt"] + 1e-6


def test_large_instances_are_labelled_best_known() -> None:
    instance = read_instance(LARGE[12])
    found = best_schedule(instance, seconds=1)
    assert first_violation(instance, found["start"]) is None
    assert found["proof"] == "best-known"
    assert found["lower_bound"] < found["total_latency"]
    assert found["lower_bound"] <= LARGE[12]["best_known"]


@st.composite
def instances(draw: st.DrawFn) -> HindsightInstance:
    memory = draw(st.integers(3, 20))
    prompts = draw(st.lists(st.integers(0, min(5, memory - 1)), min_size=1, max_size=9))
    jobs = [
        HindsightJob(draw(st.integers(0, 80)) / 4, prompt, draw(st.integers(1, memory - prompt)))
        for prompt in prompts
    ]
    return HindsightInstance(memory, tuple(jobs))


@given(instances(), st.integers(0, 5))
@settings(deadline=None)
def test_searched_schedules_are_feasible_and_above_the_bounds(instance: HindsightInstance, seed: int) -> None:
    calls = iter(range(3))
    start = search(instance, initial_orders(instance), seed=seed, stop=lambda: next(calls, None) is None)
    assert first_violation(instance, start) is None
    assert instance.total_latency(start) >= fluid_latency_bound(instance) - 1e-6
    bound = lp_bound(instance, start, seconds=30)
    assert bound is None or instance.total_latency(start) >= bound - 1e-6


@given(instances().filter(lambda i: len(i.jobs) <= 4))
@settings(deadline=None, max_examples=15)
def test_proofs_agree_with_brute_force(instance: HindsightInstance) -> None:
    found = best_schedule(instance, seconds=20)
    assert first_violation(instance, found["start"]) is None
    assert found["proof"] == "optimal"
    assert found["total_latency"] == pytest.approx(least_total(instance))


def least_total(instance: HindsightInstance) -> float:
    """Least total latency over all combinations of starts within the length of a serial schedule."""
    jobs = instance.jobs
    horizon = max(j.release for j in jobs) + sum(j.output for j in jobs)
    best = float("inf")

    def place(at: int, used: list[int], total: float) -> None:
        nonlocal best
        if at == len(jobs):
            best = min(best, total)
            return
        job = jobs[at]
        for start in range(job.release, horizon - job.output + 1):
            latency = total + start + job.output - job.arrival
            if latency >= best:
                return
            grown = used.copy()
            for k in range(1, job.output + 1):
                grown[start + k] += job.prompt + k
            if max(grown) <= instance.memory:
                place(at + 1, grown, latency)

    place(0, [0] * (horizon + 1), 0.0)
    return best


def test_checker_detects_overflow_and_early_starts() -> None:
    instance = HindsightInstance(5, (HindsightJob(0, 1, 3), HindsightJob(2, 1, 3)))
    assert first_violation(instance, [0, 3]) is None
    assert "round 3 holds 6 of 5" in str(first_violation(instance, [0, 2]) or "")
    assert "before its arrival" in str(first_violation(instance, [0, 1]))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "instance.json"
    path.write_text(json.dumps({"M": 5, "requests": [{"a": 0, "s": 1, "o": 3}]}))
    assert main([str(path), "--seconds", "5"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "total_latency": 3.0, "start": [0], "proof": "optimal", "lower_bound": 3.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"M": 5, "requests": [{"a": 0, "s": 3, "o": 3}]}, "s + o = 6 exceeds M=5"),
        ({"M": 5, "requests": [{"a": 0, "s": -1, "o": 3}]}, "requests[0].s=-1"),
        ({"M": 5, "requests": [{"a": 0, "s": 1, "o": 0}]}, "requests[0].o=0"),
        ({"M": 5, "requests": [{"a": -1, "s": 1, "o": 1}]}, "requests[0].a=-1"),
        ({"M": 5, "requests": [3]}, "requests[0]=3"),
        ({"requests": []}, "M=None"),
        ({"M": 5}, "requests: a list"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: Any, says: str
) -> None:
    path = tmp_path / "instance.json"
    path.write_text(json.dumps(content))
    assert main([str(path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert says in err


def test_bad_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.json"), "--seconds", "-1"]) == 2
    assert "--seconds -1: must be a positive number" in capsys.readouterr().err
