"""Properties of the routing rules."""

from bisect import bisect_right
from itertools import accumulate
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from controlplane.fleet.routing_rules import drawn_box, drawn_other, is_better, may_retry, predicted_ttft

weights = st.lists(st.floats(0.01, 100), min_size=1, max_size=40)
draws = st.floats(0, 1, exclude_max=True)
standings = st.tuples(st.floats(0, 10), st.sampled_from([0.0, 5.0]), st.floats(0, 100))


@given(weights, draws)
def test_a_box_is_drawn_where_the_running_sum_passes_the_draw(
    given_weights: list[float], draw: float
) -> None:
    cumulative = list(accumulate(given_weights))
    expected = min(bisect_right(cumulative, draw * cumulative[-1]), len(cumulative) - 1)
    assert drawn_box(cumulative, draw) == expected


@given(weights, draws, st.integers(0, 39))
def test_the_second_box_is_another_one_where_there_is_another(
    given_weights: list[float], draw: float, first: int
) -> None:
    cumulative = list(accumulate(given_weights))
    first %= len(cumulative)
    other = drawn_other(cumulative, first, draw)
    assert 0 <= other < len(cumulative)
    assert (other == first) == (len(cumulative) == 1)


def test_draws_follow_the_weights() -> None:
    cumulative = list(accumulate([1.0, 3.0, 4.0]))
    points = [(at + 0.5) / 8_000 for at in range(8_000)]
    firsts = [drawn_box(cumulative, point) for point in points]
    assert [firsts.count(at) for at in range(3)] == [1_000, 3_000, 4_000]
    others = [drawn_other(cumulative, 1, point) for point in points]
    assert [others.count(at) for at in range(3)] == [1_600, 0, 6_400]


@given(standings, standings)
def test_of_two_boxes_at_most_one_is_better(
    one: tuple[float, float, float], two: tuple[float, float, float]
) -> None:
    assert not (is_better(*one, *two, 1.0) and is_better(*two, *one, 1.0))


@given(standings)
def test_the_box_drawn_first_wins_a_tie(one: tuple[float, float, float]) -> None:
    assert not is_better(*one, *one, 1.0)


def test_an_old_report_says_nothing() -> None:
    assert not is_better(1.1, 0.0, 0.0, 0.1, 5.0, 9.0, 1.0)
    assert is_better(0.1, 5.0, 9.0, 1.1, 0.0, 0.0, 1.0)
    assert not is_better(1.1, 0.0, 0.0, 1.1, 0.0, 9.0, 1.0)


def test_memory_goes_before_time() -> None:
    assert is_better(0.1, 0.0, 9.0, 0.1, 5.0, 0.1, 1.0)
    assert not is_better(0.1, 5.0, 0.1, 0.1, 0.0, 9.0, 1.0)
    assert is_better(0.1, 5.0, 0.1, 0.1, 5.0, 0.2, 1.0)


@given(st.integers(1, 100_000), st.integers(0, 100_000))
def test_cached_tokens_shorten_the_prompt_but_the_last_token_is_computed(prompt: int, cached: int) -> None:
    ttft = predicted_ttft(0.5, 0.25, 0.001, prompt, cached)
    assert ttft <= predicted_ttft(0.5, 0.25, 0.001, prompt, 0)
    assert ttft >= 0.75 + 0.001


def test_a_retry_needs_budget_news_and_room() -> None:
    assert may_retry(1.0, 0.2, 0.69, 1.0, 0.7, 1.0)
    assert not may_retry(1.0, 0.2, 0.7, 1.0, 0.7, 1.0)
    assert not may_retry(0.99, 0.2, 0.1, 1.0, 0.7, 1.0)
    assert may_retry(1.0, 1.0, 5.0, inf, 0.7, 1.0)
    assert not may_retry(1.0, 1.1, 0.1, inf, 0.7, 1.0)
