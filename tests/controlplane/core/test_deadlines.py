"""Deadlines of the next token and last chances, against the outcome that `Timeline` measures."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.clock import Duration, Instant
from controlplane.core.deadlines import Progress, last_chance, next_token_deadline, token_deadlines
from controlplane.core.forecast import LengthForecast
from controlplane.core.request import Timeline
from controlplane.core.slo import Slo

OBJECTIVES = ("ttft", "tpot", "e2e", "gap")
limits = st.none() | st.integers(1, 2_000).map(Duration)
slos = st.builds(Slo, limits, limits, limits, limits)
steps = st.integers(0, 60).map(Duration)


@dataclass(frozen=True)
class Life:
    """A generation so far: its tokens' times, and the bounds of its final length."""

    stamps: tuple[int, ...]
    likely: tuple[int, int]

    @property
    def timeline(self) -> Timeline:
        seen = Timeline(Instant(0))
        for at in self.stamps:
            seen.stamp_tokens(Instant(at), 1)
        return seen

    def ended(self, final: int, next_at: int, step: int) -> Timeline:
        """The timeline at its end if the next token comes at `next_at` and each further one after `step`."""
        seen = self.timeline
        for at in range(final - len(self.stamps)):
            seen.stamp_tokens(Instant(next_at + step * at), 1)
        seen.finished = seen.last_token
        return seen


@st.composite
def lives(draw):
    stamps = tuple(sorted(draw(st.lists(st.integers(0, 1_500), max_size=12))))
    fewest, most = sorted((draw(st.integers(1, 40)), draw(st.integers(1, 40))))
    return Life(stamps, (len(stamps) + fewest, len(stamps) + most))


def test_every_objective_sets_a_deadline():
    slo = Slo(ttft=Duration(50), tpot=Duration(10), e2e=Duration(500), gap=Duration(30))
    waiting, begun = Progress(Instant(100)), Progress(Instant(100), Instant(140), Instant(170), 5)
    # Nine tokens of 20 after the next one.
    assert token_deadlines(slo, waiting, 10, Duration(20)) == [(50, 150), (500, 420)]
    assert token_deadlines(slo, begun, 10, Duration(20)) == [(10, 190), (30, 200), (500, 420)]
    # Two tokens of 4 instead of 10 regain 12.
    assert token_deadlines(slo, begun, 1, Duration(4), catch_up=2) == [(10, 202), (30, 200), (500, 600)]
    assert next_token_deadline(slo, begun, 10, Duration(20)) == 190
    assert next_token_deadline(Slo(ttft=Duration(50)), begun, 10, Duration(20)) is None


@pytest.mark.parametrize(
    ("slo", "chance"),
    [
        (Slo(gap=Duration(30)), 200),
        # At the shorter of the likely lengths four tokens follow the next one.
        (Slo(e2e=Duration(500)), 600 - 4 * 8),
        # At the longer one nine tokens regain 2 each.
        (Slo(tpot=Duration(10)), 140 + 5 * 10 + 9 * 2),
        # Steps longer than TPOT regain nothing.
        (Slo(tpot=Duration(7)), 140 + 5 * 7),
    ],
)
def test_last_chance_of_each_objective(slo, chance):
    begun = Progress(Instant(100), Instant(140), Instant(170), 5)
    assert last_chance(slo, begun, (10, 15), Duration(8)) == chance


@given(slos, lives(), steps, st.sampled_from(OBJECTIVES), st.integers(1, 2_000), st.integers(1, 40))
def test_a_tighter_objective_never_postpones_a_deadline(slo, life, step, name, limit, remaining):
    present = getattr(slo, name)
    tighter = slo.overridden(Slo(**{name: Duration(limit if present is None else min(limit, present))}))
    seen, never = life.timeline.progress, Instant(1 << 62)
    for found, tightened in (
        [next_token_deadline(each, seen, remaining, step) for each in (slo, tighter)],
        [last_chance(each, seen, life.likely, step) for each in (slo, tighter)],
    ):
        assert (never if tightened is None else tightened) <= (never if found is None else found)


@given(slos, lives(), steps, st.integers(0, 500), st.data())
def test_a_request_past_its_last_chance_ends_late(slo, life, step, late, data):
    chance = last_chance(slo, life.timeline.progress, life.likely, step)
    if chance is None:
        return
    final = data.draw(st.integers(*life.likely))
    # `Timeline.tpot` is rounded down by less than a nanosecond a token.
    end = life.ended(final, max(0, chance, *life.stamps) + final + late, step)
    assert not all(end.objectives_met(slo).values())


@given(slos, lives(), steps)
def test_a_request_that_takes_its_last_chance_ends_in_time(slo, life, step):
    final = life.likely[0]
    exact = Life(life.stamps, (final, final))
    chance = last_chance(slo, life.timeline.progress, exact.likely, step)
    is_reachable = all(limit is None or step <= limit for limit in (slo.tpot, slo.gap))
    if chance is None or chance < max((0, *life.stamps)) or not is_reachable or life.timeline.has_missed(slo):
        return
    assert all(exact.ended(final, chance, step).objectives_met(slo).values())


@given(slos, lives(), steps)
def test_without_delay_the_deadline_is_no_later_than_the_last_chance(slo, life, step):
    seen, fewest = life.timeline.progress, max(1, life.likely[0] - len(life.stamps))
    deadline = next_token_deadline(slo, seen, fewest, step)
    chance = last_chance(slo, seen, life.likely, step)
    assert (deadline is None) == (chance is None)
    assert deadline is None or deadline <= chance


points = st.lists(st.integers(0, 300).map(float), min_size=4, max_size=4).map(sorted)


@given(points, st.integers(0, 320), st.integers(1, 400))
def test_likely_totals_hold_at_least_80_percent(tokens, after, limit):
    forecast = LengthForecast((0.0, 0.3, 0.6, 1.0), tuple(tokens))
    fewest, most = forecast.likely_total(after, limit)
    assert 0 <= fewest <= most <= limit or after > limit
    passed = forecast.level_of(after)
    if passed >= 1.0:
        assert (fewest, most) == (0, limit)
        return
    below = (forecast.level_of(fewest - 1e-6) - passed) / (1 - passed)
    assert below <= 0.1 + 1e-9
    assert most == limit or (forecast.level_of(most) - passed) / (1 - passed) >= 0.9 - 1e-9
