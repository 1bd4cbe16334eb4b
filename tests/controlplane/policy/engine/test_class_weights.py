"""Class weights in the engine orderings: order, preemption, cutoff, and no effect where all are equal."""

from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core.clock import Instant, milliseconds, seconds
from controlplane.core.pool_view import Pace
from controlplane.core.slo import MOST_WEIGHT, ServiceClass, Slo
from controlplane.policy.engine.interface import EngineView, StepPlan
from controlplane.policy.engine.options import EngineOptions
from controlplane.policy.engine.request_state import RequestState, memory_time
from controlplane.policy.engine.running_batch import RunningBatch
from controlplane.policy.engine.size_cutoff import SizeCutoff
from controlplane.policy.registry import engine_policy
from tests.example_requests import a_request

BLOCK = 16
NOW = Instant(seconds(100))
PACE = Pace(step=milliseconds(30), per_prompt_token=milliseconds(0.15))


def waits(
    name: str,
    *,
    priority: int = 0,
    weight: float | None = None,
    prompt: int = 100,
    predicted: int = 50,
    ago_ms: float = 100,
    ttft_ms: float | None = 3_000,
) -> RequestState:
    slo = Slo(ttft=None if ttft_ms is None else milliseconds(ttft_ms))
    arrival = Instant(NOW - milliseconds(ago_ms))
    request = a_request(name, prompt, 400, slo=slo, priority=priority, weight=weight, arrival=arrival)
    return RequestState(request, predicted)


def runs(name: str, done: int = 10, **life: float) -> RequestState:
    state = waits(name, **life)
    state.stamp(NOW, done)
    return state


def view_of(running: list[RequestState], free: int, slots: int = 64) -> EngineView:
    for state in running:
        state.held = -(-state.tokens // BLOCK)
    used = sum(state.held for state in running)
    growth = sum(state.tokens % BLOCK == 0 for state in running)
    return EngineView(NOW, PACE, BLOCK, used + growth + free, used, growth, slots, RunningBatch(running))


def plan(
    ordering: str, waiting: list[RequestState], running: list[RequestState], free: int, slots: int = 64
) -> StepPlan:
    policy = engine_policy(EngineOptions(ordering=ordering))
    for state in waiting:
        policy.enqueue(state)
    return policy.plan(view_of(running, free, slots))


# Of a TTFT of 3 s three quarters have passed.
URGENT_MS = 2_400


def test_an_urgent_request_takes_the_slot_of_the_largest_of_a_smaller_weight():
    small, large = runs("a", predicted=60), runs("b", predicted=300)
    urgent = waits("urgent", priority=2, prompt=10, predicted=5, ago_ms=URGENT_MS)
    found = plan("srmt", [urgent], [small, large], free=100, slots=0)
    assert (found.preempt, found.offer) == ([large], [urgent])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"priority": 0}, "its class has no greater weight"),
        ({"ago_ms": 2_000}, "it has time"),
        ({"prompt": 5_000, "predicted": 3_000}, "it is larger"),
    ],
)
def test_no_slot_is_taken_otherwise(changes: dict[str, float], reason: str):
    urgent = waits("urgent", **{"priority": 2, "prompt": 10, "predicted": 5, "ago_ms": URGENT_MS, **changes})
    found = plan("srmt", [urgent], [runs("a", predicted=60), runs("b", predicted=300)], free=1_000, slots=0)
    assert (found.preempt, found.offer) == ([], []), reason


def test_each_urgent_request_takes_one_slot_and_those_of_its_own_class_are_left():
    batch, own = (
        [runs(f"batch-{n}", predicted=200 + n) for n in range(3)],
        runs("own", priority=2, predicted=390),
    )
    urgent = [waits(f"urgent-{n}", priority=2, prompt=10, predicted=5, ago_ms=URGENT_MS) for n in range(5)]
    found = plan("srmt", urgent, [*batch, own], free=100, slots=0)
    assert found.preempt == batch[::-1] and found.offer == urgent[:3]


def test_a_smaller_request_of_a_low_class_keeps_no_higher_class_from_a_slot():
    low = waits("a-low", prompt=10, predicted=1, ago_ms=URGENT_MS)
    high = waits("b-high", priority=2, prompt=10, predicted=50, ago_ms=URGENT_MS)
    running = [runs("runs", predicted=300)]
    found = plan("srmt", [low, high], running, free=100, slots=0)
    assert (found.preempt, found.offer) == (running, [high])


