"""Engine plug-in policies on the simulated engine: all requests finish, and SRMT attains more than FCFS."""

import pytest

from backends.cost_models.step_time import affine, llm_only
from benchmark_control_plane.round_model.plugin_rule import EnginePolicyRule
from benchmark_control_plane.round_model.step_rules import FcfsRule
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
BLOCKS, CONTEXT = 40, 120
POOL = EngineSetup(BLOCKS, 4, llm_only(affine(0.1, 0.001, 0, 0)))


def engine_rule(name):
    pace = Pace(seconds(0.1), seconds(0.001))
    policy = engine_policy(EngineOptions(ordering=name))
    return EnginePolicyRule(policy, OBJECTIVE, blocks=BLOCKS, context=CONTEXT, pace=pace)


def mixed_requests(count: int = 40, *, prediction_factor: float = 1.0) -> list[SteppedRequest]:
    """Requests of different sizes, four a second, into memory for about five."""
    return [
        SteppedRequest(
            prompt=4 + 7 * n % 37,
            output=(output := 1 + 11 * n % 53),
            number=n,
            arrival=0.25 * n,
            predicted=min(CONTEXT - 40, max(1, round(output * prediction_factor))),
        )
        for n in range(count)
    ]


@pytest.mark.parametrize("prediction_factor", [1.0, 0.25, 4.0])
@pytest.mark.parametrize("name", ENGINE_POLICIES)
def test_all_requests_get_all_tokens_under_any_prediction(name, prediction_factor):
    requests = mixed_requests(prediction_factor=prediction_factor)
    serve(requests, engine_rule(name), POOL)
    assert all(one.is_finished and one.produced == one.output for one in requests)
    assert all(len(one.gaps) == one.output - 1 for one in requests)


@pytest.mark.parametrize("name", ENGINE_POLICIES)
def test_a_rule_is_deterministic(name):
    first, second = mixed_requests(), mixed_requests()
    serve(first, engine_rule(name), POOL)
    serve(second, engine_rule(name), POOL)
    assert [one.last for one in first] == [one.last for one in second]


def test_srmt_attains_more_than_fcfs_in_both_metrics():
    ours, theirs = mixed_requests(120), mixed_requests(120)
    serve(ours, engine_rule("srmt"), POOL)
    serve(theirs, FcfsRule(), POOL)
    assert measure_attainment(ours, OBJECTIVE).published > measure_attainment(theirs, OBJECTIVE).published
    assert measure_attainment(ours, OBJECTIVE).strict > measure_attainment(theirs, OBJECTIVE).strict
