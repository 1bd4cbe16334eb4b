import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.clock import Duration, Instant, seconds
from controlplane.core.request import Kind, Request
from controlplane.core.slo import ServiceClass, Slo
from controlplane.core.view import HiddenStateCost, Pace
from controlplane.policy.cache_tiers.selection import choose_tiers
from controlplane.policy.engine.interface import EngineView
from controlplane.policy.engine.request_state import RequestState
from controlplane.policy.engine.running_batch import RunningBatch

BLOCK, ROWS = 16, 32
STEP = seconds(0.04)
CHEAP = HiddenStateCost(0.0, 1e-7)
NOW = Instant(seconds(100.0))
ANY = ServiceClass("any", Slo(), priority=0, sheddable=False)


def _progress(name, prompt, *, predicted=100):
    request = Request(
        id=name,
        kind=Kind.GENERATE,
        model="m",
        tenant="t",
        service_class=ANY,
        slo=Slo(),
        arrival=NOW,
        prompt_tokens=prompt,
        max_output_tokens=1_000,
        sequences=1,
    )
    return RequestState(request, predicted, name)


def _view(quota, running=()):
    pace = Pace(STEP, Duration(0))
    return EngineView(NOW, pace, BLOCK, quota, 0, 0, 256, RunningBatch(running))


def _choose(view, waiting, hidden=(), *, price=CHEAP):
    return choose_tiers(view, waiting, hidden, rows_per_block=ROWS, price=price)


def _five():
    """Of 13 blocks at their ends."""
    return [_progress(f"w{i}", 100) for i in range(5)]


def test_where_half_the_memory_serves_all_nobody_keeps_hidden_states():
    assert not _choose(_view(2 * 65), _five()).hidden


def test_one_block_less_and_one_does():
    assert len(_choose(_view(2 * 65 - 1), _five()).hidden) == 1


def test_those_that_run_count_as_long_as_they_will_become():
    running = [_progress("r", 16, predicted=16 * 64)]
    assert len(_choose(_view(2 * 65), _five()).hidden) == 0
    assert len(_choose(_view(2 * 65, running), _five()).hidden) == 5


def test_all_do_where_it_costs_nothing():
    assert len(_choose(_view(2 * 65 - 1), _five(), price=HiddenStateCost(0.0)).hidden) == 5


@pytest.mark.parametrize(
    ("price", "count"),
    [
        # Restoring on an A100: 150 tokens of 55 requests take 0.18 s of a step of 0.04.
        (HiddenStateCost(2.24e-5), 0),
        # Absorbing there: 3.4 ms, and 3 for 55 requests.
        (HiddenStateCost(0.0, 5.3e-5, 3.4e-3), 5),
        # Nearly half a step, for nearly twice the requests.
        (HiddenStateCost(0.0, 0.0, 1.8e-2), 5),
        (HiddenStateCost(0.0, 0.0, 1.9e-2), 0),
    ],
    ids=["restoring", "absorbing", "just worth it", "just not"],
)
def test_hidden_states_are_kept_where_they_gain_more_than_they_delay(price, count):
    running = [_progress(f"r{i}", 100) for i in range(50)]
    assert len(_choose(_view(400, running), _five(), price=price).hidden) == count


@pytest.mark.parametrize(
    ("quota", "price", "leaves"),
    [(160, CHEAP, {"long"}), (160, HiddenStateCost(0.0), set()), (159, CHEAP, set())],
    ids=["room and a price", "no price", "no room"],
)
def test_who_has_most_to_come_leaves(quota, price, leaves):
    # 7 and 33 blocks at their ends.
    running = [_progress("short", 100, predicted=10), _progress("long", 100, predicted=420)]
    for one in running:
        one.held = 4
    assert _choose(_view(quota, running), [], {"short", "long"}, price=price).leaving == leaves


def test_nobody_leaves_while_others_wait():
    running = [_progress("long", 100, predicted=400)]
    assert not _choose(_view(500, running), [_progress("w", 10)], {"long"}).leaving


crowds = st.lists(st.tuples(st.integers(1, 600), st.integers(1, 400)), min_size=1, max_size=12)


@given(crowds, st.integers(1, 300), st.sampled_from([0.0, 1e-6, 1e-4]), st.randoms())
def test_the_order_of_asking_changes_nothing(crowd, quota, token, random):
    waiting = [_progress(f"w{i:02}", prompt, predicted=output) for i, (prompt, output) in enumerate(crowd)]
    shuffled = random.sample(waiting, len(waiting))
    price = HiddenStateCost(token)
    assert _choose(_view(quota), waiting, price=price) == _choose(_view(quota), shuffled, price=price)


@given(crowds, st.integers(1, 300))
def test_who_keeps_keys_and_values_at_a_low_price_has_room_to_its_end(crowd, quota):
    waiting = [_progress(f"w{i:02}", prompt, predicted=output) for i, (prompt, output) in enumerate(crowd)]
    hidden = _choose(_view(quota), waiting).hidden
    # What fits one block in either form saves none.
    plain = [p for p in waiting if p.request.id not in hidden and p.tokens + p.predicted > BLOCK]
    assert sum(-(-(p.tokens + p.predicted) // BLOCK) for p in plain) <= quota / 2
