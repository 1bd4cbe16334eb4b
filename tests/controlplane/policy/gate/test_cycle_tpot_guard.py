"""A newcomer and the pace of those under way, in one cycle: who waits for it, and who is told at once."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from controlplane.core.clock import milliseconds
from controlplane.core.decision import Reason
from controlplane.core.memory import Footprint
from controlplane.core.request import Owner
from controlplane.core.slo import Slo
from controlplane.core.view import DecodeLoad, PoolView, Queue
from controlplane.policy.gate.cycle import run_cycle
from tests.controlplane.policy.gate.test_cycle import (
    CLASSES,
    NOW,
    OPTIONS,
    admission,
    share_of,
    view_of,
    waiting_of,
)


def one_more_at_a_time(width: int) -> DecodeLoad:
    """So many run, and one more keeps the promise of 20 ms a token that somebody has."""
    return DecodeLoad(
        step=lambda sequences, cells: 20e6 if sequences <= width + 1 else 21e6,
        per_prompt_token=0.0, lost_share=0.0, lost_deviation=0.0, sequences=width, cells=0, unread=0,
        left=np.array([1e12]), tokens=np.ones(1), promised=np.array([20e6]), priority=np.array([1.0]),
    )  # fmt: skip


def test_who_would_break_the_pace_of_others_waits_and_takes_nobodys_place():
    share = replace(share_of([Footprint(10, steps=400)]), decode_load=one_more_at_a_time(1))
    wish = {"footprint": Footprint(10, steps=5), "accepted": False, "undecided": True, "at": 2, "ago_ms": 0}
    plan = run_cycle(view_of(share, [wish, wish]), NOW, admission())
    assert [(name, admit.victims) for name, admit in plan.dispatches] == [("w0", ())]
    assert [(name, defer.reason) for name, defer in plan.deferrals] == [("w1", Reason.NO_PACE)]
    careless = replace(admission(), options=replace(OPTIONS, tpot_guard=False))
    assert len(run_cycle(view_of(share, [wish, wish]), NOW, careless).dispatches) == 2


def test_who_is_never_refused_and_has_to_begin_in_time_waits_only_for_the_pace_of_higher_classes():
    """By waiting it would lose what its equals win, since there is always another one of its kind."""
    full = replace(one_more_at_a_time(2), sequences=3)
    share = replace(share_of([Footprint(10, steps=400)]), decode_load=full)

    def starts(**other: Any) -> bool:
        wish = {
            "footprint": Footprint(10, steps=5),
            "accepted": False,
            "undecided": True,
            "at": 1,
            "ago_ms": 0,
        }
        one = waiting_of({**wish, "at": 1, "ago_ms": 0}, 0, "edf")
        of = replace(CLASSES[1], **{"sheddable": False, **other})
        queue = [replace(one, request=replace(one.request, service_class=of, slo=of.slo))]
        view = PoolView({Owner.LLM: share}, {Owner.LLM: Queue(queue, queue)})
        return bool(run_cycle(view, NOW, admission()).dispatches)

    assert starts(priority=1)
    # Nor for its own: in time or not, it is answered no sooner by waiting.
    assert starts(priority=1, slo=Slo(ttft=milliseconds(2_000), tpot=milliseconds(20)))
    assert not starts(priority=0)
    assert not starts(sheddable=True)
    assert not starts(slo=Slo(tpot=milliseconds(20)))


def test_an_engine_that_orders_gets_no_more_than_keep_their_pace():
    ordering = replace(share_of([Footprint(10, steps=400)]), inside=lambda waiting: 0.0)
    share = replace(ordering, decode_load=one_more_at_a_time(1))
    wish = {"footprint": Footprint(10, steps=5), "accepted": False, "undecided": True, "at": 2, "ago_ms": 0}
    plan = run_cycle(view_of(share, [wish, wish]), NOW, admission())
    assert [name for name, _ in plan.dispatches] == ["w0"]
    assert [(name, defer.reason) for name, defer in plan.deferrals] == [("w1", Reason.NO_PACE)]
    # Memory is the engine's business.
    assert len(run_cycle(view_of(ordering, [wish, wish]), NOW, admission()).dispatches) == 2


def said(at: int, *, unread: int, width: int = 9, accepted: bool = False) -> str:
    """To one of the class number `at` beside so many: that it is in, or why not."""
    tempo = replace(one_more_at_a_time(width), per_prompt_token=1e5, unread=unread)
    share = replace(share_of([Footprint(10, steps=5)]), decode_load=tempo)
    wish = {
        "footprint": Footprint(10, steps=5),
        "accepted": accepted,
        "undecided": True,
        "at": at,
        "ago_ms": 0,
    }
    plan = run_cycle(view_of(share, [wish]), NOW, admission())
    return "in" if plan.dispatches else str(plan.rejections[0][1].reason)


@pytest.mark.parametrize(("unread", "verdict"), [(19_600, "in"), (19_700, Reason.SLO_UNATTAINABLE)])
def test_who_would_wait_too_long_for_the_prompts_of_others_is_refused_at_once(
    unread: int, verdict: str
) -> None:
    """2 s are promised; a token takes 0.1 ms to read, the rest of the step under way 10 ms, its own prompt
    and first token 25."""
    assert said(1, unread=unread) == verdict


def test_who_must_be_served_or_was_let_in_before_is_not_refused_for_them() -> None:
    assert said(0, unread=99_999) == said(1, unread=99_999, accepted=True) == "in"


def test_where_nobody_is_before_it_nobody_is_refused() -> None:
    assert said(1, unread=99_999, width=0) == "in"
