"""The tightest request that can still be on time sets the slack; late ones do not stop embeddings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.clock import Duration
from controlplane.policy.sharing.decode_slack import Decoding, TokenDeadline, decode_slack

D = Duration
STEP = D(10)
PLEDGES = st.builds(TokenDeadline, st.integers(-100, 5_000).map(D), st.integers(1, 50))
TPOTS = st.none() | st.integers(1, 300).map(D)
DECODINGS = st.builds(Decoding, st.lists(PLEDGES, max_size=2).map(tuple), TPOTS)


def decoding(left: int, steps: int = 1, tpot: int | None = 100) -> Decoding:
    return Decoding((TokenDeadline(D(left), steps),), None if tpot is None else D(tpot))


@pytest.mark.parametrize(
    ("running", "slack"),
    [
        ([], None),
        ([Decoding((), D(100))], None),
        ([decoding(500)], 90),
        ([decoding(40)], 30),
        ([decoding(500, tpot=None)], 490),
        ([decoding(500), Decoding((), None), decoding(70, tpot=200)], 60),
        ([decoding(10)], 0),
        # Half a token behind a TPOT of 100, with ten to come: 95 per step recovers it.
        ([decoding(50 + 9 * 100, 10)], 85),
        # Late: paced by its TPOT, or by half of the engine's speed.
        ([decoding(-5)], 90),
        ([decoding(-5, tpot=12)], 10),
        ([decoding(-5), decoding(40)], 30),
        # On time through time gained earlier; no step of this engine reaches its TPOT.
        ([decoding(500, tpot=8)], 10),
        ([decoding(15, tpot=8)], 5),
    ],
)
def test_slack_is_the_smallest_gap_less_one_step(running, slack):
    assert decode_slack(running, STEP) == slack


@given(st.lists(DECODINGS, max_size=6), DECODINGS, st.integers(0, 50).map(D))
def test_one_more_request_never_lengthens_the_slack(running, one_more, step):
    before, after = decode_slack(running, step), decode_slack([*running, one_more], step)
    if before is not None:
        assert after is not None
        assert 0 <= after <= before


@given(st.lists(st.tuples(st.integers(-50, 500), st.integers(1, 20), TPOTS), min_size=1, max_size=4))
def test_batches_within_the_slack_make_no_timely_request_late(drawn):
    """After every engine step embeddings use the whole slack."""
    now, done = 0, 0
    in_time = {n for n, (left, steps, _) in enumerate(drawn) if left >= STEP * steps}
    while any(steps > done for _, steps, _ in drawn):
        running = [
            Decoding((TokenDeadline(D(left - now), steps - done),), tpot)
            for left, steps, tpot in drawn
            if steps > done
        ]
        now += STEP + (decode_slack(running, STEP) or 0)
        done += 1
        for n, (left, steps, _) in enumerate(drawn):
            if steps == done and n in in_time:
                assert now <= left


@given(st.lists(st.tuples(st.integers(-500, 9), st.integers(1, 20), TPOTS), min_size=1))
def test_if_all_requests_are_late_embeddings_get_as_much_time_as_the_engine(drawn):
    lost = [Decoding((TokenDeadline(D(left), steps),), tpot) for left, steps, tpot in drawn]
    assert decode_slack(lost, STEP) >= STEP
