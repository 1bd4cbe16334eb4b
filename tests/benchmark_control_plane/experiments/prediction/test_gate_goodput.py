"""What is told of lengths reaches the gate: answers said to end soon start at once, whatever their limit."""

from dataclasses import replace

import pytest

from backends.vllm.simulation.stepped_engine import Setup
from benchmark_control_plane.experiments.engine.replay import ReplayWindow
from benchmark_control_plane.experiments.engine.workload import Offer, TokenObjectives
from benchmark_control_plane.experiments.prediction.gate_goodput import Foretold, through_the_gate
from controlplane.core.forecast import LengthForecast
from controlplane.core.generation import Sampling
from tests.engines import a_request

SETUP = Setup(blocks=200, batch_time="opt-13b-a100-40g")
PROMISE = TokenObjectives(ttft=1.0, gap=1.0)


def kept(said: int | None) -> float:
    """Of 40 answers of 50 tokens, ten a second, each of which might be ten times as long."""
    offers = [Offer(0.1 * at, 100, 50, said) for at in range(40)]
    return through_the_gate(offers, SETUP, ReplayWindow(0, 40), PROMISE, 10.0).strict


def test_who_knows_lengths_keeps_more_promises():
    assert kept(50) > 0.9 > 0.6 > kept(None)


@pytest.mark.parametrize("said, expected", [
    (Offer(0.0, 10, 20, 20), (20.0, 20.0)),
    (Offer(0.0, 10, 20, 4_000), (64.0, 64.0)),
    (Offer(0.0, 10, 20, None), (64.0, 64.0)),
    (Offer(0.0, 10, 20, 40, LengthForecast((0.0, 0.5, 1.0), (5.0, 40.0, 90.0))), (5.0, 64.0)),
])  # fmt: skip
def test_a_forecast_is_what_was_offered_up_to_the_limit(said, expected):
    request = replace(a_request([1], Sampling(max_tokens=64)), id="0-x")
    found = Foretold([said]).forecast(request)
    assert (found.tokens[0], found.tokens[-1]) == expected
