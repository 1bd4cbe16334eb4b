"""The look-ahead against a simulation of every step of every lease."""

from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.memory_ledger import Footprint, MemoryLedger, Quota
from controlplane.core.request import Owner
from controlplane.policy.gate.memory_lookahead import LookAhead

footprints = st.builds(
    Footprint, base=st.integers(0, 50), per_step=st.integers(0, 9), steps=st.integers(1, 20)
)
pools = st.lists(footprints, max_size=8)


def look_at(pool: list[Footprint], z: float = 0.0) -> LookAhead:
    ledger = MemoryLedger({Owner.LLM: Quota(10**6), Owner.EMBEDDING: Quota(0)})
    for i, footprint in enumerate(pool):
        ledger.open(str(i), Owner.LLM, footprint, priority=0)
    return LookAhead(ledger.table(Owner.LLM), z)


def use_at(pool: list[Footprint], step: int) -> int:
    return sum(f.base + f.per_step * step for f in pool if f.steps >= step)


@given(pools, footprints)
def test_peak_is_that_of_every_step(pool: list[Footprint], new_request: Footprint) -> None:
    everyone = [*pool, new_request]
    assert look_at(pool).peak_with(new_request) == max(
        use_at(everyone, k) for k in range(1, new_request.steps + 1)
    )


level = st.builds(Footprint, base=st.integers(0, 50), steps=st.integers(1, 20))


@given(st.lists(level, max_size=8), level | footprints)
def test_without_growth_the_peak_is_now(pool: list[Footprint], new_request: Footprint) -> None:
    peak = look_at(pool, z=2.0).peak_with(new_request)
    everyone = [*pool, new_request]
    assert peak == max(use_at(everyone, k) for k in range(1, new_request.steps + 1))


@given(pools, footprints, st.integers(0, 7))
def test_fewer_leases_never_raise_the_peak(pool: list[Footprint], new_request: Footprint, gone: int) -> None:
    fewer = pool[:gone] + pool[gone + 1 :]
    assert look_at(fewer, z=2.0).peak_with(new_request) <= look_at(pool, z=2.0).peak_with(new_request) + 1e-9


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


def test_a_margin_lengthens_the_wait_for_room() -> None:
    unsure = [Footprint(100, 0, 5, spread=60.0), Footprint(100, 0, 9, spread=60.0)]
    assert look_at(unsure).steps_until_fits(Footprint(100), 300) == 0
    assert look_at(unsure, z=1.0).steps_until_fits(Footprint(100), 300) == 5


def test_margin_is_of_the_sum_not_the_sum_of_margins() -> None:
    alike = [Footprint(100, 1, 10, spread=30.0)] * 15
    peak = look_at(alike, z=2.0).peak_with(alike[0])
    assert peak == pytest.approx(16 * 110 + 2.0 * 30.0 * 4)


@given(st.lists(st.floats(0, 90), max_size=12), st.floats(0, 90), st.floats(0, 3))
def test_the_margin_is_never_more_than_that_of_each_by_itself(
    spreads: list[float], own: float, z: float
) -> None:
    pool = [Footprint(100, 1, 10, spread=spread) for spread in spreads]
    new_request = Footprint(100, 1, 10, spread=own)
    peak = look_at(pool, z).peak_with(new_request)
    assert peak <= sum(f.peak + z * f.spread for f in [*pool, new_request]) + 1e-6
    assert peak >= new_request.peak + z * own - 1e-6
    assert look_at([], z).peak_with(new_request) == pytest.approx(new_request.peak + z * own)


def test_a_margin_covers_as_many_sums_of_independent_lengths_as_it_states() -> None:
    rng = np.random.default_rng(0)
    expected, deviation, cells = rng.integers(60, 200, 30), rng.integers(5, 20, 30), rng.integers(50, 900, 30)
    pool = [
        Footprint(int(base), 1, int(mean), spread=float(sd))
        for base, mean, sd in zip(cells, expected, deviation, strict=True)
    ]
    reserved = look_at(pool[1:], z=NormalDist().inv_cdf(0.95)).peak_with(pool[0])
    lengths = np.maximum(1, np.rint(rng.normal(expected, deviation, (500, 30)))).astype(int)
    peaks = []
    for drawn in lengths:
        true = [Footprint(int(base), 1, int(steps)) for base, steps in zip(cells, drawn, strict=True)]
        peaks.append(look_at(true[1:]).peak_with(true[0]))
    assert np.mean(np.array(peaks) <= reserved) >= 0.95


def test_only_running_leases_add_to_the_margin() -> None:
    short, long = Footprint(100, 0, 5, spread=40.0), Footprint(10, 0, 50, spread=30.0)
    assert look_at([short], z=1.0).peak_with(long) == pytest.approx(110 + 50.0)
    assert look_at([long], z=1.0).peak_with(long) == pytest.approx(20 + 1800**0.5)
