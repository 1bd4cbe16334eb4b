"""Choice of the cache tier for starting and running requests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.clock import Duration, Instant, seconds
from controlplane.core.pool_view import HiddenStateCost, Pace
from controlplane.policy.cache_tiers.selection import choose_tiers
from controlplane.policy.engine.interface import EngineView
from controlplane.policy.engine.request_state import RequestState
from controlplane.policy.engine.running_batch import RunningBatch
from tests.example_requests import a_request

BLOCK, ROWS = 16, 32
STEP = seconds(0.04)
CHEAP = HiddenStateCost(0.0, 1e-7)
NOW = Instant(seconds(100.0))


def _progress(name, prompt, *, predicted=100):
    return RequestState(a_request(name, prompt, 1_000, arrival=NOW), predicted)


def _view(quota, running=()):
    pace = Pace(STEP, Duration(0))
    return EngineView(NOW, pace, BLOCK, quota, 0, 0, 256, RunningBatch(running))


def _choose(view, waiting, hidden=(), *, price=CHEAP):
    return choose_tiers(view, waiting, hidden, rows_per_block=ROWS, price=price)


def _five():
    """Five requests of 13 blocks each at their predicted ends."""
    return [_progress(f"w{i}", 100) for i in range(5)]


def test_all_use_kv_if_half_the_memory_suffices():
    assert not _choose(_view(2 * 65), _five()).hidden


def test_one_request_uses_hidden_states_with_one_block_less():
    assert len(_choose(_view(2 * 65 - 1), _five()).hidden) == 1


def test_running_requests_count_with_their_predicted_length():
    running = [_progress("r", 16, predicted=16 * 64)]
    assert len(_choose(_view(2 * 65), _five()).hidden) == 0
    assert len(_choose(_view(2 * 65, running), _five()).hidden) == 5


def test_all_use_hidden_states_if_they_cost_nothing():
    assert len(_choose(_view(2 * 65 - 1), _five(), price=HiddenStateCost(0.0)).hidden) == 5


@pytest.mark.parametrize(
    ("price", "count"),
    [
        # Restoring KV on an A100: 150 tokens of 55 requests take 0.18 s; a step takes 0.04 s.
        (HiddenStateCost(2.24e-5), 0),
        # Absorbed attention on an A100: 3.4 ms, and 3 ms for 55 requests.
        (HiddenStateCost(0.0, 5.3e-5, 3.4e-3), 5),
        # Costs nearly half a step, and serves nearly twice the requests.
        (HiddenStateCost(0.0, 0.0, 1.8e-2), 5),
        (HiddenStateCost(0.0, 0.0, 1.9e-2), 0),
    ],
    ids=["restoring", "absorbing", "just worth it", "just not"],
)
def test_hidden_states_are_used_where_they_gain_more_than_they_delay(price, count):
    running = [_progress(f"r{i}", 100) for i in range(50)]
    assert len(_choose(_view(400, running), _five(), price=price).hidden) == count


@pytest.mark.parametrize(
    ("quota", "price", "leaves"),
    [(160, CHEAP, {"long"}), (160, HiddenStateCost(0.0), set()), (159, CHEAP, set())],
    ids=["room and a price", "no price", "no room"],
)
def test_the_request_with_the_most_remaining_tokens_moves_to_kv(quota, price, leaves):
    # 7 and 33 blocks at their predicted ends.
    running = [_progress("short", 100, predicted=10), _progress("long", 100, predicted=420)]
    for one in running:
        one.held = 4
    assert _choose(_view(quota, running), [], {"short", "long"}, price=price).leaving == leaves


def test_no_request_moves_to_kv_while_others_wait():
    running = [_progress("long", 100, predicted=400)]
    assert not _choose(_view(500, running), [_progress("w", 10)], {"long"}).leaving


sizes_of_requests = st.lists(st.tuples(st.integers(1, 600), st.integers(1, 400)), min_size=1, max_size=12)


@given(sizes_of_requests, st.integers(1, 300), st.sampled_from([0.0, 1e-6, 1e-4]), st.randoms())
def test_input_order_does_not_matter(sizes, quota, token, random):
    waiting = [_progress(f"w{i:02}", prompt, predicted=output) for i, (prompt, output) in enumerate(sizes)]
    shuffled = random.sample(waiting, len(waiting))
    price = HiddenStateCost(token)
    assert _choose(_view(quota), waiting, price=price) == _choose(_view(quota), shuffled, price=price)


@given(sizes_of_requests, st.integers(1, 300))
def test_requests_on_kv_fit_until_their_end(sizes, quota):
    waiting = [_progress(f"w{i:02}", prompt, predicted=output) for i, (prompt, output) in enumerate(sizes)]
    hidden = _choose(_view(quota), waiting).hidden
    # A request that fits one block in either tier saves none.
    plain = [p for p in waiting if p.request.id not in hidden and p.tokens + p.predicted > BLOCK]
    assert sum(-(-(p.tokens + p.predicted) // BLOCK) for p in plain) <= quota / 2
