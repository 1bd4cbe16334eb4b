"""Decode steps are delayed only within the TPOT objectives."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from controlplane.core.clock import NO_TIME, Duration, Instant
from controlplane.core.slo import Slo
from controlplane.policy.engine.decode_pacing import next_step_start as paced_start
from controlplane.policy.engine.request_state import RequestState
from tests.example_requests import a_request

LAST, NOW = Instant(1_000), Instant(1_010)
LONG = Duration(1_000_000)


def next_step_start(states, previous, now, share, *, free_share=1.0, longest_step=NO_TIME, step=LONG):
    """`paced_start` where memory is free, no step was long and a step takes long, unless stated."""
    return paced_start(
        states, previous, now, share, free_share=free_share, longest_step=longest_step, step=step
    )


def running(*, first=900, done=11, limit=111, **objectives) -> RequestState:
    """A state that arrived at 0 and has `done` tokens; objectives in nanoseconds."""
    slo = Slo(**{name: Duration(value) for name, value in objectives.items()})
    progress = RequestState(a_request("r", 8, limit, slo=slo), 100)
    if first is not None:
        progress.first_token, progress.last_token = Instant(first), Instant(990)
        progress.tokens += done
    return progress


@pytest.mark.parametrize(
    ("states", "waits"),
    [
        ([], 0),
        ([running()], 0),
        ([running(tpot=24)], 12),
        ([running(tpot=24), running(tpot=60), running()], 12),
        # At half of the TPOT the next token is due at 882 + 11 * 12 = 1,014; below at 900 + 11 * 10 = NOW.
        ([running(tpot=24, first=882)], 4),
        ([running(tpot=20)], 0),
        ([running(gap=30, tpot=60)], 15),
        # 4,000 ns left for 100 tokens.
        ([running(e2e=5_010)], 20),
        ([running(e2e=5_010, limit=11)], 2_000),
        # A minute left for the last token.
        ([running(e2e=60_000_000_000, limit=12)], 50_000_000),
        # Late for the next token, late for e2e, and without a first token.
        ([running(tpot=60), running(tpot=9)], 0),
        ([running(tpot=60), running(e2e=1_009)], 0),
        ([running(tpot=60), running(first=None, ttft=500)], 0),
    ],
)
def test_the_delay_is_half_of_the_tightest_objective(states, waits):
    assert next_step_start(states, LAST, NOW, 0.5) == LAST + waits


OBJECTIVES = st.fixed_dictionaries(
    {}, optional={name: st.integers(1, 5_000) for name in ("tpot", "e2e", "gap")}
)


@given(st.lists(OBJECTIVES, max_size=5), OBJECTIVES, st.floats(0, 0.99))
def test_one_more_objective_never_lengthens_the_delay_and_share_zero_never_delays(drawn, one_more, share):
    states = [running(**objectives) for objectives in drawn]
    before, after = (
        next_step_start(states, LAST, NOW, share),
        next_step_start([*states, running(**one_more)], LAST, NOW, share),
    )
    assert after >= LAST
    if any(drawn):
        assert after <= before
    assert next_step_start(states, LAST, NOW, 0.0) == LAST


@given(
    st.dictionaries(st.sampled_from(["tpot", "e2e", "gap"]), st.integers(1, 20_000), min_size=1),
    st.floats(0, 0.99),
)
@example({"tpot": 60, "e2e": 2_010}, 0.5)
@example({"gap": 60, "tpot": 24}, 0.5)
def test_the_tightest_of_the_objectives_of_a_request_sets_its_delay(objectives, share):
    alone = [
        next_step_start([running(**{name: each})], LAST, NOW, share) for name, each in objectives.items()
    ]
    assert next_step_start([running(**objectives)], LAST, NOW, share) == min(alone)


def test_the_delay_shrinks_with_the_free_memory():
    states = [running(tpot=24)]
    starts = [next_step_start(states, LAST, NOW, 0.5, free_share=free) for free in (1.0, 0.5, 0.0)]
    assert starts == [LAST + 12, LAST + 6, LAST]


@pytest.mark.parametrize(("used", "waits"), [(0.25, 8), (0.4, 5), (0.5, 4), (0.8, 2)])
def test_steps_are_stretched_only_until_half_of_the_memory_is_in_use(used, waits):
    """The TPOT allows 30 and more; a step takes 4, and twice of that doubles a use of a quarter."""
    states = [running(tpot=400, first=100)]
    start = next_step_start(states, LAST, NOW, 0.5, free_share=1 - used, step=Duration(4))
    assert start == LAST + waits


def test_the_free_memory_alone_counts_until_the_time_of_a_step_is_known():
    states = [running(tpot=24)]
    assert next_step_start(states, LAST, NOW, 0.5, free_share=0.5, step=NO_TIME) == LAST + 6


def test_a_lead_of_less_than_the_longest_step_is_not_spent():
    """The next token is due at 900 + 11 * 24 = 1,164, 154 after NOW."""
    states = [running(tpot=24)]
    assert next_step_start(states, LAST, NOW, 0.5, longest_step=Duration(100)) == LAST + 12
    assert next_step_start(states, LAST, NOW, 0.5, longest_step=Duration(150)) == LAST + 4
    assert next_step_start(states, LAST, NOW, 0.5, longest_step=Duration(155)) == LAST


@given(st.floats(0, 1), st.floats(0, 1), st.integers(0, 400), st.integers(0, 400), st.floats(0, 0.99))
def test_less_memory_and_longer_steps_never_lengthen_the_delay(free, freer, short, longer, share):
    states = [running(tpot=24), running(tpot=60, first=880)]
    free, freer = sorted((free, freer))
    short, longer = sorted((short, longer))
    least = next_step_start(states, LAST, NOW, share, free_share=free, longest_step=Duration(longer))
    most = next_step_start(states, LAST, NOW, share, free_share=freer, longest_step=Duration(short))
    assert LAST <= least <= most
