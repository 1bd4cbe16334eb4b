"""Preemption victims: sufficient, minimal, the lowest priority first, then in the order of the slot."""

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.clock import Instant, milliseconds, seconds
from controlplane.core.deadlines import Progress
from controlplane.core.decision import Victim
from controlplane.core.pool_view import Running
from controlplane.policy.gate.preemption import choose_victims, in_preemption_order, latest_started

PLAIN = Running(
    request_id="a",
    priority=0,
    freed_bytes=100,
    slack=seconds(1),
    recompute=seconds(0.2),
    remaining_steps=50,
    preemptions=0,
    progress=Progress(Instant(0)),
)


def started(name: str, at: int | None, **changes: Any) -> Running:
    seen = Progress(Instant(0), None if at is None else Instant(at))
    return replace(PLAIN, request_id=name, progress=seen, **changes)


@st.composite
def pools(draw: st.DrawFn) -> list[Running]:
    return [
        started(
            f"r{i}",
            draw(st.none() | st.integers(0, 5)),
            priority=draw(st.integers(0, 3)),
            freed_bytes=draw(st.integers(0, 60)),
            slack=draw(st.none() | st.integers(-2_000, 5_000).map(milliseconds)),
        )
        for i in range(draw(st.integers(0, 8)))
    ]


def victims_of(pool: list[Running], needed: int, priority: int = 2) -> tuple[Victim, ...]:
    return choose_victims(pool, needed_bytes=needed, incoming_priority=priority, rank=latest_started)


def names(pool: list[Running], needed: int, priority: int = 2) -> list[str]:
    return [victim.request_id for victim in victims_of(pool, needed, priority)]


@given(pools(), st.integers(1, 200), st.integers(0, 4))
def test_victims_are_sufficient_minimal_allowed_and_the_first_in_order(
    pool: list[Running], needed: int, priority: int
) -> None:
    victims = victims_of(pool, needed, priority)
    allowed = [r for r in pool if r.priority < priority]
    if sum(r.freed_bytes for r in allowed) < needed:
        assert victims == ()
        return
    freed = sum(v.freed_bytes for v in victims)
    assert freed >= needed
    assert all(freed - v.freed_bytes < needed for v in victims), "no victim can be spared"
    order = [r.request_id for r in in_preemption_order(allowed, latest_started)]
    places = [order.index(v.request_id) for v in victims]
    assert places == sorted(set(places))
    by_id = {r.request_id: r for r in pool}
    before = order[: places[-1]]
    assert sum(by_id[name].freed_bytes for name in before) < needed, "the last victim is needed"


@given(pools(), st.integers(-100, 0))
def test_no_victims_if_nothing_is_needed(pool: list[Running], needed: int) -> None:
    assert victims_of(pool, needed) == ()


@given(pools(), st.integers(1, 200), st.randoms(use_true_random=False))
def test_input_order_does_not_matter(pool: list[Running], needed: int, random: Any) -> None:
    shuffled = random.sample(pool, len(pool))
    assert victims_of(shuffled, needed) == victims_of(pool, needed)


def test_small_victims_that_a_large_one_makes_unnecessary_are_kept_running() -> None:
    small = [started(f"s{i}", 9, freed_bytes=10) for i in range(3)]
    assert names([*small, started("large", 1, freed_bytes=120)], 100) == ["large"]


def test_equal_or_higher_priority_is_never_taken() -> None:
    assert names([replace(PLAIN, priority=2), replace(PLAIN, request_id="b", priority=3)], 50) == []


def test_the_latest_start_goes_first_and_ties_go_by_id() -> None:
    pool = [started("old", 1), started("d", 7), started("c", 7), started("prefilling", None)]
    assert [r.request_id for r in in_preemption_order(pool, latest_started)] == [
        "prefilling",
        "c",
        "d",
        "old",
    ]
    assert names(pool, 250) == ["prefilling", "c", "d"]


def test_a_lower_priority_goes_before_a_later_start() -> None:
    assert names([started("late", 9, priority=1), started("early", 1, priority=0)], 50) == ["early"]
