"""What preempted requests may cost: paid from a share of the time, and never at the price of the memory."""

from dataclasses import replace

import pytest

from controlplane.core.clock import after, seconds
from controlplane.policy.engine.options import EngineOptions
from controlplane.policy.engine.recompute_budget import RecomputeBudget
from controlplane.policy.registry import engine_policy
from tests.controlplane.policy.engine.test_class_weights import NOW, runs, view_of, waits

# 0.15 ms a token: 3,000 tokens take 450 ms to compute again.
LONG = 2_990


def large(name: str, **life: float):
    return runs(name, done=10, prompt=LONG, predicted=300, ttft_ms=None, **life)


def urgent(name: str):
    return waits(name, ago_ms=6_000, ttft_ms=20_000)


def test_half_a_second_is_saved_up_and_a_share_is_earned():
    budget, view = RecomputeBudget(0.1), view_of([large("a")], free=0)
    budget.earn(NOW)
    budget.pay([large("a")], view)
    assert budget.has_time, "50 ms are left"
    budget.pay([large("b")], view)
    assert not budget.has_time, "400 ms are owed"
    budget.earn(after(NOW, seconds(3.9)))
    assert not budget.has_time
    budget.earn(after(NOW, seconds(4.1)))
    assert budget.has_time
    budget.earn(after(NOW, seconds(1_000)))
    budget.pay([large("c"), large("d")], view)
    assert not budget.has_time, "no more than 500 ms were saved up"


def test_cached_tokens_cost_nothing():
    budget, victim = RecomputeBudget(0.0), large("a")
    victim.cached = victim.tokens
    budget.pay([victim] * 9, view_of([victim], free=0))
    assert budget.has_time


def test_urgent_requests_preempt_only_while_the_time_suffices():
    policy = engine_policy(EngineOptions(ordering="srmt"))
    running = [large(f"r{n}") for n in range(4)]
    view = view_of(running, free=0)
    for n in range(2):
        policy.enqueue(state := urgent(f"w{n}"), NOW)
        found = policy.plan(view)
        assert (len(found.preempt), found.offer) == (1, [state])
        policy.dequeue(state)
        view = view_of([each for each in running if each not in found.preempt], free=0)
        running = list(view.running)
    policy.enqueue(urgent("w2"), NOW)
    refused = policy.plan(view)
    assert (refused.preempt, refused.offer) == ([], [])
    # 400 ms are owed, and 15 % of the time is earned.
    assert not policy.plan(replace(view, now=after(NOW, seconds(2.6)))).preempt
    assert len(policy.plan(replace(view, now=after(NOW, seconds(2.7)))).preempt) == 1


def test_what_fits_starts_and_a_shortage_preempts_without_time():
    policy = engine_policy(EngineOptions(ordering="srmt", recompute_share=0.0))
    running = [large(f"r{n}") for n in range(4)]
    short = view_of(running, free=-400)
    policy.enqueue(state := urgent("w"), NOW)
    assert len(policy.plan(short).preempt) == 3, "188 blocks each, whatever they cost"
    view = view_of(running, free=0)
    assert (policy.plan(view).preempt, policy.plan(view).offer) == ([], [])
    assert policy.plan(view_of(running, free=7)).offer == [state]


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_out_of_range_is_an_error(share):
    with pytest.raises(ValueError, match="recompute_share"):
        EngineOptions(recompute_share=share)
