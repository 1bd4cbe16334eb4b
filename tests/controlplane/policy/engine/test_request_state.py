"""Remaining output of a request: the fast formula against the distribution."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.clock import Duration, Instant
from controlplane.core.forecast import LengthForecast
from controlplane.core.pool_view import Pace
from controlplane.core.slo import Slo
from controlplane.policy.engine.request_state import RequestState
from tests.example_requests import a_request

FORECAST = LengthForecast((0.0, 0.5, 1.0), (10.0, 60.0, 200.0))

lives = st.tuples(
    st.integers(1, 300), st.integers(0, 200), st.integers(1, 200), st.integers(1, 150), st.booleans()
)


def progress(name: str, life: tuple[int, int, int, int, bool]) -> RequestState:
    prompt, done, predicted, limit, is_foretold = life
    one = RequestState(a_request(name, prompt, limit), predicted, FORECAST if is_foretold else None)
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


def begun(slo: Slo, *, predicted: int = 100, is_guess: bool = False) -> RequestState:
    """A request that arrived at 0 and has ten tokens, the first at 100 and the last at 200."""
    state = RequestState(a_request("r", 20, 200, slo=slo), predicted, is_guess=is_guess)
    state.stamp(Instant(100), 9)
    state.stamp(Instant(200), 1)
    return state


@pytest.mark.parametrize(
    ("slo", "last_chance"),
    [
        (Slo(gap=Duration(150)), 350),
        # 89 tokens of 5 after the next one.
        (Slo(e2e=Duration(1_000)), 1_000 - 89 * 5),
        # Ten tokens behind the first, and 89 that regain 15 each.
        (Slo(tpot=Duration(20)), 100 + 10 * 20 + 89 * 15),
        (Slo(tpot=Duration(20), e2e=Duration(1_000), gap=Duration(150)), 350),
    ],
)
def test_a_begun_request_is_lost_after_its_last_chance(slo, last_chance):
    state = begun(slo)
    assert state.last_chance(Duration(5)) == last_chance
    for now, work, is_lost in ((0, 0, False), (1, 0, True), (-50, 50, False), (-50, 51, True)):
        assert state.cannot_meet_slo(Instant(last_chance + now), Duration(work), Duration(5)) == is_lost


def test_without_a_forecast_the_next_token_may_be_the_last():
    assert begun(Slo(e2e=Duration(1_000)), is_guess=True).last_chance(Duration(5)) == 1_000
    assert begun(Slo(e2e=Duration(1_000)), predicted=10).last_chance(Duration(5)) == 1_000
    # TPOT may be regained until the limit of 200 tokens.
    assert begun(Slo(tpot=Duration(20)), is_guess=True).last_chance(Duration(5)) == 300 + 189 * 15


@pytest.mark.parametrize(("now", "slack"), [(250, 50), (301, 0), (1_635, 0), (1_636, None)])
def test_a_victim_behind_its_pace_is_urgent_until_it_is_lost(now, slack):
    state = begun(Slo(tpot=Duration(20)))
    assert state.as_running(Instant(now), 1, Pace(Duration(5), Duration(0))).slack == slack
