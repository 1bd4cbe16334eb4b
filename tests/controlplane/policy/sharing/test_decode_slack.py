"""The tightest request that can still be on time sets the slack and the lead; late ones set no limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.clock import Duration
from controlplane.core.ports import PassLimit
from controlplane.policy.sharing.decode_slack import Decoding, TokenDeadline, decode_slack

D = Duration
STEP = D(10)
DEADLINES = st.lists(
    st.builds(TokenDeadline, st.integers(-100, 5_000).map(D), st.integers(1, 50)), min_size=1, max_size=2
).map(tuple)
TPOTS = st.none() | st.integers(1, 300).map(D)
DECODINGS = st.builds(Decoding, DEADLINES, DEADLINES, TPOTS) | st.builds(
    Decoding, st.just(()), st.just(()), TPOTS
)


def decoding(left: int, steps: int = 1, tpot: int | None = 100, *, fewest: int | None = None) -> Decoding:
    tpot_time = None if tpot is None else D(tpot)
    sure = steps if fewest is None else fewest
    sure_left = left - (steps - sure) * (tpot or 0)
    deadline, sure_deadline = TokenDeadline(D(left), steps), TokenDeadline(D(sure_left), sure)
    return Decoding((deadline,), (sure_deadline,), tpot_time)


@pytest.mark.parametrize(
    ("running", "slack"),
    [
        ([decoding(500)], 90),
        ([decoding(40)], 30),
        ([decoding(500, tpot=None)], 490),
        ([decoding(500), Decoding((), (), None), decoding(70, tpot=200)], 60),
        ([decoding(10)], 0),
        # Half a token behind a TPOT of 100, with ten to come: 95 per step recovers it.
        ([decoding(50 + 9 * 100, 10)], 85),
        ([decoding(-5), decoding(40)], 30),
        # On time through time gained earlier; no step of this engine reaches its TPOT.
        ([decoding(500, tpot=8)], 10),
        ([decoding(15, tpot=8)], 5),
    ],
)
def test_slack_is_the_smallest_gap_less_one_step(running, slack):
    assert decode_slack(running, STEP).slack == slack


@pytest.mark.parametrize(
    "running", [[], [Decoding((), (), D(100))], [decoding(-5)], [decoding(9), decoding(19, 2)]]
)
def test_without_a_request_that_can_be_on_time_there_is_no_limit(running):
    assert decode_slack(running, STEP) is None


def test_lead_is_the_time_gained_so_far_if_the_response_ends_soon():
    # 400 ns are left for 3 tokens of 10 ns: 370 in all, and 190 if the next token is its last.
    assert decode_slack([decoding(400, 3)], STEP) == PassLimit(D(90), D(370))
    assert decode_slack([decoding(400, 3, fewest=1)], STEP) == PassLimit(D(90), D(190))
    assert decode_slack([decoding(400, 3), decoding(250, 2)], STEP).lead == 230


def test_prefills_take_their_share_of_the_time_left():
    assert decode_slack([decoding(400, 10)], STEP, 0.5) == PassLimit(D(10), D(100))
    assert decode_slack([decoding(400, 10)], STEP, 0.9) is None


@given(st.lists(DECODINGS, max_size=6), DECODINGS, st.integers(0, 50).map(D), st.floats(0, 1))
def test_one_more_request_never_lengthens_a_pass(running, one_more, step, lost):
    before, after = decode_slack(running, step, lost), decode_slack([*running, one_more], step, lost)
    if before is not None:
        assert after is not None
        assert 0 <= after.slack <= before.slack
        assert after.slack <= after.lead <= before.lead


@given(st.lists(st.tuples(st.integers(-50, 500), st.integers(1, 20), TPOTS), min_size=1, max_size=4))
def test_batches_within_the_slack_make_no_timely_request_late(drawn):
    """After every engine step embeddings use the whole slack."""
    now, done = 0, 0
    in_time = {n for n, (left, steps, _) in enumerate(drawn) if left >= STEP * steps}
    while any(steps > done for _, steps, _ in drawn):
        running = [decoding(left - now, steps - done, tpot) for left, steps, tpot in drawn if steps > done]
        limit = decode_slack(running, STEP)
        now += STEP + (limit.slack if limit else 0)
        done += 1
        for n, (left, steps, _) in enumerate(drawn):
            if steps == done and n in in_time:
                assert now <= left


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 20), TPOTS), min_size=1, max_size=4))
def test_one_pass_within_the_lead_leaves_every_timely_request_its_steps(drawn):
    running = [decoding(left, steps, tpot) for left, steps, tpot in drawn]
    limit = decode_slack(running, STEP)
    if limit is not None and limit.lead > limit.slack:
        for left, steps, _ in drawn:
            assert left < STEP * steps or left - limit.lead >= STEP * steps
