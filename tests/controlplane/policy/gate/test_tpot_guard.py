"""One more may start as long as nobody is made late by it who was not late already."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.clock import Instant, milliseconds, seconds
from controlplane.core.memory import Footprint
from controlplane.core.request import Kind, Request
from controlplane.core.slo import ServiceClass, Slo
from controlplane.core.view import DecodeLoad, Waiting
from controlplane.policy.gate.tpot_guard import tpot_feasible


def newcomer(tpot_ms: float | None, *, prompt: int = 0, tokens: int = 10) -> Waiting:
    slo = Slo() if tpot_ms is None else Slo(tpot=milliseconds(tpot_ms))
    kind = ServiceClass("chat", slo, priority=0, sheddable=True)
    request = Request("new", Kind.GENERATE, "m", "t", kind, slo, Instant(0), prompt, 64)
    return Waiting(request, Footprint(base=1, per_step=1, steps=tokens), None, (0, 0, "new"), 1.0)


def running(
    *answers: tuple[float, int], tpot_ms: float | None = 20, sequences: int | None = None
) -> DecodeLoad:
    """Each of `answers` has so many milliseconds left for so many tokens. A step takes 10 ms and one more for
    each sequence, a prompt token 1 ms."""
    return DecodeLoad(
        step=lambda width, cells: 1e6 * (10 + width),
        per_prompt_token=1e6,
        lost_share=0.0,
        lost_deviation=0.0,
        sequences=len(answers) if sequences is None else sequences,
        cells=0,
        unread=0,
        left=np.array([left * 1e6 for left, _ in answers]),
        tokens=np.array([float(tokens) for _, tokens in answers]),
        promised=np.full(len(answers), np.inf if tpot_ms is None else tpot_ms * 1e6),
        priority=np.zeros(len(answers)),
    )


@pytest.mark.parametrize(
    ("tempo", "one", "is_kept"),
    [
        (running(tpot_ms=None), newcomer(20), True),
        (running(tpot_ms=None, sequences=500), newcomer(None), True),
        # Nine beside it make 20 ms a step, ten make 21.
        (running(tpot_ms=None, sequences=9), newcomer(20), True),
        (running(tpot_ms=None, sequences=10), newcomer(20), False),
        # One without a promise is held back for those that have one.
        (running((999, 1), sequences=10), newcomer(None), False),
        # No step is as short as that, so nobody is helped by waiting.
        (running(tpot_ms=None, sequences=10), newcomer(10.5), True),
        # Ten tokens take 110 ms alone and 120 beside another; then its prompt of 5.
        (running((120, 10)), newcomer(None), True),
        (running((119, 10)), newcomer(None), False),
        (running((125, 10)), newcomer(None, prompt=5), True),
        (running((124, 10)), newcomer(None, prompt=5), False),
        # What it gained before may be spent on a prompt.
        (running((400, 10)), newcomer(None, prompt=280), True),
        # Lost already.
        (running((109, 10)), newcomer(None, prompt=280), True),
        (running((-50, 10), (400, 10)), newcomer(None), True),
        (running((-50, 10), (125, 10)), newcomer(None), False),
    ],
)
def test_one_more(tempo: DecodeLoad, one: Waiting, *, is_kept: bool) -> None:
    assert tpot_feasible(tempo, one) is is_kept


def test_what_decoding_loses_takes_its_share() -> None:
    tempo = running((150, 10))
    assert tpot_feasible(tempo, newcomer(None))
    assert not tpot_feasible(replace(tempo, lost_share=0.25), newcomer(None))


def test_a_newcomer_must_keep_more_promises_than_it_is_likely_to_break() -> None:
    """A deviation of 3 ms a step is one of 30 ms in 100 steps, which take 1,100 ms alone and 1,200 beside
    another. In 4 steps it is 6 ms."""
    uneven = partial(replace, lost_deviation=3e6)
    # From 1.3 deviations in hand to 2 in arrears: 0.88 promises, less than one.
    assert tpot_feasible(uneven(running((1_140, 100))), newcomer(None))
    # Of two such, 1.76.
    assert not tpot_feasible(uneven(running((1_240, 100), (1_240, 100))), newcomer(None))
    # Neither is kept anyway.
    assert tpot_feasible(uneven(running((900, 100), (900, 100))), newcomer(None))
    # Both are kept anyway.
    assert tpot_feasible(uneven(running((1_400, 100), (1_400, 100))), newcomer(None))
    # Its prompt costs 0.7 of a promise; its own is kept in one case of six, or it has none to miss.
    assert not tpot_feasible(uneven(running((48, 4), tpot_ms=None)), newcomer(12.1, prompt=10))
    assert tpot_feasible(uneven(running((48, 4), tpot_ms=None)), newcomer(None, prompt=10))


@given(
    st.lists(st.tuples(st.floats(-500, 5_000), st.integers(1, 100)), max_size=12),
    st.none() | st.floats(12, 60),
    st.floats(0, 2_000),
)
def test_more_time_left_keeps_nobody_out(
    answers: list[tuple[float, int]], tpot_ms: float | None, more: float
) -> None:
    """Those in time at first: what gains time may come within reach, and then asks for it."""
    least = 10 + len(answers)
    in_time = [(max(left, tokens * least + 0.001), tokens) for left, tokens in answers]
    one = newcomer(tpot_ms, prompt=20)
    richer = [(left + more, tokens) for left, tokens in in_time]
    if tpot_feasible(running(*in_time), one):
        assert tpot_feasible(running(*richer), one)


def test_of_what_was_promised_only_that_to_higher_classes_can_be_asked() -> None:
    tempo = replace(running((125, 10), (200, 10)), priority=np.array([2.0, 1.0]))
    assert not tpot_feasible(tempo.to_higher(1), newcomer(None))
    assert tpot_feasible(tempo.to_higher(2), newcomer(None))
    assert tempo.to_higher(1).left.tolist() == [125e6]


def test_the_next_of_a_round_finds_the_one_before() -> None:
    """With the newcomers of one round counted, no round lets in more than fit together."""
    tempo, count = running(tpot_ms=None, sequences=0), 0
    while tpot_feasible(tempo, one := newcomer(20)):
        tempo, count = tempo.with_one(one.request, one.footprint.steps), count + 1
    assert count == 10
    assert tempo.left.tolist() == [200e6] * 10
    assert tempo.tightest == seconds(1) // 50
