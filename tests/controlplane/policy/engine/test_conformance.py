"""Engine policies on random states: conformance, equivalence with the gate, and the rules of srmt and apt."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.testing.conformance import check_engine_policy
from controlplane.core.clock import Duration, Instant, milliseconds, scaled, seconds
from controlplane.core.pool_view import Pace, PoolView, Queue, Waiting
from controlplane.core.request import Owner
from controlplane.core.slo import Slo
from controlplane.policy.engine.apt_serve import AptServe
from controlplane.policy.engine.gate_view_adapter import footprint_of, share_of
from controlplane.policy.engine.interface import RANKED, EngineView, StepPlan
from controlplane.policy.engine.options import EngineOptions
from controlplane.policy.engine.request_state import RequestState
from controlplane.policy.engine.running_batch import RunningBatch
from controlplane.policy.engine.srmt import ShortestRemainingMemoryTime
from controlplane.policy.gate.scheduling_cycle import run_cycle
from controlplane.policy.registry import ENGINE_POLICIES, ORDERINGS, engine_policy
from tests.example_requests import a_request

# Per ordering; they share most of their code.
FEWER = settings(max_examples=40)
BLOCK = 16
NOW = Instant(seconds(100))
PACE = Pace(step=milliseconds(30), per_prompt_token=milliseconds(0.15))
EVERY_ORDERING = sorted(ENGINE_POLICIES)
AS_THE_GATE = sorted(ORDERINGS)

lives = st.fixed_dictionaries(
    {
        "prompt": st.integers(1, 300),
        "done": st.integers(0, 100),
        "predicted": st.integers(1, 200),
        "ago_ms": st.integers(0, 20_000),
        "priority": st.integers(0, 2),
        "ttft_ms": st.sampled_from([None, 300, 3_000]),
        "gap_ms": st.sampled_from([None, 1_000]),
    }
)


def progress(name: str, life: dict, *, is_running: bool) -> RequestState:
    arrival = Instant(NOW - milliseconds(life["ago_ms"]))
    ttft = None if life["ttft_ms"] is None else milliseconds(life["ttft_ms"])
    gap = None if life["gap_ms"] is None else milliseconds(life["gap_ms"])
    slo, priority = Slo(ttft=ttft, gap=gap), life["priority"]
    request = a_request(name, life["prompt"], 400, slo=slo, priority=priority, arrival=arrival)
    state = RequestState(request, life["predicted"])
    if is_running and life["done"]:
        state.stamp(Instant(arrival + milliseconds(min(100, life["ago_ms"]))), life["done"])
    return state


def view_of(running: list[RequestState], *, free: int, quota: int | None = None) -> EngineView:
    for state in running:
        state.held = -(-state.tokens // BLOCK)
    used = sum(p.held for p in running)
    growth = sum(p.tokens % BLOCK == 0 for p in running)
    quota = used + free if quota is None else quota
    return EngineView(NOW, PACE, BLOCK, quota, used, growth, 64, RunningBatch(running))


def planned(waiting: list[RequestState], view: EngineView, **options: float) -> StepPlan:
    policy = engine_policy(EngineOptions(**options))
    for state in waiting:
        policy.enqueue(state)
    plan = policy.plan(view)
    for state in plan.offer:
        policy.dequeue(state)
    assert policy.waiting() == len(waiting) - len(plan.offer)
    return plan


batches = st.tuples(st.lists(lives, max_size=12), st.lists(lives, max_size=12), st.integers(0, 60))


@pytest.mark.long
@pytest.mark.parametrize("ordering", EVERY_ORDERING)
def test_engine_policy_conforms(ordering):
    check_engine_policy(lambda: engine_policy(EngineOptions(ordering=ordering)), cases=200)


@FEWER
@given(batch=batches)
def test_srmt_offers_no_more_than_the_free_blocks(batch):
    running = [progress(f"r{i}", life, is_running=True) for i, life in enumerate(batch[0])]
    waiting = [progress(f"w{i}", life, is_running=False) for i, life in enumerate(batch[1])]
    view = view_of(running, free=batch[2])
    plan = planned(waiting, view)
    freed = sum(p.held for p in plan.preempt)
    assert sum(view.need(p) for p in plan.offer) <= max(0, view.free + freed)


@pytest.mark.parametrize("ordering", AS_THE_GATE)
@FEWER
@given(batch=batches, slots=st.sampled_from([0, 1, 3, 64]))
def test_gate_cycle_and_engine_policy_decide_alike(ordering, batch, slots):
    """The gate's cycle and the engine policy give the same order and victims for the same view."""
    running = [progress(f"r{i}", life, is_running=True) for i, life in enumerate(batch[0])]
    waiting = [progress(f"w{i}", life, is_running=False) for i, life in enumerate(batch[1])]
    # Slots can be taken only if requests run.
    view = replace(view_of(running, free=40 + batch[2]), free_slots=slots if running else 64)
    options = EngineOptions(ordering=ordering, look_ahead="all")
    policy, order = engine_policy(options), ORDERINGS[ordering](options.ordering_options())
    line = []
    for state in waiting:
        policy.enqueue(state)
        footprint = footprint_of(state, BLOCK)
        rank = order.rank(state.request, footprint, view.pace)
        line.append(Waiting(state.request, footprint, None, rank, footprint.area))
    line.sort(key=lambda each: each.rank)
    plan = policy.plan(view)
    # The engine skips a request above the quota; the gate never admits it.
    fitting = [w for w in line if -(-(w.request.prompt_tokens + 1) // BLOCK) <= view.quota]
    pool = PoolView({Owner.LLM: share_of(view)}, {Owner.LLM: Queue(tuple(fitting), ())})
    gate = run_cycle(pool, NOW, policy.ahead)
    victims = [victim.request_id for _, admit in gate.dispatches for victim in admit.victims]
    assert [p.request.id for p in plan.offer] == [request_id for request_id, _ in gate.dispatches]
    assert [p.request.id for p in plan.preempt] == victims


def similar_states(
    name: str, random: Random, count: int, prompts: list[int], *, has_packed: bool, has_shared: bool
) -> list[RequestState]:
    """Most states got a token at NOW; several have equal arrivals or sizes, and some share a block."""
    running = []
    for number in range(count):
        life = {
            "prompt": random.choice(prompts),
            "done": random.choice([0, 20, 100]),
            "predicted": 100,
            "ago_ms": random.choice([10, 900, 9_000]),
            "priority": 0,
            "ttft_ms": random.choice([None, 300]),
            "gap_ms": random.choice([None, 1_000]),
        }
        state = progress(f"{name}{number}", life, is_running=True)
        if state.last_token is not None and random.random() < 0.8:
            state.last_token = NOW
        state.block_tokens = random.choice([None, 2 * BLOCK]) if has_packed else None
        state.shared = random.choice([0, 1]) if has_shared else 0
        running.append(state)
    return running


@FEWER
@given(
    random=st.randoms(use_true_random=True),
    counts=st.tuples(st.integers(0, 3 * RANKED), st.integers(0, 30)),
    free=st.integers(-2 * RANKED, 2 * RANKED),
    slots=st.integers(0, 9),
    decay=st.sampled_from([0.0, 0.4, 1.0]),
    has=st.fixed_dictionaries({"has_packed": st.booleans(), "has_shared": st.booleans()}),
)
def test_apt_equals_a_full_sort_by_value(random, counts, free, slots, decay, has):
    running = similar_states("r", random, counts[0], [60, 100, 260], **has)
    # The longest prompts exceed every quota.
    waiting = similar_states("w", random, counts[1], [60, 100, 260, 60_000], **has)
    view = replace(view_of(running, free=free), free_slots=slots, **has)

    def by_value(state: RequestState) -> tuple[float, Instant, str]:
        since = state.request.arrival if state.last_token is None else state.last_token
        weight = decay if state.cannot_meet_slo(NOW, Duration(0)) else 1.0
        value = ((NOW - since) / 1e9 * weight + 1e-9) / view.need(state)
        return (-value, state.request.arrival, state.request.id)

    policy = AptServe(decay)
    for state in waiting:
        policy.enqueue(state)
    plan = policy.plan(view)
    by_rank, victims, free = sorted(running, key=by_value), [], view.free
    while free < 0 and by_rank:
        victims.append(by_rank.pop())
        free += victims[-1].held
    assert plan.preempt == victims
    if view.free < 0:
        assert plan.ranked == by_rank[len(by_rank) - len(plan.ranked) :]
        assert len(plan.ranked) >= min(RANKED, len(by_rank))
    offer: list[RequestState] = []
    for state in sorted(waiting, key=by_value):
        if view.need(state) <= view.quota:
            if view.need(state) > free or len(offer) == slots:
                break
            offer.append(state)
            free -= view.need(state)
    assert plan.offer == offer


class ExhaustiveSrmt(ShortestRemainingMemoryTime):
    """SRMT without shortcuts: tests every waiting request."""

    def _resume(self, draft):
        for state in [state for _, state in self._paused if draft.fits(state)]:
            resumed = draft.view.now + scaled(draft.view.pace.step, 3) + state.prefill(draft.view.pace)
            if draft.fits_for_horizon(state) or (state.deadline() is not None and resumed > state.deadline()):
                draft.start(state)

    def _start_unstarted(self, draft):
        for (size, _, _), state in self._unstarted:
            if draft.slots <= 0:
                return
            if self._is_oversized(state, size):
                self._start_oversized(draft, state, size)
            elif not (draft.fits_for_horizon(state) and draft.start(state)) and self._is_urgent(
                state, draft.view.now
            ):
                draft.start(state) or draft.start_by_preempting(state, self._options.preempt_ratio * size)


def random_state(random: Random, name: str, *, is_running: bool) -> RequestState:
    """A random state; a waiting request is still on time, and mostly urgent."""
    life = {
        "prompt": random.randint(1, 300),
        "done": random.randint(0, 100),
        "predicted": random.randint(1, 200),
        "ago_ms": (ago := random.randint(0, 20_000)),
        "priority": random.randrange(3),
        "ttft_ms": random.choice([None, 300, 3_000]) if is_running else 100 + ago * random.randint(2, 4) // 2,
        "gap_ms": random.choice([None, 1_000]),
    }
    state = progress(name, life, is_running=is_running)
    if not is_running and random.random() < 0.4:
        # It was preempted, in some cases so long ago that its next token is due.
        state.stamp(Instant(NOW - milliseconds(random.randint(0, 1_000))), life["done"] + 1)
    return state


@pytest.mark.long
@pytest.mark.parametrize("cut", [1e15, 4_000.0])
@pytest.mark.parametrize("settle", [0, 12])
def test_skipped_requests_could_not_have_started(settle, cut):
    # Few cases distinguish the two: a request must fail while a larger request with fewer blocks starts.
    random, options = Random(settle), EngineOptions(settle_steps=settle)
    for _ in range(500):
        running = [random_state(random, f"r{i}", is_running=True) for i in range(random.randint(0, 20))]
        waiting = [random_state(random, f"w{i}", is_running=False) for i in range(random.randint(0, 30))]
        view = replace(view_of(running, free=random.randint(-9, 60)), free_slots=random.choice([2, 64]))
        plans = []
        for policy in (ShortestRemainingMemoryTime(options), ExhaustiveSrmt(options)):
            policy._cutoff.size = cut
            for state in waiting:
                policy.enqueue(state)
            plans.append(policy.plan(view))
        assert plans[0] == plans[1]


def test_an_urgent_request_preempts_the_largest_memory_time():
    base = {"done": 20, "ago_ms": 1_000, "priority": 0, "ttft_ms": 3_000, "gap_ms": 1_000}
    small = progress("small", {**base, "prompt": 50, "predicted": 40}, is_running=True)
    large = progress("large", {**base, "prompt": 200, "predicted": 200}, is_running=True)
    for state in (small, large):
        state.last_token = NOW
    urgent_life = {**base, "done": 0, "ago_ms": 2_000, "prompt": 50, "predicted": 30}
    urgent = progress("urgent", urgent_life, is_running=False)
    plan = planned([urgent], view_of([small, large], free=1))
    assert (plan.offer, list(plan.preemptions())) == ([urgent], [(large, urgent)])
    early = progress("early", {**urgent_life, "ago_ms": 100}, is_running=False)
    plan = planned([early], view_of([small, large], free=1))
    assert (plan.offer, plan.preempt) == ([], [])


def test_a_long_prefill_counts_in_the_order():
    base = {"done": 0, "priority": 0, "ttft_ms": 3_000, "gap_ms": None, "ago_ms": 10}
    long_prompt = progress("read", {**base, "prompt": 300, "predicted": 20}, is_running=False)
    long_answer = progress("told", {**base, "prompt": 20, "predicted": 95}, is_running=False)
    policy = engine_policy(EngineOptions(ordering="srmt"))
    for state in (long_prompt, long_answer):
        policy.enqueue(state)
    view = view_of([], free=100)
    assert policy.plan(view).offer == [long_answer, long_prompt]
    # The order follows the prefill cost only after a clear change.
    cheaper = replace(view, pace=Pace(PACE.step, milliseconds(0.14)))
    assert policy.plan(cheaper).offer == [long_answer, long_prompt]
    free_to_read = replace(view, pace=Pace(PACE.step, milliseconds(0)))
    assert policy.plan(free_to_read).offer == [long_prompt, long_answer]
    for state in (long_prompt, long_answer):
        policy.dequeue(state)
    assert policy.plan(view).offer == []
    free_by_option = planned([long_prompt, long_answer], view, prefill_weight=0.0)
    assert free_by_option.offer == [long_prompt, long_answer]


def test_equal_requests_go_by_arrival_while_the_prefill_cost_changes():
    life = {"done": 0, "priority": 0, "ttft_ms": 30_000, "gap_ms": None, "prompt": 60, "predicted": 40}
    policy = engine_policy(EngineOptions(ordering="srmt"))
    arrived = []
    for number, per_token in enumerate((0.15, 0.14, 0.16, 0.15, 0.17, 0.13)):
        arrived.append(progress(f"r{number}", {**life, "ago_ms": 100 - number}, is_running=False))
        policy.enqueue(arrived[-1])
        plan = policy.plan(replace(view_of([], free=100), pace=Pace(PACE.step, milliseconds(per_token))))
    assert plan.offer == arrived


def test_a_lost_request_past_its_patience_starts_first_and_is_not_preempted():
    base = {"done": 0, "priority": 0, "ttft_ms": 300, "gap_ms": None, "predicted": 100, "prompt": 100}
    old = progress("old", {**base, "ago_ms": 20_000}, is_running=False)
    young = [progress(f"y{i}", {**base, "ago_ms": 10, "predicted": 5}, is_running=False) for i in range(4)]
    policy = engine_policy(EngineOptions(ordering="srmt", starvation_ms=15_000))
    for state in (old, *young):
        policy.enqueue(state)
    view = view_of([], free=8)
    assert policy.plan(view).offer[0] is old
    policy.dequeue(old)
    old.stamp(NOW, 1)
    crowded = replace(view_of([old], free=0), quota=8)
    for state in young:
        assert state not in policy.plan(crowded).offer
        assert policy.plan(crowded).preempt == []


@pytest.mark.parametrize(("apart_ms", "starts"), [(5_000, True), (720, False)])
def test_lost_requests_start_only_on_spare_memory(apart_ms, starts):
    base = {"done": 0, "priority": 0, "gap_ms": None, "ttft_ms": 300, "prompt": 200, "predicted": 100}
    arrived = [
        progress(f"c{i}", {**base, "ago_ms": i * apart_ms}, is_running=False) for i in range(40, 0, -1)
    ]
    lost, *others = arrived
    policy = engine_policy(EngineOptions(ordering="srmt"))
    for state in arrived:
        policy.enqueue(state)
    runs = progress("runs", {**base, "done": 20, "ago_ms": 200}, is_running=True)
    view = view_of([runs], free=80)
    policy.plan(replace(view, free_slots=0))
    for state in others:
        policy.dequeue(state)
    assert any(lost in policy.plan(view).offer for _ in range(4)) == starts


def test_lost_requests_start_smallest_first_and_oldest_first_when_idle():
    base = {"done": 0, "priority": 0, "gap_ms": None, "ttft_ms": 300}
    old = progress("old", {**base, "prompt": 200, "predicted": 100, "ago_ms": 9_000}, is_running=False)
    small = progress("small", {**base, "prompt": 40, "predicted": 10, "ago_ms": 800}, is_running=False)
    runs = progress(
        "runs", {**base, "prompt": 40, "predicted": 100, "done": 20, "ago_ms": 200}, is_running=True
    )
    policy = engine_policy(EngineOptions(ordering="srmt"))
    for state in (old, small):
        policy.enqueue(state)
    beside = [policy.plan(view_of([runs], free=80)).offer for _ in range(4)]
    assert [small, old] in beside
    assert policy.plan(view_of([], free=14)).offer == [old]


def test_a_request_with_time_waits_if_a_preemption_would_follow_soon():
    base = {"done": 0, "priority": 0, "gap_ms": None, "ttft_ms": 1_000, "predicted": 100, "prompt": 100}
    running = [progress(f"r{i}", {**base, "ago_ms": 900, "done": 61}, is_running=True) for i in range(8)]
    early = progress("early", {**base, "ago_ms": 10}, is_running=False)
    urgent = progress("urgent", {**base, "ago_ms": 600}, is_running=False)
    free = view_of(running, free=0).need(early)
    assert planned([early], view_of(running, free=free + 1)).offer == []
    assert planned([early], view_of(running, free=free + 7)).offer == [early]
    assert planned([urgent], view_of(running, free=free + 1)).offer == [urgent]


def test_a_request_that_fills_the_memory_starts_alone():
    life = {"done": 0, "priority": 0, "gap_ms": None, "ttft_ms": None, "ago_ms": 10, "predicted": 100}
    whole = progress("whole", {**life, "prompt": 159}, is_running=False)
    assert planned([whole], view_of([], free=10)).offer == [whole]
