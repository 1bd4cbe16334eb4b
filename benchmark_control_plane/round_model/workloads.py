"""Draws the workloads of the MC-SF paper: model 1, model 2, and conversation lengths.

The conversation data set cannot be redistributed; its lengths are drawn from lognormal distributions with the
published mean and median, capped (Online Scheduling for LLM Inference with KV Cache Constraints, section 5).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmark_control_plane.common.distributions import Lognormal

CONVERSATION_MEMORY = 16_492
"""Cells."""

CONVERSATION_PROMPTS = Lognormal(mean=40.62, median=11, cap=2000)
CONVERSATION_OUTPUTS = Lognormal(mean=85.32, median=45, cap=700)


@dataclass(frozen=True, slots=True)
class RoundRequest:
    """One request: arrival, prompt tokens, true and predicted output tokens, and a deadline if it has one."""

    arrival: float
    prompt: int
    output: int
    predicted: int
    due: float | None = None


@dataclass(frozen=True, slots=True)
class RoundInstance:
    """Memory in cells, and the requests in order of arrival."""

    memory: int
    requests: tuple[RoundRequest, ...]


def model_one(rng: np.random.Generator) -> RoundInstance:
    """Model 1: 40 to 60 requests, all at time 0."""
    memory = int(rng.integers(30, 51))
    count = int(rng.integers(40, 61))
    return RoundInstance(memory, tuple(_small_request(rng, memory, 0) for _ in range(count)))


def model_two(rng: np.random.Generator) -> RoundInstance:
    """Model 2: Poisson arrivals in each of 40 to 60 rounds."""
    memory = int(rng.integers(30, 51))
    last = int(rng.integers(40, 61))
    rate = float(rng.uniform(0.5, 1.5))
    counts = rng.poisson(rate, last)
    arrivals = [at + 1 for at, count in enumerate(counts) for _ in range(count)]
    return RoundInstance(memory, tuple(_small_request(rng, memory, at) for at in arrivals))


def _small_request(rng: np.random.Generator, memory: int, arrival: int) -> RoundRequest:
    prompt = int(rng.integers(1, 6))
    output = int(rng.integers(1, memory - prompt + 1))
    return RoundRequest(arrival, prompt, output, output)


def conversation_lengths(rng: np.random.Generator, count: int) -> list[tuple[int, int]]:
    """Draws `count` pairs of (prompt, output) tokens."""
    prompts = CONVERSATION_PROMPTS.draw(rng, count)
    outputs = CONVERSATION_OUTPUTS.draw(rng, count)
    return list(zip(prompts, outputs, strict=True))


def typical_lengths(rng: np.random.Generator, count: int) -> list[tuple[int, int]]:
    """Pairs of (prompt, output) tokens with each quantile once, paired at random, so no draw is lucky."""
    prompts = rng.permutation(CONVERSATION_PROMPTS.quantiles(count))
    outputs = rng.permutation(CONVERSATION_OUTPUTS.quantiles(count))
    return [(int(s), int(o)) for s, o in zip(prompts, outputs, strict=True)]


def poisson_arrivals(
    rng: np.random.Generator, lengths: list[tuple[int, int]], rate: float
) -> list[RoundRequest]:
    """Requests with these lengths, Poisson arrivals at `rate` requests a second, and exact predictions."""
    times = np.cumsum(rng.exponential(1 / rate, len(lengths)))
    return [RoundRequest(float(at), s, o, o) for at, (s, o) in zip(times, lengths, strict=True)]


def mispredicted(
    rng: np.random.Generator, requests: list[RoundRequest], epsilon: float
) -> Iterator[RoundRequest]:
    """The same requests with predictions uniform within a relative error of `epsilon`."""
    for request in requests:
        drawn = rng.uniform((1 - epsilon) * request.output, (1 + epsilon) * request.output)
        yield RoundRequest(
            request.arrival, request.prompt, request.output, max(1, round(float(drawn))), request.due
        )
