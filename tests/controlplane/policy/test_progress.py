"""What is still to come of an answer: quickly told, and as if it had been asked at length."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.clock import Duration, Instant
from controlplane.core.forecast import LengthForecast
from controlplane.core.request import Kind, Request
from controlplane.core.slo import ServiceClass, Slo
from controlplane.policy.engine_share import lease_table
from controlplane.policy.progress import Progress, stamp_all

ANY = ServiceClass("any", Slo(), 0, sheddable=False)
FORECAST = LengthForecast((0.0, 0.5, 1.0), (10.0, 60.0, 200.0))

lives = st.tuples(
    st.integers(1, 300), st.integers(0, 200), st.integers(1, 200), st.integers(1, 150), st.booleans()
)


def progress(name: str, life: tuple[int, int, int, int, bool]) -> Progress:
    prompt, done, predicted, limit, is_foretold = life
    request = Request(name, Kind.GENERATE, "m", "t", ANY, ANY.slo, Instant(0), prompt, limit)
    one = Progress(request, predicted, name, FORECAST if is_foretold else None)
    one.tokens += done
    return one


def to_come(life: tuple[int, int, int, int, bool]) -> int:
    _, done, predicted, limit, is_foretold = life
    left = predicted - done if predicted > done else max(16, done // 4)
    if is_foretold:
        left = round(FORECAST.expected_remaining(done))
    return max(1, min(left, limit - done))


@given(st.lists(lives, max_size=20))
def test_what_is_to_come_is_the_same_for_one_and_for_all(crowd):
    alive = [progress(f"r{at}", life) for at, life in enumerate(crowd)]
    expected = [to_come(life) for life in crowd]
    assert [one.remaining() for one in alive] == expected
    table = lease_table(alive, 16)
    assert table.steps.tolist() == expected
    assert table.variance.tolist() == [FORECAST.deviation**2 if life[-1] else 0.0 for life in crowd]


@pytest.mark.parametrize("done", [0, 50, 500])
def test_what_is_foretold_later_replaces_the_number(done):
    one = progress("one", (100, done, 400, 1_000, False))
    one.foretell(FORECAST)
    assert one.remaining() == to_come((100, done, 400, 1_000, True))


@given(lives, st.integers(1, 9))
def test_what_was_said_before_is_not_said_of_more_tokens_or_by_a_newer_forecast(life, more):
    asked, fresh = progress("asked", life), progress("fresh", life)
    asked.remaining()
    for one in (asked, fresh):
        one.tokens += more
    assert asked.remaining() == fresh.remaining()
    for one in (asked, fresh):
        one.foretell(LengthForecast((0.0, 1.0), (300.0, 400.0)))
    assert asked.remaining() == fresh.remaining()


@given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.sampled_from([None, 5, 50])), max_size=20),
)
def test_all_are_stamped_as_each_would_be(crowd):
    def alive() -> list[Progress]:
        listed = [progress(f"r{at}", (10, 0, 20, 100, False)) for at in range(len(crowd))]
        for one, (_, has_begun, gap) in zip(listed, crowd, strict=True):
            one.gap = None if gap is None else Duration(gap)
            if has_begun:
                one.stamp(Instant(70), 1)
        return listed

    together, alone = alive(), alive()
    stamp_all(
        together, [one.tokens + new for one, (new, *_) in zip(together, crowd, strict=True)], Instant(100)
    )
    for one, (new, *_) in zip(alone, crowd, strict=True):
        if new:
            one.stamp(Instant(100), new)
    seen = ("tokens", "first_token", "last_token", "is_missed")
    assert [[getattr(one, name) for name in seen] for one in together] == [
        [getattr(one, name) for name in seen] for one in alone
    ]
