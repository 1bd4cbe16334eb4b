"""The favourite is given out until the answers say otherwise, and they are heard."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictors.contest import _HEAD_START, Contest

LOSSES = st.integers(0, 10**9).map(lambda thousandths: thousandths / 1_000)
PAIRS = st.lists(st.tuples(LOSSES, LOSSES), max_size=60)


def after(pairs):
    """The favourite's loss comes first."""
    contest = Contest(0)
    for pair in pairs:
        contest.judge(pair)
    return contest


@given(st.lists(st.tuples(LOSSES, LOSSES), max_size=_HEAD_START))
def test_a_few_answers_overturn_nothing_whatever_they_were(pairs):
    assert after(pairs).best == 0


@given(PAIRS)
def test_who_never_loses_more_stays(pairs):
    assert after([(min(pair), max(pair)) for pair in pairs]).best == 0


@given(PAIRS, st.integers(-20, 20))
def test_the_unit_of_the_losses_does_not_matter(pairs, power):
    scaled = [(a * 2.0**power, b * 2.0**power) for a, b in pairs]
    assert after(pairs).best == after(scaled).best


@given(PAIRS, st.integers(0, 59))
def test_a_larger_loss_of_the_favourite_never_brings_it_back(pairs, at):
    worse = [(2 * a + 1, b) if place == at else (a, b) for place, (a, b) in enumerate(pairs)]
    assert after(worse).best >= after(pairs).best


@pytest.mark.parametrize(("share", "answers"), [(0.0, 8), (0.5, 24), (0.8, 72)])
def test_what_is_better_takes_over_by_how_much_it_is(share, answers):
    """Just beyond n answers where n (1 - share) is the head start times (1 + share)."""
    assert after([(10.0, 10.0 * share)] * (answers - 1)).best == 0
    assert after([(10.0, 10.0 * share)] * (answers + 1)).best == 1


def test_a_way_that_becomes_the_worse_one_gives_way_again():
    contest = after([(10.0, 2.0)] * 500)
    assert contest.best == 1
    for _ in range(400):
        contest.judge((2.0, 10.0))
    assert contest.best == 0