@pytest.mark.parametrize("many", [{"priority": 0, "ago_ms": URGENT_MS}, {"priority": 1, "ago_ms": 2_000}])
def test_many_smaller_requests_keep_no_higher_class_from_a_slot(many: dict[str, float]):
    """Those of the lowest class may take none; the others have time."""
    low = [waits(f"a-{number}", prompt=10, predicted=1, **many) for number in range(40)]
    high = waits("b-high", priority=2, prompt=10, predicted=50, ago_ms=URGENT_MS)
    running = [runs("runs", predicted=300)]
    found = plan("srmt", [*low, high], running, free=100, slots=0)
    assert (found.preempt, found.offer) == (running, [high])


def test_a_free_slot_is_used_before_one_is_taken():
    urgent = [waits(f"urgent-{n}", priority=2, prompt=10, predicted=5, ago_ms=URGENT_MS) for n in range(2)]
    running = [runs("a", predicted=300)]
    found = plan("srmt", urgent, running, free=100, slots=1)
    assert found.preempt == running and found.offer == urgent


@pytest.mark.parametrize("ordering", ["srmt", "apt"])
def test_with_room_for_one_priority_10_starts_before_batch(ordering):
    batch, interactive = waits("a-batch", ago_ms=200), waits("b-interactive", priority=10)
    assert plan(ordering, [batch, interactive], [], free=7).offer == [interactive]


@pytest.mark.parametrize("ordering", ["srmt", "apt"])
def test_a_stated_weight_replaces_the_priority(ordering):
    first, second = waits("a", priority=10, weight=1.0), waits("b", weight=2.0)
    assert plan(ordering, [first, second], [], free=7).offer == [second]


def test_the_weight_of_a_class_is_one_plus_its_priority_unless_stated():
    classes = [ServiceClass("any", Slo(), priority, sheddable=True) for priority in (-3, 0, 2, 10)]
    assert [service_class.weight for service_class in classes] == [1, 1, 3, 11]
    assert ServiceClass("any", Slo(), 10, sheddable=True, stated_weight=0.5).weight == 0.5


@pytest.mark.parametrize("weight", [0.0, -1.0, MOST_WEIGHT + 1, float("nan")])
def test_a_weight_out_of_range_is_an_error(weight):
    with pytest.raises(ValueError, match="must be greater than 0 and at most 1,000"):
        ServiceClass("any", Slo(), 0, sheddable=True, stated_weight=weight)


@settings(max_examples=200)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=2, max_size=2),
    ratio=st.floats(1.0, 50.0),
)
def test_a_high_class_waits_only_for_requests_smaller_by_the_ratio(lengths, ratio):
    """With a free engine the offer is the whole order; the prefill cost counts as memory-time."""
    (low_prompt, low_output), (high_prompt, high_output) = lengths
    low = waits("a", weight=1.0, prompt=low_prompt, predicted=low_output)
    high = waits("b", weight=ratio, prompt=high_prompt, predicted=high_output)
    quota = 1_000
    price = quota * BLOCK * PACE.per_prompt_token / PACE.step
    costs = [memory_time(state.tokens, state.remaining()) + price * state.tokens for state in (low, high)]
    order = plan("srmt", [low, high], [], free=quota).offer
    assert set(order) == {low, high}
    if order[0] is low:
        assert costs[0] * ratio <= costs[1] * (1 + 1e-9)
    else:
        assert costs[0] * ratio >= costs[1] * (1 - 1e-9)


@pytest.mark.parametrize(("weight", "is_preempted"), [(1.0, True), (40.0, False)])
def test_a_running_request_is_preempted_by_its_size_over_its_weight(weight, is_preempted):
    running = runs("runs", weight=weight, prompt=200, predicted=200)
    urgent = waits("urgent", weight=1.0, prompt=50, predicted=30, ago_ms=2_000)
    decided = plan("srmt", [urgent], [running], free=1)
    assert (decided.preempt == [running]) == (decided.offer == [urgent]) == is_preempted


@pytest.mark.parametrize("ordering", ["srmt", "apt"])
def test_for_a_shortage_the_least_weight_is_preempted_first(ordering):
    running = [runs(f"r{number}", weight=weight) for number, weight in enumerate((3.0, 1.0, 2.0))]
    assert plan(ordering, [], running, free=-1).preempt == [running[1]]


