"""Length forecasts: moments against integration, remaining length against the conditional distribution."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.forecast import LengthForecast


@st.composite
def forecasts(draw: st.DrawFn) -> LengthForecast:
    inner = draw(st.lists(st.integers(1, 99), unique=True, max_size=6))
    levels = (0.0, *(level / 100 for level in sorted(inner)), 1.0)
    tokens = draw(st.lists(st.integers(1, 500), min_size=len(levels), max_size=len(levels)))
    return LengthForecast(levels, tuple(float(t) for t in sorted(tokens)))


@given(forecasts())
def test_the_mean_agrees_with_integration(forecast: LengthForecast) -> None:
    """Midpoints within each piece are exact for the mean."""
    parts = 400
    mean = 0.0
    for a, b in pairwise(forecast.levels):
        middles = a + (np.arange(parts) + 0.5) * (b - a) / parts
        values = np.array([forecast.quantile(float(level)) for level in middles])
        mean += values.mean() * (b - a)
    assert forecast.mean == pytest.approx(mean)


@given(forecasts(), st.floats(0, 1))
def test_quantile_and_level_are_inverse(forecast: LengthForecast, level: float) -> None:
    tokens = forecast.quantile(level)
    assert forecast.tokens[0] <= tokens <= forecast.tokens[-1]
    assert forecast.level_of(tokens) >= level - 1e-9
    below = forecast.level_of(np.nextafter(tokens, 0) - 1e-6)
    assert below <= level + 1e-9


@given(forecasts(), st.integers(0, 600), st.integers(0, 20))
def test_remaining_is_the_conditional_distribution(
    forecast: LengthForecast, done: int, twentieth: int
) -> None:
    passed = forecast.level_of(done)
    if passed >= 1.0:
        return
    level = twentieth / 20
    among_all = min(1.0, passed + level * (1 - passed))
    expected = max(1.0, forecast.quantile(among_all) - done)
    # A point between two knots may cut the corner made by the floor of one token: at most one token.
    assert forecast.remaining(after=done).quantile(level) == pytest.approx(expected, abs=1.0 + 1e-6)


@given(forecasts(), st.lists(st.integers(0, 600) | st.floats(0, 600)).map(sorted))
def test_levels_of_are_the_level_of_each(forecast: LengthForecast, counts: list[float]) -> None:
    assert forecast.levels_of(counts) == [forecast.level_of(count) for count in counts]


@given(forecasts(), st.integers(0, 600))
def test_mean_remaining_is_the_mean_of_remaining(forecast: LengthForecast, done: int) -> None:
    assert forecast.mean_remaining(done) == forecast.remaining(after=done).mean


@given(forecasts())
def test_remaining_after_no_tokens_is_the_forecast(forecast: LengthForecast) -> None:
    assert forecast.remaining(after=0) == forecast


def test_remaining_before_the_shortest_output_is_a_shift() -> None:
    left = LengthForecast((0.0, 1.0), (100.0, 200.0)).remaining(after=10)
    assert (left.levels, left.tokens) == ((0.0, 1.0), (90.0, 190.0))


def test_an_outrun_forecast_expects_at_most_half_as_much_again() -> None:
    left = LengthForecast((0.0, 1.0), (5.0, 20.0)).remaining(after=40)
    assert left.tokens == (1.0, 20.0)
    assert LengthForecast((0.0, 1.0), (1.0, 1.0)).remaining(after=1).tokens == (1.0, 1.0)


def test_a_point_forecast() -> None:
    certain = LengthForecast((0.0, 0.5, 1.0), (7.0, 7.0, 7.0))
    assert certain.mean == 7.0
    assert [certain.quantile(level) for level in (0.0, 0.3, 1.0)] == [7.0, 7.0, 7.0]
    assert (certain.level_of(6.9), certain.level_of(7.0)) == (0.0, 1.0)
    assert certain.remaining(after=3).mean == 4.0


@pytest.mark.parametrize(
    ("levels", "tokens"),
    [
        ((0.0, 1.0), (2.0, 1.0)),
        ((0.0, 0.9), (1.0, 2.0)),
        ((0.1, 1.0), (1.0, 2.0)),
        ((0.0, 0.5, 0.5, 1.0), (1.0, 2.0, 3.0, 4.0)),
        ((0.0, 1.0), (1.0,)),
        ((1.0,), (1.0,)),
    ],
)
def test_invalid_distributions_are_refused(levels: tuple[float, ...], tokens: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="levels rise from 0 to 1"):
        LengthForecast(levels, tokens)


@given(st.lists(st.floats(1, 5_000), min_size=4, max_size=4), st.integers(0, 6_000))
def test_expected_remaining_is_the_mean_of_remaining(tokens: list[float], done: int) -> None:
    forecast = LengthForecast((0.0, 0.3, 0.8, 1.0), tuple(sorted(tokens)))
    left = forecast.remaining(after=done)
    # The remaining length is at least one token; this matters only within one token of a level.
    assert forecast.expected_remaining(done) == pytest.approx(left.mean, abs=1.0)
    assert forecast.expected_remaining(0) == pytest.approx(forecast.mean)


@given(forecasts(), st.integers(0, 600))
def test_expected_remaining_is_the_mean_beyond_the_tokens_so_far(forecast: LengthForecast, done: int) -> None:
    passed = forecast.level_of(done)
    if passed >= 1.0:
        return
    points = zip(forecast.levels, forecast.tokens, strict=True)
    beyond = [(passed, forecast.quantile(passed)), *(point for point in points if point[0] > passed)]
    area = sum((b - a) * (x + y) / 2 for (a, x), (b, y) in pairwise(beyond))
    assert forecast.expected_remaining(done) == pytest.approx(max(1.0, area / (1 - passed) - done))


def test_before_the_first_token_the_forecast_remains() -> None:
    forecast = LengthForecast((0.0, 0.5, 1.0), (1.0, 60.0, 200.0))
    assert forecast.remaining(after=0) is forecast
    # The remaining length is never below one token.
    assert LengthForecast((0.0, 1.0), (0.0, 60.0)).remaining(after=0).tokens == (1.0, 60.0)
