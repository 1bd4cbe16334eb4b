"""The engine view's two ceilings: starts within the quota, growth up to the use ceiling."""

from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.clock import Duration, Instant
from controlplane.core.pool_view import Pace
from controlplane.policy.engine.interface import EngineView, StepPlan
from controlplane.policy.engine.request_state import RequestState
from controlplane.policy.engine.running_batch import RunningBatch
from tests.example_requests import a_request

BLOCK = 16
blocks = st.integers(0, 100)


def view_of(quota: int, use_ceiling: int | None, used: int, growth: int = 0) -> EngineView:
    pace = Pace(Duration(0), Duration(0))
    return EngineView(
        Instant(0), pace, BLOCK, quota, used, growth, 64, RunningBatch(), use_ceiling=use_ceiling
    )


def state_of(name: str, needed: int, held: int = 0) -> RequestState:
    state = RequestState(a_request(name, needed * BLOCK - 1, 10), 10)
    state.held = held
    return state


@given(quota=blocks, more=blocks, used=blocks, growth=blocks)
def test_starts_end_at_the_quota_and_preemption_begins_at_the_use_ceiling(quota, more, used, growth):
    view = view_of(quota, quota + more, used, growth)
    needed = used + growth
    assert view.free == (max(0, quota - needed) if needed <= quota + more else quota + more - needed)
    assert view_of(quota, None, used, growth).free == quota - needed


@given(
    quota=blocks,
    more=st.integers(1, 100),
    used=blocks,
    offer=st.lists(st.integers(1, 30)),
    freed=st.lists(blocks, max_size=3),
)
def test_admitted_requests_raise_use_above_neither_quota_nor_present_use(quota, more, used, offer, freed):
    view = view_of(quota, quota + more, used)
    victims = [state_of(f"v{number}", 1, held) for number, held in enumerate(freed)]
    plan = StepPlan(victims, [state_of(f"o{number}", needed) for number, needed in enumerate(offer)])
    admitted = view.admitted(plan)
    after = used - sum(freed) + sum(map(view.need, admitted))
    assert admitted == plan.offer[: len(admitted)]
    assert not admitted or after <= view.ceiling <= max(quota, used)
    if len(admitted) < len(offer):
        assert after + view.need(plan.offer[len(admitted)]) > view.ceiling


def test_the_whole_offer_starts_where_growth_ends_at_the_quota():
    plan = StepPlan(offer=[state_of("a", 8), state_of("b", 1)])
    assert view_of(8, 8, used=0).admitted(plan) == plan.offer


def test_any_request_within_the_quota_starts_in_an_idle_engine():
    view = view_of(8, 64, used=0)
    assert view.admitted(StepPlan(offer=[state_of("whole", 8)]))
    assert not view.admitted(StepPlan(offer=[state_of("more", 9)]))
