"""Replays the requests of `goodput` through the simulated gate.

The gate with its defaults stands before an engine that serves in order of arrival, with the same prompts,
objectives, memory and step times as vLLM's scheduler gets. The gate may reject; a rejected request is a
miss.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from backends.cost_models.step_time import BATCH_TIMES
from backends.vllm.simulation.stepped_engine import OPT_13B, SteppedEngineSetup
from benchmark_control_plane.experiments.engine.engine_replay import ReplayWindow
from benchmark_control_plane.experiments.engine.offered_load import Offer, TokenObjectives
from benchmark_control_plane.simulator.simulated_machine import Machine
from benchmark_control_plane.simulator.simulation import SimulatedRecord, SimulatedRequest, simulate
from controlplane.core.clock import seconds
from controlplane.core.forecast import LengthForecast
from controlplane.core.kv_geometry import KvGeometry
from controlplane.core.request import Request
from predictors.output_length.history_predictor import MaxTokens


@dataclass(frozen=True, slots=True)
class FixedForecasts:
    """`LengthPredictor` that returns the forecast of each request's offer and learns nothing."""

    offers: Sequence[Offer]

    def forecast(self, request: Request) -> LengthForecast:
        """The offer's forecast, capped at the request's limit."""
        offer, limit = self.offers[int(request.id.partition("-")[0])], float(request.max_output_tokens)
        if offer.forecast is not None:
            levels, quantiles = offer.forecast.levels, offer.forecast.tokens
            return LengthForecast(levels, tuple(min(tokens, limit) for tokens in quantiles))
        if offer.predicted is None:
            return MaxTokens().forecast(request)
        tokens = min(float(offer.predicted), limit)
        return LengthForecast((0.0, 1.0), (tokens, tokens))

    def observe(self, request: Request, output_tokens: int) -> None:
        """Learns nothing."""

    def withdraw(self, request: Request) -> None:
        """Has nothing to withdraw."""


@dataclass(frozen=True, slots=True)
class GateOutcome:
    """Figures of the measured window; `strict` and `rejected` are shares of its requests."""

    rate: float
    strict: float
    rejected: float
    preemptions: int


def replay_gate(
    offers: Sequence[Offer],
    setup: SteppedEngineSetup,
    window: ReplayWindow,
    objectives: TokenObjectives,
    rate: float,
) -> GateOutcome:
    """Simulates all `offers`, which continue past the measured window."""
    requests = [
        SimulatedRequest(
            offer.at, offer.prompt, offer.output, max_tokens=setup.max_model_tokens - offer.prompt
        )
        for offer in offers
    ]
    slo = {"ttft_ms": objectives.ttft * 1e3, "tpot_ms": objectives.gap * 1e3, "default": True}
    # Only where vLLM's own scheduler runs does the gate hold requests for their forecast memory.
    sections = {"classes": {"chat": slo}, "scheduling": {"engine": "off"}}
    result = simulate(requests, _machine(setup), sections, lengths=FixedForecasts(offers))
    measured = result.records[window.warm_up : window.warm_up + window.requests]
    return GateOutcome(
        rate,
        strict=mean(_meets_slo(record, objectives) for record in measured),
        rejected=mean(record.outcome.startswith("rejected") for record in measured),
        preemptions=sum(record.preemptions for record in measured) + result.engine_preemptions,
    )


def _meets_slo(record: SimulatedRecord, objectives: TokenObjectives) -> bool:
    return (
        record.finished is not None
        and record.first_token is not None
        and record.first_token - record.arrival <= seconds(objectives.ttft)
        and record.longest_gap <= seconds(objectives.gap)
    )


def _machine(setup: SteppedEngineSetup) -> Machine:
    layers, heads, head_dim = OPT_13B
    geometry = KvGeometry(2 * layers * heads * head_dim, 2, setup.block_tokens)
    return Machine(
        BATCH_TIMES[setup.batch_time],
        geometry=geometry,
        kv_bytes=setup.blocks * geometry.bytes_per_block,
        max_model_tokens=setup.max_model_tokens,
        max_running=setup.max_running,
        step_tokens=setup.max_step_tokens,
    )
