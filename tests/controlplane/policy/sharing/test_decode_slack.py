"""The least patient answer that can still be in time decides, and what is lost holds nobody up."""

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


def answer(left: int, steps: int = 1, tpot: int | None = 100) -> Decoding:
    return Decoding((TokenDeadline(D(left), steps),), None if tpot is None else D(tpot))


@pytest.mark.parametrize(
    ("running", "slack"),
    [
        ([], None),
        ([Decoding((), D(100))], None),
        ([answer(500)], 90),
        ([answer(40)], 30),
        ([answer(500, tpot=None)], 490),
        ([answer(500), Decoding((), None), answer(70, tpot=200)], 60),
        ([answer(10)], 0),
        # Half a token behind its pace of 100, with ten to come: 95 a step make it good.
        ([answer(50 + 9 * 100, 10)], 85),
        # Lost: paced by its objective, or by half of the engine's speed.
        ([answer(-5)], 90),
        ([answer(-5, tpot=12)], 10),
        ([answer(-5), answer(40)], 30),
        # In time by what it gained, with an objective that no step of this engine reaches.
        ([answer(500, tpot=8)], 10),
        ([answer(15, tpot=8)], 5),
    ],
)
def test_the_least_gap_less_the_engines_own_step(running, slack):
    assert decode_slack(running, STEP) == slack


@given(st.lists(DECODINGS, max_size=6), DECODINGS, st.integers(0, 50).map(D))
def test_one_more_answer_never_lengthens_it(running, one_more, step):
    before, after = decode_slack(running, step), decode_slack([*running, one_more], step)
    if before is not None:
        assert after is not None
        assert 0 <= after <= before


@given(st.lists(st.tuples(st.integers(-50, 500), st.integers(1, 20), TPOTS), min_size=1, max_size=4))
def test_batches_as_long_as_allowed_make_nobody_late_who_would_have_been_in_time(answers):
    """The engine steps, and beside each step embeddings take all that they may."""
    now, done = 0, 0
    in_time = {n for n, (left, steps, _) in enumerate(answers) if left >= STEP * steps}
    while any(steps > done for _, steps, _ in answers):
        running = [
            Decoding((TokenDeadline(D(left - now), steps - done),), tpot)
            for left, steps, tpot in answers
            if steps > done
        ]
        now += STEP + (decode_slack(running, STEP) or 0)
        done += 1
        for n, (left, steps, _) in enumerate(answers):
            if steps == done and n in in_time:
                assert now <= left


@given(st.lists(st.tuples(st.integers(-500, 9), st.integers(1, 20), TPOTS), min_size=1))
def test_where_all_are_lost_embeddings_get_as_much_as_the_engine(answers):
    lost = [Decoding((TokenDeadline(D(left), steps),), tpot) for left, steps, tpot in answers]
    assert decode_slack(lost, STEP) >= STEP
