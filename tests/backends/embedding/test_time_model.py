"""The time model recovers pass times and follows the current speed of the device."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.embedding.time_model import ObservedTime, PassTime, TimePoint, fit_time_model

SHAPES = [(1, 8), (8, 8), (1, 64), (8, 64), (1, 256), (4, 256), (1, 1_024)]
TERMS = st.tuples(st.floats(1e-4, 1e-2), st.floats(1e-6, 1e-3), st.floats(1e-9, 1e-6))


def points(truth: PassTime) -> list[TimePoint]:
    return [TimePoint(n, length, truth.seconds(n, length)) for n, length in SHAPES]


@given(TERMS)
def test_fit_recovers_the_generating_coefficients(terms):
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
def test_fitted_coefficients_are_never_negative(measured):
    found = fit_time_model(measured)
    assert min(found.base, found.per_token, found.per_square) >= 0
    assert found.seconds(1, 1) <= found.seconds(2, 1) <= found.seconds(2, 64)


def test_the_scale_converges_on_a_slower_device():
    time = ObservedTime(PassTime(0.001, 1e-5, 0.0))
    for _ in range(40):
        time.observe(TimePoint(4, 100, 2 * time.model.seconds(4, 100)))
    assert time.scale == pytest.approx(2, rel=0.1)


def test_an_outlier_changes_the_scale_by_a_bounded_factor():
    time = ObservedTime(PassTime(0.001, 1e-5, 0.0))
    for _ in range(40):
        time.observe(TimePoint(4, 100, time.model.seconds(4, 100)))
    time.observe(TimePoint(4, 100, 1_000.0))
    assert time.scale < 1.2


def test_caution_covers_nine_in_ten_of_the_latest_passes_with_their_hand_over():
    time = ObservedTime(PassTime(0.001, 1e-5, 0.0))
    assert time.caution == 1.0
    for wait in [20.0] * 100 + [0.5] * 30 + [1.0] * 20 + [1.5] * 10 + [4.0] * 4:
        time.observe_wait(TimePoint(4, 100, 0.0), wait * time.seconds(4, 100))
    assert time.caution == pytest.approx(1.5)
    for _ in range(64):
        time.observe_wait(TimePoint(4, 100, 0.0), 0.5 * time.seconds(4, 100))
    assert time.caution == 1.0, "a pass is never expected to be shorter than predicted"


def test_a_fit_without_points_raises():
    with pytest.raises(ValueError, match="no pass was measured"):
        fit_time_model([])
