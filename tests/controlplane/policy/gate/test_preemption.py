"""Preemption victims: sufficient, minimal, of lower priority, at most twice the least possible cost."""

from dataclasses import replace
from itertools import chain, combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.clock import Duration, milliseconds, seconds
from controlplane.core.decision import Victim
from controlplane.core.forecast import LengthForecast
from controlplane.core.pool_view import Running
from controlplane.policy.gate.preemption import PreemptionOptions, choose_victims, victim_cost

OPTIONS = PreemptionOptions(tau=seconds(0.5), almost_done_steps=8, thrash_penalty=1.0)
PLAIN = Running(
    request_id="a",
    priority=0,
    freed_bytes=100,
    slack=seconds(1),
    recompute=seconds(0.2),
    remaining_steps=50,
    preemptions=0,
)

WORST_FACTOR = 2.0


@st.composite
def pools(draw: st.DrawFn) -> list[Running]:
    count = draw(st.integers(0, 8))
    return [
        Running(
            request_id=f"r{i}",
            priority=draw(st.integers(0, 3)),
            freed_bytes=draw(st.integers(0, 60)),
            slack=draw(st.none() | st.integers(-2_000, 5_000).map(milliseconds)),
            recompute=milliseconds(draw(st.integers(0, 3_000))),
            remaining_steps=draw(st.sampled_from([1, 8, 9, 100])),
            preemptions=draw(st.integers(0, 2)),
        )
        for i in range(count)
    ]


def victims_of(pool: list[Running], needed: int, priority: int = 2) -> tuple[Victim, ...]:
    return choose_victims(pool, needed_bytes=needed, incoming_priority=priority, options=OPTIONS)


def may_go(running: Running, priority: int) -> bool:
    return running.priority < priority and running.remaining_steps > OPTIONS.almost_done_steps


def least_cost(pool: list[Running], needed: int) -> float | None:
    sets = chain.from_iterable(combinations(pool, size) for size in range(1, len(pool) + 1))
    sums = [
        sum(victim_cost(r, OPTIONS) for r in some)
        for some in sets
        if sum(r.freed_bytes for r in some) >= needed
    ]
    return min(sums) if sums else None


@given(pools(), st.integers(1, 200), st.integers(0, 4))
def test_victims_are_sufficient_minimal_allowed_and_near_the_optimum(
    pool: list[Running], needed: int, priority: int
) -> None:
    victims = victims_of(pool, needed, priority)
    allowed = [r for r in pool if may_go(r, priority)]
    optimum = least_cost(allowed, needed)
    if optimum is None:
        assert victims == ()
        return
    freed = sum(v.freed_bytes for v in victims)
    assert freed >= needed
    assert all(freed - v.freed_bytes < needed for v in victims), "no victim can be spared"
    assert {v.request_id for v in victims} <= {r.request_id for r in allowed}
    assert len({v.request_id for v in victims}) == len(victims)
    assert sum(v.goodput_lost for v in victims) <= WORST_FACTOR * optimum + 1e-9


@given(pools(), st.integers(-100, 0))
def test_no_victims_if_nothing_is_needed(pool: list[Running], needed: int) -> None:
    assert victims_of(pool, needed) == ()


@given(pools(), st.integers(1, 200), st.randoms(use_true_random=False))
def test_input_order_does_not_matter(pool: list[Running], needed: int, random: Any) -> None:
    shuffled = random.sample(pool, len(pool))
    assert victims_of(shuffled, needed) == victims_of(pool, needed)


def test_a_cheap_small_victim_is_not_combined_with_a_huge_last_one() -> None:
    # Cost per byte alone takes `free`, then `huge`; dropping `free` again leaves 250 times the optimum.
    free = replace(PLAIN, request_id="free", freed_bytes=99, slack=None, recompute=Duration(0))
    huge = replace(PLAIN, request_id="huge", freed_bytes=10_000, slack=None, recompute=seconds(50))
    last = replace(PLAIN, request_id="last", freed_bytes=1, slack=None, recompute=seconds(0.2))
    assert [v.request_id for v in victims_of([free, huge, last], 100)] == ["free", "last"]


def test_one_large_victim_beats_many_small_ones() -> None:
    small = [replace(PLAIN, request_id=f"s{i}", freed_bytes=10, recompute=seconds(0.1)) for i in range(10)]
    large = replace(PLAIN, request_id="large", freed_bytes=120, recompute=seconds(0.3))
    assert [v.request_id for v in victims_of([*small, large], 100)] == ["large"]


def test_equal_or_higher_priority_is_never_taken() -> None:
    assert victims_of([replace(PLAIN, priority=2), replace(PLAIN, request_id="b", priority=3)], 50) == ()


def test_ties_go_by_id() -> None:
    pool = [replace(PLAIN, request_id=name) for name in ("c", "a", "b")]
    assert [v.request_id for v in victims_of(pool, 150)] == ["a", "b"]


def test_late_requests_are_preempted_before_timely_ones() -> None:
    late = replace(PLAIN, request_id="late", slack=seconds(-3))
    tight = replace(PLAIN, request_id="tight", slack=Duration(0))
    roomy = replace(PLAIN, request_id="roomy", slack=seconds(30))
    costs = [victim_cost(r, OPTIONS) for r in (late, roomy, tight)]
    assert costs == sorted(costs)
    assert costs[0] == pytest.approx(0.2), "only its recompute"


def test_late_requests_of_higher_priority_are_not_preempted_first() -> None:
    # The printed 1 / (slack + eps) is negative here and would evict the higher priority first.
    urgent = replace(PLAIN, request_id="urgent", priority=1, slack=Duration(1))
    batch = replace(PLAIN, request_id="batch", priority=0, slack=Duration(1))
    assert [v.request_id for v in victims_of([urgent, batch], 50)] == ["batch"]


def test_slack_counts_in_the_lowest_class_too() -> None:
    tight = replace(PLAIN, request_id="a-tight", slack=milliseconds(5))
    roomy = replace(PLAIN, request_id="roomy", slack=seconds(60))
    assert [v.request_id for v in victims_of([tight, roomy], 50)] == ["roomy"]


def test_earlier_preemptions_raise_the_cost() -> None:
    again = replace(PLAIN, request_id="again", preemptions=3)
    fresh = replace(PLAIN, request_id="fresh", recompute=seconds(0.3))
    assert [v.request_id for v in victims_of([again, fresh], 50)] == ["fresh"]


def test_an_outrun_prediction_protects_only_until_the_next_forecast() -> None:
    outrun = LengthForecast((0.0, 1.0), (1.0, 20.0))
    left = [round(outrun.remaining(after=done).mean) for done in (20, 40, 80)]
    taken = [victims_of([replace(PLAIN, remaining_steps=steps)], 50) for steps in left]
    assert taken[0] == ()
    assert taken[1] and taken[2]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tau": Duration(0)}, "victim_tau=0.*above 0"),
        ({"almost_done_steps": -1}, "victim_almost_done_steps=-1.*at least 0"),
        ({"thrash_penalty": -0.5}, r"victim_thrash_penalty=-0\.5"),
    ],
)
def test_bad_options(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(OPTIONS, **change)
