"""The look-ahead against a simulation of every step of every lease."""

from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.memory_ledger import Footprint, MemoryLedger
from controlplane.core.request import Owner
from controlplane.policy.gate.memory_lookahead import LookAhead

footprints = st.builds(
    Footprint, base=st.integers(0, 50), per_step=st.integers(0, 9), steps=st.integers(1, 20)
)
pools = st.lists(footprints, max_size=8)


def look_at(pool: list[Footprint]) -> LookAhead:
    ledger = MemoryLedger({Owner.LLM: 10**6, Owner.EMBEDDING: 0})
    for i, footprint in enumerate(pool):
        ledger.open(str(i), Owner.LLM, footprint, priority=0)
    return LookAhead(ledger.table(Owner.LLM))


def use_at(pool: list[Footprint], step: int) -> int:
    return sum(f.base + f.per_step * step for f in pool if f.steps >= step)


@given(pools, footprints)
def test_peak_is_that_of_every_step(pool: list[Footprint], new_request: Footprint) -> None:
    everyone = [*pool, new_request]
    assert look_at(pool).peak_with(new_request) == max(
        use_at(everyone, k) for k in range(1, new_request.steps + 1)
    )


@given(pools)
def test_growth_is_the_highest_use_of_every_step_beyond_that_of_now(pool: list[Footprint]) -> None:
    now = use_at(pool, 0)
    assert look_at(pool).growth == max((use_at(pool, k) for k in range(21)), default=now) - now


level = st.builds(Footprint, base=st.integers(0, 50), steps=st.integers(1, 20))


@given(st.lists(level, max_size=8), level | footprints)
def test_without_growth_the_peak_is_now(pool: list[Footprint], new_request: Footprint) -> None:
    peak = look_at(pool).peak_with(new_request)
    everyone = [*pool, new_request]
    assert peak == max(use_at(everyone, k) for k in range(1, new_request.steps + 1))


@given(pools, footprints, st.integers(0, 7))
def test_fewer_leases_never_raise_the_peak(pool: list[Footprint], new_request: Footprint, gone: int) -> None:
    fewer = pool[:gone] + pool[gone + 1 :]
    assert look_at(fewer).peak_with(new_request) <= look_at(pool).peak_with(new_request) + 1e-9


@given(pools, st.integers(0, 400), st.integers(0, 400))
def test_wait_ends_at_the_first_completion_that_leaves_room(
    pool: list[Footprint], needed: int, limit: int
) -> None:
    answer = look_at(pool).steps_until_free(needed, limit)
    if needed > limit:
        assert answer is None
        return
    if use_at(pool, 0) + needed <= limit:
        assert answer == 0.0
        return
    after = [
        step
        for step in sorted({f.steps for f in pool})
        if needed + sum(f.base + f.per_step * step for f in pool if f.steps > step) <= limit
    ]
    assert answer == after[0]


@given(pools, footprints, st.integers(1, 900))
def test_after_the_predicted_wait_it_fits_until_the_end(
    pool: list[Footprint], new_request: Footprint, limit: int
) -> None:
    wait = look_at(pool).steps_until_fits(new_request, limit)
    if new_request.peak > limit:
        assert wait is None
        return
    assert wait is not None
    assert wait == 0 or wait in {float(f.steps) for f in pool}
    steps = int(wait)
    rest = [
        Footprint(f.base + f.per_step * steps, f.per_step, f.steps - steps) for f in pool if f.steps > steps
    ]
    assert look_at(rest).peak_with(new_request) <= limit
