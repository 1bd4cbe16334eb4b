import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.clock import Duration, Instant, seconds
from controlplane.core.request import Kind, Request
from controlplane.core.slo import ServiceClass, Slo
from controlplane.core.view import Pace
from controlplane.policy.engine_step import EngineView
from controlplane.policy.forms import choose_forms
from controlplane.policy.progress import Progress

BLOCK, ROWS = 16, 32
NOW = Instant(seconds(100.0))
ANY = ServiceClass("any", Slo(), priority=0, sheddable=False)


def _progress(name, prompt, *, predicted=100, age=1.0, slo=None):
    request = Request(
        id=name,
        kind=Kind.GENERATE,
        model="m",
        tenant="t",
        service_class=ANY,
        slo=slo or Slo(),
        arrival=Instant(NOW - seconds(age)),
        prompt_tokens=prompt,
        max_output_tokens=1_000,
        sequences=1,
    )
    return Progress(request, predicted, name)


def _view(free, running=(), held=None, quota=1_000):
    pace = Pace(Duration(0), Duration(0))
    return EngineView(NOW, pace, BLOCK, quota, quota - free, 0, 256, list(running), held or {})


def _choose(view, waiting, hidden=(), *, block_seconds=0.0):
    return choose_forms(view, waiting, hidden, rows_per_block=ROWS, block_seconds=block_seconds)


def test_where_all_fit_nobody_keeps_hidden_states():
    waiting = [_progress(f"w{i}", 100) for i in range(5)]
    assert not _choose(_view(free=5 * 7), waiting).hidden


def test_one_block_less_and_somebody_does():
    waiting = [_progress(f"w{i}", 100) for i in range(5)]
    assert _choose(_view(free=5 * 7 - 1), waiting).hidden


def test_all_do_where_only_that_serves_all_and_costs_nothing():
    waiting = [_progress(f"w{i}", 100) for i in range(5)]
    assert _choose(_view(free=20), waiting).hidden == {f"w{i}" for i in range(5)}


def test_nobody_does_at_a_price_above_its_wait():
    running = [_progress(f"r{i}", 100) for i in range(50)]
    waiting = [_progress(f"w{i}", 100) for i in range(5)]
    # 0.3 ms a block (restoring on an A100), 55 requests, 100 steps: 1.6 s a block, waited for 1 s.
    assert not _choose(_view(5, running), waiting, block_seconds=3e-4).hidden


def test_a_broken_promise_is_worth_no_price():
    kept, broken = Slo(ttft=seconds(9.0)), Slo(ttft=seconds(0.5))
    waiting = [
        _progress("kept", 100, predicted=4, age=5.0, slo=kept),
        _progress("broken", 100, predicted=4, age=5.0, slo=broken),
    ]
    # 4 steps of two requests: 0.2 s a block, 1.4 s in all; five seconds of waiting count as 0.5 or 5.
    assert _choose(_view(5), waiting, block_seconds=2.5e-2).hidden == {"kept"}


@pytest.mark.parametrize(
    ("free", "block_seconds", "leaves"),
    [(500, 1e-5, {"long"}), (500, 0.0, set()), (251, 1e-5, set())],
    ids=["room and a price", "no price", "no room"],
)
def test_who_has_most_to_come_leaves(free, block_seconds, leaves):
    running = [_progress("short", 100, predicted=10), _progress("long", 100, predicted=400)]
    view = _view(free, running, {"short": 4, "long": 4})
    assert _choose(view, [], {"short", "long"}, block_seconds=block_seconds).leaving == leaves


def test_nobody_leaves_while_others_wait():
    running = [_progress("long", 100, predicted=400)]
    view = _view(500, running, {"long": 4})
    assert not _choose(view, [_progress("w", 10)], {"long"}, block_seconds=1e-5).leaving


crowds = st.lists(
    st.tuples(st.integers(1, 600), st.integers(1, 400), st.floats(0.0, 30.0)), min_size=1, max_size=12
)


@given(crowds, st.integers(0, 150), st.sampled_from([0.0, 1e-6, 1e-4]), st.randoms())
def test_the_order_of_asking_changes_nothing(crowd, free, block_seconds, random):
    waiting = [_progress(f"w{i:02}", p, predicted=o, age=a) for i, (p, o, a) in enumerate(crowd)]
    shuffled = random.sample(waiting, len(waiting))
    first = _choose(_view(free), waiting, block_seconds=block_seconds)
    assert first == _choose(_view(free), shuffled, block_seconds=block_seconds)


@given(crowds, st.integers(0, 150))
def test_who_keeps_keys_and_values_at_a_low_price_was_given_them(crowd, free):
    waiting = [_progress(f"w{i:02}", p, predicted=o, age=a + 1) for i, (p, o, a) in enumerate(crowd)]
    hidden = _choose(_view(free), waiting, block_seconds=1e-9).hidden
    plain = [p for p in waiting if p.request.id not in hidden]
    blocks = np.array([-(-(p.tokens + 1) // BLOCK) for p in plain])
    assert blocks.sum() <= free
