"""Lanes of `srmt`: which running requests are victims by their lane, and what starts from each lane."""

from typing import Any

import pytest

from controlplane.core.clock import Instant, milliseconds
from controlplane.policy.engine.interface import StepPlan
from controlplane.policy.engine.options import EngineOptions
from controlplane.policy.engine.request_state import RequestState, memory_time
from controlplane.policy.engine.size_cutoff import SizeCutoff
from controlplane.policy.engine.srmt import ShortestRemainingMemoryTime
from tests.controlplane.policy.engine.test_class_weights import NOW, URGENT_MS, runs, view_of, waits
from tests.controlplane.policy.engine.test_recompute_cost import full_memory, long_prompt


def policy_of(waiting: list[RequestState], **options: Any) -> tuple[ShortestRemainingMemoryTime, SizeCutoff]:
    """A policy with these requests and its cutoff, which few arrivals leave as the test sets it."""
    policy = ShortestRemainingMemoryTime(EngineOptions(**{"prefill_weight": 0.0, **options}))
    for state in waiting:
        policy.enqueue(state)
    assert policy._cutoff is not None
    return policy, policy._cutoff


def urgent() -> RequestState:
    """100 tokens and 50 to come: 6,250 token-steps, of which a victim needs 6,875 by its size alone."""
    return waits("urgent", ago_ms=1_000)


def preempts(victim: RequestState, *, cutoff: float) -> bool:
    """Whether the urgent request is started on the blocks of `victim`, which fills the memory."""
    asking = urgent()
    policy, of = policy_of([asking])
    of.size = cutoff
    plan: StepPlan = policy.plan(view_of([victim], free=0))
    assert (plan.preempt, plan.offer) in (([victim], [asking]), ([], []))
    return plan.preempt == [victim]


def test_a_running_request_beyond_the_cutoff_is_a_victim_of_any_that_is_within_it():
    victim = runs("runs", prompt=95, predicted=60)
    assert memory_time(victim.tokens, victim.remaining()) == 6_500
    assert preempts(victim, cutoff=6_250.0)
    assert not preempts(victim, cutoff=6_500.0)
    # Without a forecast its size is an upper bound.
    victim.is_guess = True
    assert not preempts(victim, cutoff=6_250.0)


def test_a_lost_running_request_is_a_victim_however_little_it_needs():
    victim = runs("runs", prompt=95, predicted=15)
    assert not preempts(victim, cutoff=1e9)
    victim.is_missed = True
    assert preempts(victim, cutoff=1e9)


def test_a_request_beyond_the_cutoff_is_no_victim_if_computing_it_again_costs_more():
    """0.9 million token-steps to its end, and 1.5 million to compute it again."""
    victim = long_prompt("long")
    for recompute_weight, victims in ((3.0, []), (0.0, [victim])):
        policy, cutoff = policy_of([urgent()], prefill_weight=1.0, recompute_weight=recompute_weight)
        cutoff.size = 500_000.0
        assert policy.plan(full_memory([victim], free=0)).preempt == victims


@pytest.mark.parametrize(("tokens", "is_preempted"), [(40, False), (50, True)])
def test_a_slot_is_taken_by_the_sizes_over_both_weights(tokens: int, *, is_preempted: bool):
    """The urgent request has 62.5 token-steps at a weight of 3: 22.9 with the ratio, or 45.8 at 2."""
    asking = waits("urgent", priority=2, prompt=10, predicted=5, ago_ms=URGENT_MS)
    victim = runs("runs", priority=1, prompt=tokens - 10, predicted=11)
    policy, _ = policy_of([asking])
    plan = policy.plan(view_of([victim], free=100, slots=0))
    assert (plan.preempt, plan.offer) == (([victim], [asking]) if is_preempted else ([], []))


@pytest.mark.parametrize(("cutoff", "starts"), [(4_250.0, False), (4_400.0, True)])
def test_a_request_beyond_the_cutoff_starts_by_the_memory_that_it_leaves_free(cutoff: float, *, starts: bool):
    """Of 100 blocks 50 are free and it takes 7: it may be 1.43 times as large as the cutoff."""
    asking = waits("large")
    policy, of = policy_of([asking], settle_steps=0)
    of.size = cutoff
    running = runs("runs", prompt=780, predicted=60)
    assert policy.plan(view_of([running], free=50)).offer == ([asking] if starts else [])


@pytest.mark.parametrize(
    ("spare", "is_lost", "count"),
    [(0.5, False, 2), (0.15, False, 1), (0.05, False, 0), (0.5, True, 0), (0.6, True, 1)],
)
def test_lost_requests_share_the_spare_memory_with_those_that_run(spare: float, count: int, *, is_lost: bool):
    """Of 100 blocks one request holds 45; each of the two that wait takes ten until its end."""
    lost = [waits(name, ttft_ms=300, ago_ms=1_000) for name in "ab"]
    policy, cutoff = policy_of(lost)
    cutoff.spare = spare
    running = runs("runs", prompt=700, predicted=60)
    running.is_missed = is_lost
    # Lost requests are considered in every fourth step.
    offers = [policy.plan(view_of([running], free=55)).offer for _ in range(4)]
    assert offers == [[], [], [], lost[:count]]


def test_an_aged_request_above_the_quota_keeps_no_later_one_from_the_aged_share():
    """The quota was lowered after the first was accepted."""
    huge, old = (
        waits(name, ttft_ms=300, prompt=prompt, ago_ms=ago_ms)
        for name, prompt, ago_ms in (("huge", 5_000, 9_000), ("old", 100, 8_000))
    )
    policy, _ = policy_of([huge, old], starvation_ms=5_000.0)
    assert policy.plan(view_of([runs("runs", prompt=95, predicted=60)], free=8)).offer == [old]


@pytest.mark.parametrize(
    ("tokens", "preemptions", "counts"), [(0, 0, True), (0, 1, False), (5, 1, False)],
    ids=["new", "preempted in its prefill", "preempted later"],
)  # fmt: skip
def test_the_cutoff_counts_each_request_once(tokens: int, preemptions: int, *, counts: bool):
    waiting = [waits(f"r{number}", ago_ms=100 * number) for number in range(40, 0, -1)]
    for state in waiting:
        state.preemptions = preemptions
        if tokens:
            state.stamp(Instant(NOW - milliseconds(1)), tokens)
    policy, cutoff = policy_of(waiting)
    policy.plan(view_of([runs("runs")], free=0, slots=0))
    assert (cutoff.spare < 1.0) is counts


def test_the_cutoff_counts_a_request_once_that_vllm_puts_back():
    """vLLM puts back a request whose grammar still compiles, in each step."""
    state = waits("r", ago_ms=100)
    policy, cutoff = policy_of([state])
    for _ in range(5):
        policy.plan(view_of([runs("runs")], free=0, slots=0))
        policy.dequeue(state)
        policy.enqueue(state)
    policy.plan(view_of([runs("runs")], free=0, slots=0))
    assert cutoff._arrivals == 1
