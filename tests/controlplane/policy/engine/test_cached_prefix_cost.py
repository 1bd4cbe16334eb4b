"""A cached prefix is not read again, so it adds nothing to the prefill cost of a waiting request."""

from dataclasses import replace

from controlplane.policy.engine.interface import EngineView
from controlplane.policy.engine.options import EngineOptions
from controlplane.policy.registry import engine_policy
from tests.controlplane.policy.engine.test_class_weights import runs, view_of, waits


def large_memory(free: int, running: int = 0) -> EngineView:
    """2,048 blocks: a token of a prompt costs 164 token-steps of the others."""
    view = view_of([runs(f"r{n}", prompt=90, predicted=390) for n in range(running)], free)
    return replace(view, quota=2_048, used=2_048 - view.growth - free)


def test_of_two_requests_the_one_with_less_to_compute_starts_first() -> None:
    cached, other = waits("a", prompt=2_050, predicted=10), waits("b", prompt=400, predicted=10)
    for tokens, first in ((0, other), (2_000, cached)):
        cached.cached = tokens
        policy = engine_policy(EngineOptions(ordering="srmt"))
        for state in (cached, other):
            policy.enqueue(state)
        assert policy.plan(large_memory(free=1_000)).offer[0] is first


def test_an_urgent_request_with_a_cached_prefix_preempts_what_is_larger_than_the_rest_of_it() -> None:
    urgent = waits("urgent", prompt=1_000, predicted=20, ago_ms=1_000)
    for tokens, count in ((0, 0), (992, 1)):
        urgent.cached, urgent.shared = tokens, tokens // 16
        policy = engine_policy(EngineOptions(ordering="srmt"))
        policy.enqueue(urgent)
        assert len(policy.plan(large_memory(free=0, running=1)).preempt) == count
