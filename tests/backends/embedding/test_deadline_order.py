"""The order maximizes the calls that are on time and starves none."""

from dataclasses import dataclass
from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from backends.embedding.deadline_order import DeadlineKey, ServiceRate, deadline_key, on_time_first
from controlplane.core.clock import Instant, seconds


@dataclass(eq=False)
class Call:
    name: int
    tokens: int
    key: DeadlineKey


def calls(*tokens_and_deadlines: tuple[int, int | None]) -> list[Call]:
    made = [
        Call(name, tokens, deadline_key(None if deadline is None else Instant(deadline), name))
        for name, (tokens, deadline) in enumerate(tokens_and_deadlines)
    ]
    return sorted(made, key=lambda call: call.key)


def names(waiting: list[Call], now: int = 0, per_token: float = 1.0) -> list[int]:
    return [call.name for call in on_time_first(waiting, Instant(now), per_token)]


def on_time(order: list[Call], per_token: float) -> int:
    end, count = 0.0, 0
    for call in order:
        end += per_token * call.tokens
        count += not call.key.has_no_deadline and end <= call.key.deadline
    return count


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20)), max_size=6), st.sampled_from((0.0, 0.5, 1.0))
)
def test_no_permutation_has_more_calls_on_time(requested, per_token):
    waiting = calls(*requested)
    chosen = list(on_time_first(waiting, Instant(0), per_token))
    best = max(on_time(list(order), per_token) for order in permutations(waiting))
    assert on_time(chosen, per_token) == best


@given(
    st.lists(st.tuples(st.integers(1, 9), st.none() | st.integers(0, 30)), max_size=12), st.integers(0, 40)
)
def test_each_call_appears_once_and_calls_without_deadline_come_last(requested, now):
    order = names(calls(*requested), now)
    assert sorted(order) == list(range(len(requested)))
    has_deadline = [requested[name][1] is not None for name in order]
    assert has_deadline == sorted(has_deadline, reverse=True)


def test_the_largest_call_is_deferred_if_not_all_can_be_on_time():
    waiting = calls((3, 9), (6, 10), (2, 10), (5, None))
    assert names(waiting) == [0, 2, 1, 3]
    assert names(waiting, per_token=0.5) == [0, 1, 2, 3]


def test_a_nearly_finished_call_is_not_deferred():
    """It has few tokens left, so deferring it would gain little."""
    assert names(calls((1, 10), (9, 10))) == [0, 1]
    assert names(calls((1, 10), (10, 10))) == [0, 1]
    assert names(calls((10, 10), (1, 10))) == [1, 0]


def test_a_call_late_by_a_minute_comes_first():
    minute = seconds(60)
    waiting = calls((1, 5), (1, minute), (1, 3 * minute))
    assert names(waiting, 6) == [1, 2, 0]
    assert names(waiting, minute + 4, 0.0) == [2, 0, 1]
    assert names(waiting, minute + 6, 0.0) == [0, 2, 1]


def test_service_rate_excludes_the_time_between_passes():
    rate = ServiceRate()
    assert rate.ns_per_token == 0.0
    rate.pass_started(Instant(1_000))
    rate.pass_started(Instant(1_500))
    rate.pass_finished(Instant(2_000), 10)
    assert rate.ns_per_token == 100.0
    rate.pass_finished(Instant(3_000), 10)
    assert rate.ns_per_token == 100.0
    rate.idle()
    rate.pass_started(Instant(90_000))
    rate.pass_finished(Instant(90_010), 10)
    assert 50.0 < rate.ns_per_token < 70.0
