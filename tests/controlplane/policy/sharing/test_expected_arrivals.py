"""A pass costs the generations that arrive during it as many SLOs as its length makes late."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.clock import Instant, seconds
from controlplane.policy.sharing.expected_arrivals import Arrival, ArrivalCosts, ExpectedArrivals


def arrivals(count: int, spare: float, weight: float = 1.0, at: float = 0.0) -> list[Arrival]:
    return [Arrival(Instant(seconds(at)), spare, weight)] * count


def test_late_are_those_that_come_before_the_last_part_of_the_pause_that_they_can_wait():
    costs = ArrivalCosts([*arrivals(20, 0.1), *arrivals(10, 0.4, weight=3.0)], seconds=2.0)
    # Ten a second come in the first 0.2 s of 0.3 s, or 0.5 of 0.6, and five in 0.2 of 0.6.
    assert costs(0.3) == pytest.approx(10 * 0.2)
    assert costs(0.6) == pytest.approx(10 * 0.5 + 3.0 * 5 * 0.2)
    assert costs(0.1) == costs(0.0) == 0.0


@given(
    st.lists(st.tuples(st.floats(0.01, 1.0), st.floats(0.1, 9.0)), min_size=1, max_size=70),
    st.lists(st.floats(0.0, 2.0), min_size=2, max_size=5),
)
def test_the_cost_rises_with_the_pause_and_never_exceeds_those_that_come(found, pauses):
    costs = ArrivalCosts([Arrival(Instant(0), spare, weight) for spare, weight in found], seconds=4.0)
    values = [costs(pause) for pause in sorted(pauses)]
    assert values == sorted(values)
    weight = sum(weight for _, weight in found)
    assert all(
        value <= pause * weight / 4.0 + 1e-9 for pause, value in zip(sorted(pauses), values, strict=True)
    )


def test_the_rate_is_that_of_the_last_arrivals_and_falls_when_no_more_come():
    expected = ExpectedArrivals()
    for number in range(100):
        expected.record(*arrivals(1, 0.1, at=number / 10))
    # The last 64 have come since 3.6 s, and the first of them began the interval.
    now, later = (expected.costs(Instant(seconds(at))) for at in (10.0, 42.0))
    assert now is not None and later is not None
    assert now(1.1) == pytest.approx(10.0)
    assert later(1.1) == pytest.approx(now(1.1) / 6)


def test_few_arrivals_and_those_that_are_late_in_any_case_cost_nothing():
    expected = ExpectedArrivals()
    for arrival in [*arrivals(7, 0.1), *arrivals(9, -0.1), *arrivals(9, 0.0)]:
        expected.record(arrival)
    assert expected.costs(Instant(seconds(1.0))) is None
    expected.record(*arrivals(1, 0.1))
    costs = expected.costs(Instant(0))
    assert costs is not None and costs(0.15) == pytest.approx(8_000 * 0.05)
