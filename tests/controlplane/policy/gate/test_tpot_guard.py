"""TPOT guard: a new request starts only if the running ones still meet their TPOT objectives."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.clock import milliseconds, seconds
from controlplane.core.memory_ledger import Footprint
from controlplane.core.pool_view import DecodeLoad, Waiting
from controlplane.core.slo import Slo
from controlplane.policy.gate.tpot_guard import tpot_feasible
from tests.example_requests import a_request


def new_request(tpot_ms: float | None, *, prompt: int = 0, tokens: int = 10) -> Waiting:
    slo = Slo() if tpot_ms is None else Slo(tpot=milliseconds(tpot_ms))
    request = a_request("new", prompt, 64, slo=slo, sheddable=True)
    return Waiting(request, Footprint(base=1, per_step=1, steps=tokens), None, (0, 0, "new"), 1.0)


def running(
    *answers: tuple[float, int], tpot_ms: float | None = 20, sequences: int | None = None
) -> DecodeLoad:
    """A load of `answers`: milliseconds left and tokens to come of each. A step takes 10 ms and 1 ms per
    sequence, a prompt token 1 ms."""
    return DecodeLoad(
        step=lambda width, cells: 1e6 * (10 + width),
        per_prompt_token=1e6,
        prefill_share=0.0,
        prefill_deviation=0.0,
        sequences=len(answers) if sequences is None else sequences,
        cells=0,
        prompt_tokens_pending=0,
        time_left=np.array([left * 1e6 for left, _ in answers]),
        tokens=np.array([float(tokens) for _, tokens in answers]),
        tpot_objectives=np.full(len(answers), np.inf if tpot_ms is None else tpot_ms * 1e6),
        priority=np.zeros(len(answers)),
    )


@pytest.mark.parametrize(
    ("load", "one", "is_feasible"),
    [
        (running(tpot_ms=None), new_request(20), True),
        (running(tpot_ms=None, sequences=500), new_request(None), True),
        # With nine running the step takes 20 ms, with ten 21 ms.
        (running(tpot_ms=None, sequences=9), new_request(20), True),
        (running(tpot_ms=None, sequences=10), new_request(20), False),
        # A request without a TPOT waits for running ones with a TPOT.
        (running((999, 1), sequences=10), new_request(None), False),
        # No step is that short, so waiting helps no request.
        (running(tpot_ms=None, sequences=10), new_request(10.5), True),
        # Ten tokens take 110 ms alone and 120 ms with another request; then a prompt of 5 tokens.
        (running((120, 10)), new_request(None), True),
        (running((119, 10)), new_request(None), False),
        (running((125, 10)), new_request(None, prompt=5), True),
        (running((124, 10)), new_request(None, prompt=5), False),
        # Time gained earlier may be spent on a prefill.
        (running((400, 10)), new_request(None, prompt=280), True),
        # The objective is missed already.
        (running((109, 10)), new_request(None, prompt=280), True),
        (running((-50, 10), (400, 10)), new_request(None), True),
        (running((-50, 10), (125, 10)), new_request(None), False),
    ],
)
def test_admission_of_one_more_request(load: DecodeLoad, one: Waiting, *, is_feasible: bool) -> None:
    assert tpot_feasible(load, one) is is_feasible


def test_time_lost_to_prefill_counts() -> None:
    load = running((150, 10))
    assert tpot_feasible(load, new_request(None))
    assert not tpot_feasible(replace(load, prefill_share=0.25), new_request(None))


def test_a_new_request_must_meet_more_objectives_than_it_breaks() -> None:
    """A deviation of 3 ms per step is 30 ms in 100 steps, which take 1,100 ms alone and 1,200 ms with another
    request. In 4 steps it is 6 ms."""
    uneven = partial(replace, prefill_deviation=3e6)
    # From 1.3 deviations early to 2 late: 0.88 objectives lost, less than one.
    assert tpot_feasible(uneven(running((1_140, 100))), new_request(None))
    # Two such requests lose 1.76.
    assert not tpot_feasible(uneven(running((1_240, 100), (1_240, 100))), new_request(None))
    # Neither objective is met in any case.
    assert tpot_feasible(uneven(running((900, 100), (900, 100))), new_request(None))
    # Both objectives are met in any case.
    assert tpot_feasible(uneven(running((1_400, 100), (1_400, 100))), new_request(None))
    # Its prefill costs 0.7 objectives; its own TPOT is met in one case of six, or it has none.
    assert not tpot_feasible(uneven(running((48, 4), tpot_ms=None)), new_request(12.1, prompt=10))
    assert tpot_feasible(uneven(running((48, 4), tpot_ms=None)), new_request(None, prompt=10))


@given(
    st.lists(st.tuples(st.floats(-500, 5_000), st.integers(1, 100)), max_size=12),
    st.none() | st.floats(12, 60),
    st.floats(0, 2_000),
)
def test_more_time_left_never_makes_admission_infeasible(
    answers: list[tuple[float, int]], tpot_ms: float | None, more: float
) -> None:
    """Only for requests that are on time at first; a late one with more time may become timely and count."""
    least = 10 + len(answers)
    in_time = [(max(left, tokens * least + 0.001), tokens) for left, tokens in answers]
    one = new_request(tpot_ms, prompt=20)
    richer = [(left + more, tokens) for left, tokens in in_time]
    if tpot_feasible(running(*in_time), one):
        assert tpot_feasible(running(*richer), one)


def test_only_objectives_of_at_least_the_class_count() -> None:
    load = replace(running((125, 10), (200, 10)), priority=np.array([2.0, 1.0]))
    assert not tpot_feasible(load.to_classes_from(2), new_request(None))
    assert tpot_feasible(load.to_classes_from(3), new_request(None))
    assert load.to_classes_from(2).time_left.tolist() == [125e6]
    assert load.to_classes_from(1) is load


def test_a_lower_class_holds_back_no_higher_one() -> None:
    """A batch request may state a TPOT that only an idle engine meets."""
    load = running((119, 10), tpot_ms=11.9)
    assert not tpot_feasible(load, new_request(20))
    assert tpot_feasible(replace(load, priority=np.array([-1.0])), new_request(20))


def test_admissions_of_one_cycle_count() -> None:
    """One cycle admits no more requests than are feasible together."""
    load, count = running(tpot_ms=None, sequences=0), 0
    while tpot_feasible(load, one := new_request(20)):
        load, count = load.with_request(one.request, one.footprint), count + 1
    assert count == 10
    assert load.time_left.tolist() == [200e6] * 10
    assert load.tightest == seconds(1) // 50
