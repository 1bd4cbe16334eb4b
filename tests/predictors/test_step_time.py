"""The pace follows lasting change and shrugs off single stalls."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.clock import Duration, milliseconds, seconds
from controlplane.core.view import Pace
from predictors.step_time import ObservedPace


def test_nothing_observed_is_no_pace():
    assert ObservedPace().pace is None


def test_steady_work_is_learned_exactly():
    pace = ObservedPace()
    for _ in range(10):
        pace.observe_step(milliseconds(20))
        pace.observe_prefill(100, milliseconds(120))
    assert pace.pace == Pace(step=milliseconds(20), per_prompt_token=milliseconds(1))


def test_prompts_alone_make_a_pace():
    pace = ObservedPace()
    pace.observe_prefill(50, milliseconds(100))
    assert pace.pace == Pace(step=Duration(0), per_prompt_token=milliseconds(2))


def test_one_stall_moves_little():
    pace = ObservedPace(memory=64)
    for _ in range(100):
        pace.observe_step(milliseconds(20))
    pace.observe_step(seconds(30))
    assert pace.pace is not None
    assert pace.pace.step < milliseconds(21)


@pytest.mark.parametrize("now_ms", [2, 200])
def test_a_tenfold_change_is_followed_within_five_memories(now_ms):
    pace = ObservedPace(memory=64)
    for _ in range(500):
        pace.observe_step(milliseconds(20))
    for _ in range(5 * 64):
        pace.observe_step(milliseconds(now_ms))
    assert pace.pace is not None
    assert pace.pace.step == pytest.approx(milliseconds(now_ms), rel=0.15)


def test_long_prompts_outweigh_short_ones():
    pace = ObservedPace(memory=64)
    for _ in range(400):
        pace.observe_prefill(1_000, milliseconds(1_000))
        pace.observe_prefill(10, milliseconds(30))
    assert pace.pace is not None
    assert pace.pace.per_prompt_token == pytest.approx(milliseconds(1), rel=0.1)


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 10_000), st.integers(0, 10**11)), min_size=1, max_size=60
    )
)
def test_the_estimate_stays_within_what_was_seen(observations):
    pace = ObservedPace()
    steps, rates = [], []
    for is_step, tokens, took in observations:
        if is_step:
            pace.observe_step(Duration(took))
            steps.append(took)
        else:
            pace.observe_prefill(tokens, Duration(took))
            rates += [took / tokens] if tokens else []
    if not steps and not rates:
        assert pace.pace is None
        return
    assert pace.pace is not None
    assert 0 <= pace.pace.step <= max(steps, default=0)
    assert 0 <= pace.pace.per_prompt_token <= max(rates, default=0) + 1
