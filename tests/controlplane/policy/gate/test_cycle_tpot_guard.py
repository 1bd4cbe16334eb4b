"""The TPOT guard and the prefill backlog within one cycle."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from controlplane.core.clock import NO_TIME, milliseconds, seconds
from controlplane.core.decision import Reason
from controlplane.core.memory_ledger import Footprint
from controlplane.core.pool_view import DecodeLoad, Pace, PoolView, Queue
from controlplane.core.request import Owner
from controlplane.core.slo import Slo
from controlplane.policy.gate.scheduling_cycle import run_cycle
from tests.controlplane.policy.gate.test_scheduling_cycle import (
    CLASSES,
    NOW,
    OPTIONS,
    admission,
    share_of,
    view_of,
    waiting_of,
)


def one_more_at_a_time(width: int, *, priority: float = 1.0) -> DecodeLoad:
    """`width` requests run; one more meets a TPOT of 20 ms of a class of `priority`, two more do not."""
    return DecodeLoad(
        step=lambda sequences, cells: 20e6 if sequences <= width + 1 else 21e6,
        per_prompt_token=0.0, prefill_share=0.0, prefill_deviation=0.0, sequences=width, cells=0,
        prompt_tokens_pending=0, time_left=np.array([1e12]), tokens=np.ones(1),
        tpot_objectives=np.array([20e6]), priority=np.array([priority]),
    )  # fmt: skip


def test_a_request_that_would_break_a_tpot_waits_without_preempting():
    share = replace(share_of([Footprint(10, steps=400)]), decode_load=one_more_at_a_time(1, priority=2))
    wish = {"footprint": Footprint(10, steps=5), "accepted": False, "undecided": True, "at": 2, "ago_ms": 0}
    plan = run_cycle(view_of(share, [wish, wish]), NOW, admission())
    assert [(name, admit.victims) for name, admit in plan.dispatches] == [("w0", ())]
    assert [(name, defer.reason) for name, defer in plan.deferrals] == [("w1", Reason.TPOT_GUARD)]
    careless = replace(admission(), options=replace(OPTIONS, tpot_guard=False))
    assert len(run_cycle(view_of(share, [wish, wish]), NOW, careless).dispatches) == 2


def test_a_non_sheddable_request_with_ttft_waits_only_for_the_tpot_of_higher_classes():
    """Waiting would cost it as much as it gains its equals, because more of its kind always follow."""
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
    # Nor for its own TPOT: waiting does not produce its tokens sooner.
    assert starts(priority=1, slo=Slo(ttft=milliseconds(2_000), tpot=milliseconds(20)))
    assert not starts(priority=0)
    assert not starts(sheddable=True)
    assert not starts(slo=Slo(tpot=milliseconds(20)))


def test_forwarding_respects_the_tpot_guard():
    ordering = replace(share_of([Footprint(10, steps=400)]), engine_work_ahead=lambda waiting: 0.0)
    share = replace(ordering, decode_load=one_more_at_a_time(1, priority=2))
    wish = {"footprint": Footprint(10, steps=5), "accepted": False, "undecided": True, "at": 2, "ago_ms": 0}
    plan = run_cycle(view_of(share, [wish, wish]), NOW, admission())
    assert [name for name, _ in plan.dispatches] == ["w0"]
    assert [(name, defer.reason) for name, defer in plan.deferrals] == [("w1", Reason.TPOT_GUARD)]
    # The engine manages its memory.
    assert len(run_cycle(view_of(ordering, [wish, wish]), NOW, admission()).dispatches) == 2


def verdict_of(at: int, *, pending: int, width: int = 9, accepted: bool = False) -> str:
    """The verdict on a request of class number `at` with `width` running ones: `in`, or the reason."""
    load = replace(one_more_at_a_time(width), per_prompt_token=1e5, prompt_tokens_pending=pending)
    share = replace(share_of([Footprint(10, steps=5)]), decode_load=load)
    wish = {
        "footprint": Footprint(10, steps=5),
        "accepted": accepted,
        "undecided": True,
        "at": at,
        "ago_ms": 0,
    }
    plan = run_cycle(view_of(share, [wish]), NOW, admission())
    return "in" if plan.dispatches else str(plan.rejections[0][1].reason)


@pytest.mark.parametrize(("pending", "verdict"), [(19_600, "in"), (19_700, Reason.SLO_UNATTAINABLE)])
def test_a_request_late_behind_the_prefill_backlog_is_rejected(pending: int, verdict: str) -> None:
    """The TTFT is 2 s; prefill takes 0.1 ms a token, the rest of the present step 10 ms, the request's own
    prompt and first token 25 ms."""
    assert verdict_of(1, pending=pending) == verdict


def test_accepted_and_non_sheddable_requests_are_not_rejected_for_the_backlog() -> None:
    assert verdict_of(0, pending=99_999) == verdict_of(1, pending=99_999, accepted=True) == "in"


def test_an_idle_engine_rejects_no_late_request() -> None:
    assert verdict_of(1, pending=99_999, width=0) == "in"


def test_a_request_is_held_back_for_tpot_also_where_the_memory_of_the_engine_is_full() -> None:
    """The engine starts it in place of a larger one, and then runs more requests at once."""
    wish = {"footprint": Footprint(10, steps=5), "accepted": False, "undecided": True, "at": 2, "ago_ms": 0}
    engine = replace(share_of([Footprint(10, steps=400)]), engine_work_ahead=lambda waiting: 0.0)
    for running, started in ((1, ["w0"]), (2, [])):
        load = replace(one_more_at_a_time(1, priority=2), sequences=running, unclaimed_bytes=0.0)
        plan = run_cycle(view_of(replace(engine, decode_load=load), [wish]), NOW, admission())
        assert [name for name, _ in plan.dispatches] == started


@pytest.mark.parametrize(("optimism", "rejections"), [(1.0, 1), (0.9, 1), (0.5, 0)])
def test_forwarding_rejects_only_what_is_late_by_an_optimistic_wait(optimism: float, rejections: int) -> None:
    """The TTFT is 2 s; by the estimate the work ahead alone takes 3 s."""
    share = share_of([Footprint(10, steps=5)])
    assert share.pace is not None
    ahead = 3e9 / share.pace.step * share.ceiling
    share = replace(share, engine_work_ahead=lambda waiting: ahead, wait_optimism=optimism)
    wish = {"footprint": Footprint(10, steps=5), "accepted": False, "undecided": True, "at": 1, "ago_ms": 0}
    plan = run_cycle(view_of(share, [wish]), NOW, admission())
    assert (len(plan.rejections), len(plan.dispatches)) == (rejections, 1 - rejections)


def test_the_whole_time_to_the_first_token_is_scaled() -> None:
    """By the estimate the wait takes 3 s and the prompt 1 s; the TTFT is 2 s."""
    share = replace(share_of([Footprint(10, steps=5)]), pace=Pace(seconds(1), NO_TIME))
    ahead = 3.0 * share.ceiling
    wish = {"footprint": Footprint(10, steps=5), "accepted": False, "undecided": True, "at": 1, "ago_ms": 0}
    for optimism, rejections in ((0.6, 1), (0.5, 0)):
        engine = replace(share, engine_work_ahead=lambda waiting: ahead, wait_optimism=optimism)
        assert len(run_cycle(view_of(engine, [wish]), NOW, admission()).rejections) == rejections


def test_the_prefill_backlog_is_not_scaled() -> None:
    load = replace(one_more_at_a_time(9, priority=2), per_prompt_token=1e5, prompt_tokens_pending=30_000)
    share = replace(
        share_of([Footprint(10, steps=5)]),
        decode_load=load,
        engine_work_ahead=lambda waiting: 0.0,
        wait_optimism=0.1,
    )
    wish = {"footprint": Footprint(10, steps=5), "accepted": False, "undecided": True, "at": 1, "ago_ms": 0}
    assert len(run_cycle(view_of(share, [wish]), NOW, admission()).rejections) == 1
