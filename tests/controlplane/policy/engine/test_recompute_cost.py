"""Which requests an urgent one preempts where the victim's tokens must be computed again."""

from dataclasses import replace

import pytest

from controlplane.policy.engine.interface import EngineView, StepPlan
from controlplane.policy.engine.options import EngineOptions
from controlplane.policy.engine.request_state import RequestState, memory_time
from controlplane.policy.registry import engine_policy
from tests.controlplane.policy.engine.test_class_weights import runs, view_of, waits


def full_memory(running: list[RequestState], free: int) -> EngineView:
    """2,048 blocks, of which others hold the rest: they wait 164 token-steps for each token of a prompt."""
    view = view_of(running, free)
    return replace(view, quota=2_048, used=2_048 - view.growth - free)


def planned(running: list[RequestState], weight: float = 3.0, free: int = 0) -> StepPlan:
    """The plan with these running and an urgent request of 100 tokens and 50 to come."""
    policy = engine_policy(EngineOptions(ordering="srmt", recompute_weight=weight))
    policy.enqueue(waits("urgent", ago_ms=1_000))
    return policy.plan(full_memory(running, free))


def long_prompt(name: str) -> RequestState:
    """3,000 tokens, and 290 to come: 0.9 million token-steps to its end, 0.5 million to compute again."""
    return runs(name, done=10, prompt=2_990, predicted=300, ttft_ms=None)


def test_a_long_prompt_is_not_computed_again_for_a_short_answer():
    victim = long_prompt("long")
    assert planned([victim]).preempt == []
    assert planned([victim], weight=0.0).preempt == [victim]


def test_a_request_with_much_to_come_is_preempted():
    assert planned([victim := runs("a", done=10, prompt=90, predicted=390, ttft_ms=None)]).preempt == [victim]


def test_the_victim_with_less_to_compute_again_goes_first():
    # More memory-time, and thirty times the tokens.
    long, short = long_prompt("long"), runs("short", done=10, prompt=90, predicted=390, ttft_ms=None)
    assert memory_time(long.tokens, long.remaining()) > memory_time(short.tokens, short.remaining())
    assert planned([long, short]).preempt == [short]
    assert planned([long, short], weight=0.0).preempt == [long]


def test_a_lost_request_is_preempted_whatever_it_would_compute_again():
    lost = long_prompt("lost")
    lost.is_missed = True
    assert planned([lost]).preempt == [lost]


def test_for_lack_of_memory_a_request_is_always_preempted():
    running = [long_prompt("a"), long_prompt("b")]
    assert len(planned(running, free=-1).preempt) == 1


def test_shared_blocks_are_not_computed_again():
    victim = long_prompt("long")
    view = full_memory([victim], free=0)
    view.running.held[:] = 8
    policy = engine_policy(EngineOptions(ordering="srmt"))
    policy.enqueue(waits("urgent", ago_ms=1_000))
    assert policy.plan(view).preempt == [victim]


@pytest.mark.parametrize("weight", [-0.1, 101.0])
def test_a_weight_out_of_range_is_an_error(weight):
    with pytest.raises(ValueError, match="recompute_weight"):
        EngineOptions(recompute_weight=weight)
