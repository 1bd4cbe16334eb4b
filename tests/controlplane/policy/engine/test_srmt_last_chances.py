"""When `srmt` tests again whether a waiting request can still meet its SLO."""

import pytest

from controlplane.core.clock import Instant, milliseconds, seconds
from controlplane.core.pool_view import Pace
from controlplane.core.slo import Slo
from controlplane.policy.engine import srmt
from controlplane.policy.engine.interface import EngineView
from controlplane.policy.engine.options import EngineOptions
from controlplane.policy.engine.request_state import RequestState
from controlplane.policy.engine.running_batch import RunningBatch
from tests.example_requests import a_request

PACE = Pace(step=milliseconds(30), per_prompt_token=milliseconds(0.15))
A_DAY = Slo(e2e=seconds(86_400))


def full_at(now: Instant) -> EngineView:
    """An engine without a free slot, so that every request waits."""
    return EngineView(now, PACE, 16, 1_000, 0, 0, 0, RunningBatch())


def waits(name: str, slo: Slo = A_DAY) -> RequestState:
    return RequestState(a_request(name, 100, 50, slo=slo), 50)


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> srmt.ShortestRemainingMemoryTime:
    monkeypatch.setattr(srmt, "_MOST_CHECKS", 100)
    return srmt.ShortestRemainingMemoryTime(EngineOptions())


def test_checks_of_requests_that_have_ended_do_not_add_up_until_their_deadlines(policy):
    kept = [waits(f"kept-{number}") for number in range(5)]
    for state in kept:
        policy.enqueue(state)
    for number in range(1_000):
        policy.enqueue(state := waits(f"ended-{number}"))
        policy.plan(full_at(Instant(0)))
        policy.dequeue(state)
        assert len(policy._checks) <= 100 + 2 * (len(kept) + 1)
    assert {state.request.id for state in kept} <= {name for _, name in policy._checks}


def test_a_waiting_request_is_found_late_although_others_have_ended(policy):
    urgent = waits("urgent", Slo(ttft=seconds(2)))
    policy.enqueue(urgent)
    for number in range(200):
        policy.enqueue(state := waits(f"ended-{number}"))
        policy.plan(full_at(Instant(0)))
        policy.dequeue(state)
    assert not policy._is_lost_by_id["urgent"]
    policy.plan(full_at(Instant(seconds(3))))
    assert policy._is_lost_by_id["urgent"]
