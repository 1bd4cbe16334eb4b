"""Every policy of the round model keeps to the memory, finishes all requests and ignores feeding order."""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmark_control_plane.round_model.policies.mcsf_and_baselines import by_deadline, by_slack
from benchmark_control_plane.round_model.policies.policy_table import STEP_POLICIES
from benchmark_control_plane.round_model.policies.step_policy import Candidate, StepOptions
from benchmark_control_plane.round_model.schedules import (
    PolicySetting,
    Schedule,
    build_policy,
    run_policy,
    sorted_arrivals,
)
from benchmark_control_plane.round_model.simulator import NoProgress, simulate
from benchmark_control_plane.round_model.workloads import RoundRequest

MEMORY = 24
MAY_REPEAT = {"alpha-protection", "alpha-beta"}


# Requests that run longer than predicted, and two that arrive while the predicted sum would still admit them.
OUTGROWN = [RoundRequest(0, 0, 1, 1)] * 2 + [RoundRequest(0, 0, 2, 1)] * 3
OUTGROWN += [RoundRequest(0, 4, 2, 1), RoundRequest(1, 5, 1, 1), RoundRequest(1, 6, 1, 1)]


@st.composite
def instances(draw: st.DrawFn, *, exact: bool = False) -> list[RoundRequest]:
    def request() -> RoundRequest:
        prompt = draw(st.integers(0, 6))
        output = draw(st.integers(1, MEMORY - prompt))
        predicted = output if exact else draw(st.integers(1, 2 * MEMORY))
        return RoundRequest(draw(st.integers(0, 20)), prompt, output, predicted)

    return [request() for _ in range(draw(st.integers(1, 25)))]


def run(requests: list[RoundRequest], policy: str, alpha: float) -> Schedule | None:
    try:
        return run_policy(requests, MEMORY, PolicySetting(policy, alpha, beta=0.4, seed=7))
    except NoProgress:
        assert policy in MAY_REPEAT
        return None


@pytest.mark.long
@pytest.mark.parametrize("policy", sorted(STEP_POLICIES))
@settings(max_examples=30)
@given(requests=instances(), alpha=st.sampled_from([0.0, 0.2, 0.9]))
@example(requests=OUTGROWN, alpha=0.0)
def test_memory_holds_and_all_requests_finish(
    policy: str, requests: list[RoundRequest], alpha: float
) -> None:
    schedule = run(requests, policy, alpha)
    if schedule is None:
        return
    assert schedule.totals.max_usage <= MEMORY
    assert schedule.totals.finished == len(requests)
    for request, start, finish in zip(requests, schedule.start, schedule.finish, strict=True):
        assert start >= request.arrival
        assert finish == start + request.output


@pytest.mark.long
@pytest.mark.parametrize("policy", sorted(set(STEP_POLICIES) - {"alpha-protection", "alpha-beta", "fcfs"}))
@settings(max_examples=25)
@given(requests=instances(exact=True))
def test_exact_predictions_never_overflow(policy: str, requests: list[RoundRequest]) -> None:
    schedule = run(requests, policy, 0.0)
    assert schedule is not None
    assert schedule.totals.clears == 0


@pytest.mark.long
@pytest.mark.parametrize("policy", sorted(STEP_POLICIES))
@settings(max_examples=25)
@given(requests=instances(exact=True), data=st.data())
def test_feeding_order_changes_nothing(
    policy: str, requests: list[RoundRequest], data: st.DataObject
) -> None:
    fed = sorted_arrivals(requests)
    shuffled = sorted(data.draw(st.permutations(fed)), key=lambda one: one.candidate.arrival)
    traces = []
    for one in (fed, shuffled):
        trace: list[tuple[int, float]] = []
        setting = PolicySetting(policy, alpha=0.3, beta=0.4, seed=7)
        try:
            simulate(
                one,
                memory=MEMORY,
                policy=build_policy(setting, MEMORY),
                step_time=None,
                on_finish=lambda arrival, start, _, trace=trace: trace.append((arrival.candidate.id, start)),
            )
        except NoProgress:
            assert policy in MAY_REPEAT
        traces.append(sorted(trace))
    assert traces[0] == traces[1]


@pytest.mark.parametrize("policy", sorted(STEP_POLICIES))
def test_policies_do_not_see_the_true_length(policy: str) -> None:
    """Two instances that differ only in the true lengths have equal starts."""
    requests = [RoundRequest(0, 2, 6, 6) for _ in range(8)]
    secret = [replace(request, output=5) for request in requests]
    first = [start for start in run(requests, policy, 0.7).start if start < 5]
    assert first == [start for start in run(secret, policy, 0.7).start if start < 5]


def test_shortest_first_stops_at_the_first_that_does_not_fit() -> None:
    requests = [RoundRequest(0, 1, 9, 9), RoundRequest(1, 15, 2, 2), RoundRequest(1, 1, 3, 3)]
    assert run(requests, "mc-sf", 0.0).start == [0, 1, 1]
    blocked = [RoundRequest(0, 1, 9, 9), RoundRequest(1, 19, 2, 2), RoundRequest(1, 1, 3, 3)]
    assert run(blocked, "mc-sf", 0.0).start == [0, 9, 9]
    assert run(blocked, "mc-sf-skip", 0.0).start == [0, 9, 1]


def test_overflow_clears_by_the_rule_of_the_policy() -> None:
    requests = [RoundRequest(0, 1, 20, 2), RoundRequest(0, 1, 20, 2)]
    latest = run(requests, "fcfs", 0.0)
    assert latest.start[0] == 0 < latest.start[1]
    assert latest.totals.cleared == latest.totals.clears >= 1
    everyone = run(requests, "mc-sf", 0.0)
    assert everyone.totals.cleared == 2 * everyone.totals.clears >= 2


@pytest.mark.parametrize(("alpha", "budget"), [(0.0, 100), (0.1, 90), (0.55, 45), (0.8, 20), (0.995, 0)])
def test_the_budget_is_the_exact_share_of_the_memory(alpha: float, budget: int) -> None:
    assert StepOptions(memory=100, alpha=alpha).budget == budget


def test_a_request_over_the_budget_runs_exclusively() -> None:
    requests = [RoundRequest(0, 2, 20, 20), RoundRequest(0, 1, 3, 3)]
    for policy in ("mc-sf", "mc-sf-skip", "tandem"):
        assert run(requests, policy, 0.5).start == [3, 0], policy


def test_edf_and_least_slack_order_by_deadline() -> None:
    options = StepOptions(memory=MEMORY, step_time=2.0)
    soon = Candidate(1, 5.0, 1, 3, due=9.0)
    late = Candidate(2, 4.0, 1, 10, due=20.0)
    assert by_deadline(soon, options) < by_deadline(late, options)
    assert by_slack(late, options) < by_slack(soon, options)
    second_first = run([RoundRequest(0, 1, 20, 20, 90), RoundRequest(0, 1, 20, 20, 30)], "edf", 0.0).start
    assert second_first[1] == 0 < second_first[0]
