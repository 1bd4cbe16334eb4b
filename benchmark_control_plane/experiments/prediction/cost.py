"""Measures the time of a length forecast, the predictor's memory, and event-loop lag during training."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

from benchmark_control_plane.experiments.prediction.methods import train
from benchmark_control_plane.experiments.prediction.prompt_sets import PromptSample
from benchmark_control_plane.experiments.prediction.prompt_vectors import with_vectors
from controlplane.service.prediction.length_training import LengthTraining
from predictors.output_length.checkpoint import Checkpoint
from predictors.output_length.features import prompt_features
from predictors.output_length.learned_predictor import LearnedLengths
from predictors.output_length.training import train_in_subprocess

_PAGE = 4_096
_TICK_SECONDS = 0.002
_QUIET_TICKS = 1_000


def cost(samples: Sequence[PromptSample]) -> dict[str, Any]:
    """Costs with word features alone, under `encoder` also with prompt vectors; the lag under `loop`."""
    lengths = LearnedLengths()
    plain = _forecast_cost(lengths, samples)
    embedded = with_vectors(samples)
    encoder = _forecast_cost(LearnedLengths(), embedded)
    return {**plain, "encoder": encoder, "loop": asyncio.run(_lags(lengths, samples))}


def _forecast_cost(lengths: LearnedLengths, samples: Sequence[PromptSample]) -> dict[str, float]:
    before = _resident()
    train(lengths, samples)
    lengths.swap(asyncio.run(train_in_subprocess(Checkpoint(lengths.examples.table()))))
    grown = _resident() - before
    features, forecasts = [], []
    for sample in samples:
        start = perf_counter()
        prompt_features(sample.prompt)
        extracted = perf_counter()
        request = sample.request()
        prepared = perf_counter()
        lengths.forecast(request)
        forecasts.append(perf_counter() - prepared)
        features.append(extracted - start)
    both = [a + b for a, b in zip(features, forecasts, strict=True)]
    return {
        "features_us": 1e6 * median(features),
        "forecast_us": 1e6 * median(forecasts),
        "both_us": 1e6 * median(both),
        "both_p99_us": 1e6 * quantiles(both, n=100)[98],
        "resident_mib": grown / 2**20,
    }


async def _lags(lengths: LearnedLengths, samples: Sequence[PromptSample]) -> dict[str, float]:
    """Quantiles of the timer delay in milliseconds, with one forecast and one observation per tick."""
    learning = LengthTraining(lengths, every_seconds=3_600.0, file=None)
    idle = await _delays(lengths, samples, None)
    training = asyncio.create_task(learning.train())
    busy = await _delays(lengths, samples, training)
    return {
        "idle_p99_ms": quantiles(idle, n=100)[98],
        "training_p50_ms": median(busy),
        "training_p99_ms": quantiles(busy, n=100)[98],
        "training_seconds": len(busy) * _TICK_SECONDS,
    }


async def _delays(
    lengths: LearnedLengths, samples: Sequence[PromptSample], until: asyncio.Task[None] | None
) -> list[float]:
    """Timer delays in milliseconds until the task ends, or over a fixed number of ticks."""
    loop = asyncio.get_running_loop()
    delays: list[float] = []
    while len(delays) < _QUIET_TICKS if until is None else not until.done():
        sample = samples[len(delays) % len(samples)]
        due = loop.time() + _TICK_SECONDS
        await asyncio.sleep(_TICK_SECONDS)
        delays.append(1e3 * (loop.time() - due))
        request = sample.request()
        lengths.forecast(request)
        lengths.observe(request, sample.tokens)
    return delays


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE
