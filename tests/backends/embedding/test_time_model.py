"""A pass's time is known before it runs, and the device's mood is followed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.embedding.time_model import ObservedTime, PassTime, TimePoint, fit_time_model

SHAPES = [(1, 8), (8, 8), (1, 64), (8, 64), (1, 256), (4, 256), (1, 1_024)]
TERMS = st.tuples(st.floats(1e-4, 1e-2), st.floats(1e-6, 1e-3), st.floats(1e-9, 1e-6))


def points(truth: PassTime) -> list[TimePoint]:
    return [TimePoint(n, length, truth.seconds(n, length)) for n, length in SHAPES]


@given(TERMS)
def test_the_fit_finds_the_law_that_made_the_points(terms):
    truth = PassTime(*terms)
    found = fit_time_model(points(truth))
    for n, length in [*SHAPES, (32, 128), (2, 512)]:
        assert found.seconds(n, length) == pytest.approx(truth.seconds(n, length), rel=1e-4)


@given(
    st.lists(
        st.builds(TimePoint, st.integers(1, 64), st.integers(1, 512), st.floats(1e-4, 10)),
        min_size=1,
        max_size=8,
    )
)
def test_no_measurement_makes_work_pay_time_back(measured):
    found = fit_time_model(measured)
    assert min(found.base, found.per_token, found.per_square) >= 0
    assert found.seconds(1, 1) <= found.seconds(2, 1) <= found.seconds(2, 64)


@given(TERMS, st.integers(1, 512), st.floats(1e-4, 10), st.floats(0.2, 5))
def test_the_most_inputs_within_a_time_take_no_longer(terms, length, limit, scale):
    time = ObservedTime(PassTime(*terms), scale=scale)
    most = time.max_inputs(length, limit)
    assert most == 1 or time.seconds(most, length) <= limit * 1.001
    assert time.seconds(most + 1, length) > limit * 0.999


def test_a_device_twice_as_slow_is_believed_soon():
    time = ObservedTime(PassTime(0.001, 1e-5, 0.0))
    for _ in range(40):
        time.observe(TimePoint(4, 100, 2 * time.model.seconds(4, 100)))
    assert time.scale == pytest.approx(2, rel=0.1)


def test_one_stall_moves_the_estimate_by_a_bounded_step():
    time = ObservedTime(PassTime(0.001, 1e-5, 0.0))
    for _ in range(40):
        time.observe(TimePoint(4, 100, time.model.seconds(4, 100)))
    time.observe(TimePoint(4, 100, 1_000.0))
    assert time.scale < 1.2


def test_nothing_measured_is_refused():
    with pytest.raises(ValueError, match="no pass was measured"):
        fit_time_model([])
