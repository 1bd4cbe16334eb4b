"""Checks that a policy keeps the rules that its callers rely on, over seeded random states.

Every function takes one policy, as the registry does, and raises AssertionError with the rule that is broken
and the number of the case:

    check_engine_policy(lambda: MyPolicy(EngineOptions()))
    check_ordering(MyOrdering)
    check_admission(my_fits)
    check_victims(my_rank)

The same seed gives the same cases. Passing says nothing about how good a policy is.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import numpy as np

from controlplane.core.clock import Duration, Instant, milliseconds, seconds
from controlplane.core.deadlines import Progress
from controlplane.core.memory_ledger import Footprint, LeaseTable
from controlplane.core.pool_view import Pace, Running, Share
from controlplane.core.request import Kind, Request
from controlplane.core.slo import ServiceClass, Slo
from controlplane.policy.engine.interface import EnginePolicy, EngineView, StepPlan
from controlplane.policy.engine.request_state import RequestState
from controlplane.policy.engine.running_batch import RunningBatch
from controlplane.policy.gate.admission import Fits
from controlplane.policy.gate.memory_lookahead import LookAhead
from controlplane.policy.gate.ordering import Ordering, OrderingOptions
from controlplane.policy.gate.preemption import VictimRank, in_preemption_order

_NOW = Instant(seconds(100))
_PACE = Pace(step=milliseconds(30), per_prompt_token=milliseconds(0.15))
_BLOCK_TOKENS = 16
_MAX_OUTPUT_TOKENS = 400
_PLANS_UNTIL_IDLE_START = 4
_POOL_BYTES = 1_000


def check_engine_policy(factory: Callable[[], EnginePolicy], *, cases: int = 100, seed: int = 0) -> None:
    """Checks the policies that `factory` builds; each case gets a new one.

    A plan offers waiting requests and preempts running ones, each at most once. The offer fits into the free
    blocks and slots plus those of the victims, to within one block per victim. Nothing is preempted without
    need. One plan brings use below a lowered quota. The order of `enqueue` calls and of the running batch
    does not change the plan. An idle engine starts a request that fits within four plans. `waiting` counts
    the calls of `enqueue` less those of `dequeue`.
    """
    for case in range(cases):
        _check_plan(factory, f"{seed}:{case}")
        _check_shrunk_quota(factory, f"{seed}:{case}")
        _check_use_ceiling(factory, f"{seed}:{case}")
    _check_idle_start(factory)


def check_ordering(
    factory: Callable[[OrderingOptions], Ordering], *, cases: int = 200, seed: int = 0
) -> None:
    """Checks the ordering that `factory` builds.

    A rank is `(int, int, request id)`, with and without a known pace. It is the same for each call, and two
    requests that differ only in their ids differ only in that key.
    """
    options = OrderingOptions(priority_head_start=seconds(1), default_deadline=seconds(10))
    for case in range(cases):
        random = Random(f"{seed}:{case}")
        request = _request(random, "a")
        footprint = _footprint(random)
        for pace in (None, _PACE):
            rank = factory(options).rank(request, footprint, pace)
            is_rank = isinstance(rank, tuple) and tuple(map(type, rank)) == (int, int, str)
            assert is_rank, f"case {case}: rank {rank!r} is not a tuple (int, int, str)"
            assert rank[2] == request.id, f"case {case}: rank {rank!r} does not end in the request id"
            ordering = factory(options)
            repeated = [ordering.rank(request, footprint, pace) for _ in range(2)]
            assert repeated == [rank, rank], f"case {case}: the rank of one request changes between calls"
            twin = ordering.rank(replace(request, id="b"), footprint, pace)
            assert twin == (*rank[:2], "b"), f"case {case}: the id changes more than the last key of a rank"


def check_admission(fits: Fits, *, cases: int = 200, seed: int = 0) -> None:
    """Checks that `fits` is a function of the state, and that closing a lease never makes a request unfit."""
    for case in range(cases):
        random = Random(f"{seed}:{case}")
        share = _share([_footprint(random) for _ in range(random.randint(1, 8))])
        footprint = _footprint(random)
        answers = [fits(share, LookAhead(share.leases), footprint) for _ in range(2)]
        assert all(isinstance(answer, bool) for answer in answers), f"case {case}: {answers[0]!r} is no bool"
        assert answers[0] == answers[1], f"case {case}: the same state is decided in two ways"
        fewer = share.without([random.choice(share.leases.ids)])
        if answers[0]:
            still_fits = fits(fewer, LookAhead(fewer.leases), footprint)
            assert still_fits, f"case {case}: what fits no longer fits after a lease was closed"


def check_victims(rank: VictimRank, *, cases: int = 300, seed: int = 0) -> None:
    """Checks the ranks of random candidates: numbers, equal for equal candidates, with which they sort."""
    for case in range(cases):
        random = Random(f"{seed}:{case}")
        running = [_running(random, f"r{i}") for i in range(random.randint(1, 8))]
        ranks = [rank(candidate) for candidate in running]
        assert all(isinstance(found, int | float) and found == found for found in ranks), (
            f"case {case}: a rank is no number: {ranks}"
        )
        assert ranks == [rank(candidate) for candidate in running], (
            f"case {case}: a rank changes between calls"
        )
        order = in_preemption_order(running, rank)
        random.shuffle(running)
        again = in_preemption_order(running, rank)
        assert again == order, f"case {case}: the order of the candidates changes that of preemption"


def _check_plan(factory: Callable[[], EnginePolicy], case: str) -> None:
    running, waiting, view = _engine_case(Random(case))
    policy = factory()
    plan = _plan(policy, waiting, view)
    preempted, offered, ranked = _ids(plan.preempt), _ids(plan.offer), _ids(plan.ranked)
    runs, waits = set(_ids(running)), set(_ids(waiting))
    assert len(set(offered)) == len(offered), f"case {case}: a request is offered twice"
    assert len(set(preempted)) == len(preempted), f"case {case}: a request is preempted twice"
    assert set(offered) <= waits, f"case {case}: an offered request does not wait"
    assert set(preempted) <= runs, f"case {case}: a preempted request does not run"
    assert set(ranked) <= runs - set(preempted), f"case {case}: a ranked request does not run on"
    gainers = set(_ids([state for state in plan.beneficiaries if state is not None]))
    is_matched = len(plan.beneficiaries) <= len(preempted) and gainers <= waits
    assert is_matched, f"case {case}: {gainers} do not wait, or are more than {preempted}"
    freed = sum(state.held for state in plan.preempt)
    needed = sum(view.need(state) for state in plan.offer)
    room = max(0, view.free + freed) + len(plan.preempt)
    assert needed <= room, f"case {case}: the offer needs {needed} blocks, {room} are free"
    slots = view.free_slots + len(plan.preempt)
    assert len(offered) <= slots, f"case {case}: {len(offered)} requests are offered {slots} slots"
    is_needless = view.free >= 0 and not offered and preempted
    assert not is_needless, f"case {case}: {preempted} are preempted, and nothing starts"

    for state in plan.offer:
        policy.dequeue(state)
    left = len(waiting) - len(offered)
    assert policy.waiting() == left, f"case {case}: waiting() is {policy.waiting()} and must be {left}"
    for state in waiting:
        if state not in plan.offer:
            policy.dequeue(state)
    assert policy.waiting() == 0, f"case {case}: requests are left after all were dequeued"

    running, waiting, view = _engine_case(Random(case))
    shuffle = Random(case)
    shuffle.shuffle(running)
    shuffle.shuffle(waiting)
    shuffled = _plan(factory(), waiting, replace(view, running=RunningBatch(running)))
    again = _ids(shuffled.preempt), _ids(shuffled.offer), _ids(shuffled.ranked)
    assert again == (preempted, offered, ranked), f"case {case}: the order of the input changes the plan"


def _check_shrunk_quota(factory: Callable[[], EnginePolicy], case: str) -> None:
    _, _, view = _engine_case(Random(case))
    view = replace(view, quota=max(1, view.used - Random(case).randint(0, 40)))
    plan = _plan(factory(), [], view)
    left = view.used - sum(state.held for state in plan.preempt)
    assert left <= view.quota, f"case {case}: {left} blocks are held, the quota is {view.quota}"


def _check_use_ceiling(factory: Callable[[], EnginePolicy], case: str) -> None:
    _, waiting, view = _engine_case(Random(case))
    ceiling = view.used + view.growth
    view = replace(view, quota=max(1, ceiling - Random(case).randint(1, 40)), use_ceiling=max(1, ceiling))
    alone = _plan(factory(), [], view)
    assert not alone.preempt, f"case {case}: preempted below the use ceiling, and nothing starts"
    plan = _plan(factory(), waiting, view)
    freed = sum(state.held for state in plan.preempt)
    needed = sum(view.need(state) for state in plan.offer)
    room = max(0, view.free) + freed + len(plan.preempt)
    assert needed <= room, f"case {case}: the offer needs {needed} blocks above the quota, {room} are freed"


def _check_idle_start(factory: Callable[[], EnginePolicy]) -> None:
    service_class = ServiceClass("any", Slo(ttft=milliseconds(300)), priority=0, sheddable=False)
    arrival = Instant(_NOW - seconds(9))
    late = RequestState(_of_class(service_class, "late", arrival, prompt_tokens=159), 400)
    view = EngineView(_NOW, _PACE, _BLOCK_TOKENS, 10, 0, 0, 64, RunningBatch())
    policy = factory()
    policy.enqueue(late)
    started = any(late in policy.plan(view).offer for _ in range(_PLANS_UNTIL_IDLE_START))
    assert started, f"an idle engine does not start a request that fits, in {_PLANS_UNTIL_IDLE_START} plans"


def _plan(policy: EnginePolicy, waiting: Sequence[RequestState], view: EngineView) -> StepPlan:
    for state in waiting:
        policy.enqueue(state)
    return policy.plan(view)


def _ids(states: Sequence[RequestState]) -> list[str]:
    return [state.request.id for state in states]


def _engine_case(random: Random) -> tuple[list[RequestState], list[RequestState], EngineView]:
    running = [_request_state(random, f"r{i}", is_running=True) for i in range(random.randint(0, 12))]
    waiting = [_request_state(random, f"w{i}", is_running=False) for i in range(random.randint(0, 12))]
    for state in running:
        state.held = -(-state.tokens // _BLOCK_TOKENS)
    used = sum(state.held for state in running)
    growth = sum(state.tokens % _BLOCK_TOKENS == 0 for state in running)
    quota, slots = used + random.randint(0, 60), random.choice([0, 1, 3, 64])
    view = EngineView(
        _NOW, _PACE, _BLOCK_TOKENS, quota, used, growth, slots if running else 64, RunningBatch(running)
    )
    return running, waiting, view


def _request_state(random: Random, name: str, *, is_running: bool) -> RequestState:
    state = RequestState(_request(random, name), random.randint(1, 200))
    if is_running and (done := random.randint(0, 100)):
        pause = min(milliseconds(100), _NOW - state.request.arrival)
        state.stamp(Instant(state.request.arrival + pause), done)
    return state


def _request(random: Random, name: str) -> Request:
    ttft = random.choice([None, milliseconds(300), milliseconds(3_000)])
    e2e = random.choice([None, None, seconds(20)])
    tpot, gap = random.choice([None, milliseconds(50)]), random.choice([None, milliseconds(1_000)])
    slo = Slo(ttft, tpot, e2e, gap)
    service_class = ServiceClass("any", slo, random.randint(0, 2), sheddable=False)
    arrival = Instant(_NOW - milliseconds(random.randint(0, 20_000)))
    return _of_class(service_class, name, arrival, prompt_tokens=random.randint(1, 300))


def _of_class(service_class: ServiceClass, name: str, arrival: Instant, *, prompt_tokens: int) -> Request:
    return Request(
        id=name,
        kind=Kind.GENERATE,
        model="model",
        tenant="tenant",
        service_class=service_class,
        slo=service_class.slo,
        arrival=arrival,
        prompt_tokens=prompt_tokens,
        max_output_tokens=_MAX_OUTPUT_TOKENS,
    )


def _footprint(random: Random) -> Footprint:
    return Footprint(
        base=random.randint(1, 300),
        per_step=random.randint(0, 5),
        steps=random.randint(1, 60),
        worst=random.randint(0, 700),
    )


def _share(leases: Sequence[Footprint]) -> Share:
    columns = np.array(
        [(lease.base, lease.per_step, lease.steps, i % 2) for i, lease in enumerate(leases)],
        dtype=np.float64,
    )
    table = LeaseTable(tuple(f"r{i}" for i in range(len(leases))), *columns.T)
    held = int(table.base.sum())
    ceiling = max(_POOL_BYTES, held)
    return Share(ceiling, held, deficit=0, largest=ceiling, free_slots=10, leases=table, pace=_PACE)


def _running(random: Random, name: str) -> Running:
    slack: Duration | None = milliseconds(random.randint(-2_000, 5_000))
    return Running(
        request_id=name,
        priority=random.randint(0, 3),
        freed_bytes=random.randint(0, 60),
        slack=random.choice([None, slack]),
        recompute=milliseconds(random.randint(0, 3_000)),
        remaining_steps=random.choice([1, 8, 9, 100]),
        preemptions=random.randint(0, 2),
        progress=random.choice([Progress(_NOW), Progress(_NOW, _NOW, _NOW, 1)]),
    )