def random_case(random: Random, weight: float) -> tuple[list[RequestState], list[RequestState], int]:
    def life() -> dict:
        return {
            "weight": weight,
            "prompt": random.randint(1, 300),
            "predicted": random.randint(1, 200),
            "ago_ms": random.randint(1, 4_000),
            "ttft_ms": random.choice([None, 300, 3_000]),
        }

    running = [runs(f"r{i}", done=random.randint(1, 100), **life()) for i in range(random.randint(0, 40))]
    waiting = [waits(f"w{i}", **life()) for i in range(random.randint(0, 30))]
    return waiting, running, random.randint(-20, 60)


@pytest.mark.parametrize("ordering", ["srmt", "apt"])
@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), weight=st.sampled_from([0.25, 0.5, 2.0, 8.0]))
def test_equal_weights_change_nothing(ordering, seed, weight):
    decided = []
    for each in (1.0, weight):
        chosen = plan(ordering, *random_case(Random(seed), each))
        decided.append(
            [[state.request.id for state in part] for part in (chosen.preempt, chosen.offer, chosen.ranked)]
        )
    assert decided[0] == decided[1]


def cutoff_of(weights: tuple[float, float]) -> SizeCutoff:
    """The cutoff after equal arrivals of two classes that keep 120 % of the memory resident."""
    cutoff, size, memory, step = SizeCutoff(window=200, share=0.75), 10_000.0, 10_000, milliseconds(10)
    apart = milliseconds(10 * size / (1.2 * memory))
    for number in range(200):
        cutoff.arrived(Instant(number * apart), size, 100, weights[number % 2])
    cutoff.update(Instant(199 * apart), memory, step, use=0.75)
    return cutoff


def test_the_cutoff_is_a_size_per_unit_of_weight():
    assert cutoff_of((1.0, 1.0)).size == 10_000.0
    # The class of weight 4 fills 60 % of the memory, so the cutoff falls among the others.
    assert cutoff_of((4.0, 1.0)).size == 10_000.0
    assert cutoff_of((4.0, 2.0)).size == 5_000.0
    assert cutoff_of((1.0, 1.0)).spare == pytest.approx(cutoff_of((4.0, 2.0)).spare)


def test_free_memory_raises_the_largest_size_that_may_start():
    cutoff = cutoff_of((1.0, 1.0))
    assert [cutoff.largest(free) for free in (-0.5, 0.0, 0.5)] == [10_000.0, 10_000.0, 15_000.0]
    assert SizeCutoff(window=200, share=0.75).largest(0.0) == inf


@pytest.mark.parametrize(("waited_ms", "is_served"), [(4_900, False), (5_100, True)])
def test_a_preempted_request_with_no_objective_left_is_served_on_the_aged_share(waited_ms, is_served):
    """It met its TTFT, and small requests take every block that becomes free."""
    policy = engine_policy(EngineOptions(ordering="srmt", starvation_ms=5_000.0))
    paused = waits("paused", ago_ms=waited_ms + 1_000, prompt=60, predicted=300)
    paused.stamp(Instant(NOW - milliseconds(waited_ms)), 10)
    policy.enqueue(paused)
    running = [runs(f"r{number}", prompt=20, predicted=20) for number in range(4)]
    found = policy.plan(view_of(running, free=0))
    assert (found.offer == [paused], len(found.preempt) >= 3) == (is_served, is_served)
    policy.dequeue(paused)
    assert policy.waiting() == 0


def test_a_request_without_an_objective_is_served_on_the_aged_share_after_its_patience():
    """It is above the cutoff of endless small requests, so only the aged share starts it."""
    policy = engine_policy(EngineOptions(ordering="srmt", starvation_ms=5_000.0))
    small = [waits(f"s{number}", ago_ms=100 * number, prompt=20, predicted=20) for number in range(40)]
    for state in small:
        policy.enqueue(state)
    young = waits("young", ttft_ms=None, ago_ms=4_900, prompt=60, predicted=300)
    old = waits("old", ttft_ms=None, ago_ms=5_100, prompt=60, predicted=300)
    for state in (young, old):
        policy.enqueue(state)
    view = EngineView(NOW, PACE, BLOCK, 8, 0, 0, 64, RunningBatch())
    assert policy.plan(view).offer[0] is old
    for state in (young, old, *small):
        policy.dequeue(state)
    assert policy.waiting() == 0
