"""Remaining output of a request: the fast formula against the distribution."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.clock import Instant
from controlplane.core.forecast import LengthForecast
from controlplane.core.request import Kind, Request
from controlplane.core.slo import ServiceClass, Slo
from controlplane.policy.engine.request_state import RequestState

ANY = ServiceClass("any", Slo(), 0, sheddable=False)
FORECAST = LengthForecast((0.0, 0.5, 1.0), (10.0, 60.0, 200.0))

lives = st.tuples(
    st.integers(1, 300), st.integers(0, 200), st.integers(1, 200), st.integers(1, 150), st.booleans()
)


def progress(name: str, life: tuple[int, int, int, int, bool]) -> RequestState:
    prompt, done, predicted, limit, is_foretold = life
    request = Request(name, Kind.GENERATE, "m", "t", ANY, ANY.slo, Instant(0), prompt, limit)
    one = RequestState(request, predicted, name, FORECAST if is_foretold else None)
    one.tokens += done
    return one


def to_come(life: tuple[int, int, int, int, bool]) -> int:
    _, done, predicted, limit, is_foretold = life
    left = predicted - done if predicted > done else max(16, done // 4)
    if is_foretold:
        left = round(FORECAST.expected_remaining(done))
    return max(1, min(left, limit - done))


@given(lives)
def test_remaining_follows_the_prediction(life):
    assert progress("one", life).remaining() == to_come(life)


@pytest.mark.parametrize("done", [0, 50, 500])
def test_a_forecast_replaces_the_predicted_number(done):
    one = progress("one", (100, done, 400, 1_000, False))
    one.set_forecast(FORECAST)
    assert one.remaining() == to_come((100, done, 400, 1_000, True))
