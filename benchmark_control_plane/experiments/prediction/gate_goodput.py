"""What do better length forecasts buy at the gate? The simulator's part of `prediction_goodput`.

The gate with its defaults in front of an engine that serves in order of arrival: the same prompts, the same
objectives, memory and step times as on vLLM's scheduler. The gate may reject; who is rejected is not kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from backends.cost_models.step_time import BATCH_TIMES
from backends.vllm.simulation.stepped_engine import GEOMETRIES, Setup
from benchmark_control_plane.experiments.engine.replay import ReplayWindow
from benchmark_control_plane.experiments.engine.workload import Offer, TokenObjectives
from benchmark_control_plane.simulator.simulation import Machine, SimulatedRecord, SimulatedRequest, simulate
from controlplane.core.clock import seconds
from controlplane.core.forecast import LengthForecast
from controlplane.core.geometry import KvGeometry
from controlplane.core.request import Request
from predictors.output_length.history import MaxTokens


@dataclass(frozen=True, slots=True)
class FixedForecasts:
    """A `LengthPredictor` that says of each request what its offer says, and learns nothing."""

    offers: Sequence[Offer]

    def forecast(self, request: Request) -> LengthForecast:
        offer, limit = self.offers[int(request.id.partition("-")[0])], float(request.max_output_tokens)
        if offer.forecast is not None:
            said = offer.forecast
            return LengthForecast(said.levels, tuple(min(tokens, limit) for tokens in said.tokens))
        if offer.predicted is None:
            return MaxTokens().forecast(request)
        tokens = min(float(offer.predicted), limit)
        return LengthForecast((0.0, 1.0), (tokens, tokens))

    def observe(self, request: Request, output_tokens: int) -> None:
        """Nothing to learn."""

    def withdraw(self, request: Request) -> None:
        """Nothing was kept."""


@dataclass(frozen=True, slots=True)
class GateOutcome:
    """Of the window, as shares of its requests."""

    rate: float
    strict: float
    rejected: float
    preemptions: int


def replay_gate(
    offers: Sequence[Offer], setup: Setup, window: ReplayWindow, objectives: TokenObjectives, rate: float
) -> GateOutcome:
    """Arrivals go on past the window to the last of `offers`."""
    asks = [
        SimulatedRequest(one.at, one.prompt, one.output, max_tokens=setup.max_model_tokens - one.prompt)
        for one in offers
    ]
    slo = {"ttft_ms": objectives.ttft * 1e3, "tpot_ms": objectives.gap * 1e3, "default": True}
    course = simulate(asks, _machine(setup), {"classes": {"chat": slo}}, lengths=FixedForecasts(offers))
    measured = course.records[window.warm_up : window.warm_up + window.requests]
    return GateOutcome(
        rate,
        strict=mean(_meets_slo(one, objectives) for one in measured),
        rejected=mean(one.outcome.startswith("rejected") for one in measured),
        preemptions=sum(one.preemptions for one in measured) + course.engine_preemptions,
    )


def _meets_slo(record: SimulatedRecord, objectives: TokenObjectives) -> bool:
    return (
        record.finished is not None
        and record.first_token is not None
        and record.first_token - record.arrival <= seconds(objectives.ttft)
        and record.longest_gap <= seconds(objectives.gap)
    )


def _machine(setup: Setup) -> Machine:
    layers, heads, head_dim = GEOMETRIES[setup.geometry]
    geometry = KvGeometry(2 * layers * heads * head_dim, 2, setup.block_tokens)
    return Machine(
        BATCH_TIMES[setup.batch_time],
        geometry=geometry,
        kv_bytes=setup.blocks * geometry.bytes_per_block,
        max_model_tokens=setup.max_model_tokens,
        max_running=setup.max_running,
        step_tokens=setup.max_step_tokens,
    )
