"""Length forecasts reach the gate: requests with a short forecast start at once, whatever their limit."""

from dataclasses import replace

import pytest

from backends.vllm.simulation.stepped_engine import SteppedEngineSetup
from benchmark_control_plane.experiments.engine.engine_replay import ReplayWindow
from benchmark_control_plane.experiments.engine.offered_load import Offer, TokenObjectives
from benchmark_control_plane.experiments.prediction.gate_goodput import FixedForecasts, replay_gate
from controlplane.core.forecast import LengthForecast
from controlplane.core.generation import Sampling
from tests.engines import a_request

SETUP = SteppedEngineSetup(blocks=200, batch_time="opt-13b-a100-40g")
OBJECTIVES = TokenObjectives(ttft=1.0, gap=1.0)


def attainment(predicted: int | None) -> float:
    """Of 40 requests with 50 output tokens, ten per second, and a limit far above that."""
    offers = [Offer(0.1 * at, 100, 50, predicted) for at in range(40)]
    return replay_gate(offers, SETUP, ReplayWindow(0, 40), OBJECTIVES, 10.0).strict


def test_known_lengths_raise_attainment():
    assert attainment(50) > 0.9 > 0.6 > attainment(None)


@pytest.mark.parametrize("offer, expected", [
    (Offer(0.0, 10, 20, 20), (20.0, 20.0)),
    (Offer(0.0, 10, 20, 4_000), (64.0, 64.0)),
    (Offer(0.0, 10, 20, None), (64.0, 64.0)),
    (Offer(0.0, 10, 20, 40, LengthForecast((0.0, 0.5, 1.0), (5.0, 40.0, 90.0))), (5.0, 64.0)),
])  # fmt: skip
def test_a_forecast_is_capped_at_the_limit(offer, expected):
    request = replace(a_request([1], Sampling(max_tokens=64)), id="0-x")
    found = FixedForecasts([offer]).forecast(request)
    assert (found.tokens[0], found.tokens[-1]) == expected
