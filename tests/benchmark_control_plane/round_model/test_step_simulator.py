"""Step rules and engine plug-ins on the simulated engine: all requests finish, and each follows its order."""

import pytest

from backends.cost_models.step_time import affine, llm_only
from benchmark_control_plane.round_model.plugin_rule import EnginePolicyRule
from benchmark_control_plane.round_model.policies.policy_table import STEP_POLICIES
from benchmark_control_plane.round_model.policies.step_policy import StepOptions
from benchmark_control_plane.round_model.step_rules import AptServeRule, FcfsRule, RandomRule, RoundPolicyRule
from benchmark_control_plane.round_model.step_simulator import (
    EngineSetup,
    StepObjective,
    SteppedRequest,
    measure_attainment,
    serve,
)
from controlplane.core.clock import seconds
from controlplane.core.pool_view import Pace
from controlplane.policy.engine.options import EngineOptions
from controlplane.policy.registry import ENGINE_POLICIES, engine_policy

OBJECTIVE = StepObjective(ttft=1.0, gap=0.5)
BLOCKS, BLOCK_TOKENS = 40, 4


def pool(blocks: int = BLOCKS, max_running: int = 256) -> EngineSetup:
    return EngineSetup(blocks, BLOCK_TOKENS, llm_only(affine(0.1, 0.001, 0, 0)), max_running=max_running)


def planned(name):
    options = StepOptions(memory=BLOCKS * BLOCK_TOKENS, step_time=0.1, prompt_steps=0.01)
    return RoundPolicyRule(STEP_POLICIES[name](options), OBJECTIVE)


def engine_rule(name):
    pace = Pace(seconds(0.1), seconds(0.001))
    policy = engine_policy(EngineOptions(ordering=name))
    return EnginePolicyRule(policy, OBJECTIVE, blocks=BLOCKS, context=256, pace=pace)


RULES = {
    "fcfs": FcfsRule,
    "random": lambda: RandomRule(0),
    "apt": lambda: AptServeRule(OBJECTIVE),
    **{name: lambda name=name: planned(name) for name in ("mc-sf", "mc-benchmark", "tandem")},
    **{f"engine {name}": lambda name=name: engine_rule(name) for name in ENGINE_POLICIES},
}


def mixed_requests(count: int = 40, *, prediction_factor: float = 1.0) -> list[SteppedRequest]:
    """Requests of different sizes, four a second, into memory for about five."""
    return [
        SteppedRequest(
            prompt=4 + 7 * n % 37,
            output=1 + 11 * n % 53,
            number=n,
            arrival=0.25 * n,
            predicted=max(1, round((1 + 11 * n % 53) * prediction_factor)),
        )
        for n in range(count)
    ]


@pytest.mark.parametrize("prediction_factor", [1.0, 0.25, 4.0])
@pytest.mark.parametrize("name", RULES)
def test_all_requests_get_all_tokens_under_any_prediction(name, prediction_factor):
    requests = mixed_requests(prediction_factor=prediction_factor)
    serve(requests, RULES[name](), pool())
    assert all(one.is_finished and one.produced == one.output for one in requests)
    assert all(one.first is not None and one.first > one.arrival for one in requests)
    assert all(len(one.gaps) == one.output - 1 for one in requests)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_deterministic(name):
    first, second = mixed_requests(), mixed_requests()
    serve(first, RULES[name](), pool())
    serve(second, RULES[name](), pool())
    assert [one.last for one in first] == [one.last for one in second]


def test_srmt_attains_more_than_fcfs_in_both_metrics():
    ours, theirs = mixed_requests(120), mixed_requests(120)
    serve(ours, engine_rule("srmt"), pool())
    serve(theirs, FcfsRule(), pool())
    assert measure_attainment(ours, OBJECTIVE).published > measure_attainment(theirs, OBJECTIVE).published
    assert measure_attainment(ours, OBJECTIVE).strict > measure_attainment(theirs, OBJECTIVE).strict


def test_fcfs_serves_in_order_of_arrival():
    requests = mixed_requests()
    serve(requests, FcfsRule(), pool(blocks=10_000, max_running=1))
    firsts = [one.first for one in requests]
    assert firsts == sorted(firsts)


def test_the_greedy_prefers_waiting_time_per_block():
    # Three wait behind the first and each would fit; the small ones gain most per block.
    requests = [
        SteppedRequest(8, 20, number=0, arrival=0.0),
        SteppedRequest(100, 2, number=1, arrival=0.05),
        SteppedRequest(8, 2, number=2, arrival=0.1),
        SteppedRequest(8, 2, number=3, arrival=0.15),
    ]
    serve(requests, AptServeRule(StepObjective(1e6, 1e6)), pool(blocks=60, max_running=1))
    assert sorted(range(4), key=lambda n: requests[n].first) == [0, 2, 3, 1]


def test_the_greedy_with_zero_decay_serves_missed_requests_last():
    requests = [
        SteppedRequest(8, 30, number=0, arrival=0.0),
        SteppedRequest(8, 2, number=1, arrival=0.1),
        SteppedRequest(8, 2, number=2, arrival=2.9),
    ]
    serve(requests, AptServeRule(OBJECTIVE, decay=0.0), pool(max_running=1))
    assert requests[2].first < requests[1].first


def test_the_published_metric_ignores_one_pause_in_a_hundred_tokens_and_the_strict_one_does_not():
    one = SteppedRequest(1, 200, number=0, arrival=0.0)
    for n in range(200):
        one.stamp(0.1 * n + (900 if n > 100 else 0))
    one.is_finished = True
    assert one.meets(OBJECTIVE, strictly=False)
    assert not one.meets(OBJECTIVE, strictly=True)
    assert measure_attainment([one], OBJECTIVE).published == 1
    assert measure_attainment([one], OBJECTIVE).strict == 0


def test_an_unfinished_request_is_a_miss():
    one = SteppedRequest(1, 2, number=0, arrival=0.0)
    one.stamp(0.1)
    assert not one.meets(OBJECTIVE, strictly=False)


def test_a_rule_that_offers_no_request_is_detected():
    class Idle(FcfsRule):
        def arrange(self, engine, now):
            pass

    with pytest.raises(RuntimeError, match="the rule offers none"):
        serve(mixed_requests(3), Idle(), pool())
