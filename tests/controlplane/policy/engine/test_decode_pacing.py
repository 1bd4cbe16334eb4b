"""Steps wait for somebody else only with time that was promised to nobody."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.clock import Duration, Instant
from controlplane.core.request import Kind, Request
from controlplane.core.slo import ServiceClass, Slo
from controlplane.policy.engine.decode_pacing import next_step_start
from controlplane.policy.engine.request_state import RequestState

LAST, NOW = Instant(1_000), Instant(1_010)


def running(*, first=900, done=11, limit=111, gap=None, **promise) -> RequestState:
    """It arrived at 0 and has `done` tokens; each of its objectives is in nanoseconds."""
    slo = Slo(**{name: Duration(value) for name, value in promise.items()})
    request = Request(
        "r", Kind.GENERATE, "model", "tests", ServiceClass("c", slo, 0, sheddable=True), slo, Instant(0),
        prompt_tokens=8, max_output_tokens=limit,
    )  # fmt: skip
    progress = RequestState(request, 100, "r", gap=gap)
    if first is not None:
        progress.first_token, progress.last_token = Instant(first), Instant(990)
        progress.tokens += done
    return progress


@pytest.mark.parametrize(
    ("those", "waits"),
    [
        ([], 0),
        ([running()], 0),
        ([running(tpot=24)], 12),
        ([running(tpot=24), running(tpot=60), running()], 12),
        # Half of its promise has the next token come at 882 + 11 * 12 = 1,014; at 900 + 11 * 10 = now.
        ([running(tpot=24, first=882)], 4),
        ([running(tpot=20)], 0),
        ([running(gap=30, tpot=60)], 15),
        # 4,000 left for 100 tokens.
        ([running(e2e=5_010)], 20),
        ([running(e2e=5_010, limit=11)], 2_000),
        # Its last token has a minute left.
        ([running(e2e=60_000_000_000, limit=12)], 50_000_000),
        # Late for its next token, late for all of it, and not begun.
        ([running(tpot=60), running(tpot=9)], 0),
        ([running(tpot=60), running(e2e=1_009)], 0),
        ([running(tpot=60), running(first=None, ttft=500)], 0),
    ],
)
def test_half_of_the_shortest_promise_is_given_away(those, waits):
    assert next_step_start(those, LAST, NOW, 0.5) == LAST + waits


PROMISES = st.fixed_dictionaries(
    {}, optional={name: st.integers(1, 5_000) for name in ("tpot", "e2e", "gap")}
)


@given(st.lists(PROMISES, max_size=5), PROMISES, st.floats(0, 0.99))
def test_nobody_with_a_promise_makes_it_longer_and_a_share_of_nothing_is_nothing(said, one_more, share):
    those = [running(**promise) for promise in said]
    before, after = (
        next_step_start(those, LAST, NOW, share),
        next_step_start([*those, running(**one_more)], LAST, NOW, share),
    )
    assert after >= LAST
    if any(said):
        assert after <= before
    assert next_step_start(those, LAST, NOW, 0.0) == LAST
