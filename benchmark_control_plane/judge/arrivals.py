"""When do requests arrive? Renewal gaps in operational time, bent by a rate that may burst or swing.

Rule: gaps of mean 1 are summed, then mapped to seconds by the inverse of the cumulated rate. So one seed
gives the same sequence at every rate, closer together or further apart, and bursts keep their seconds.
"""

import math
from collections.abc import Callable

import numpy as np

from benchmark_control_plane.simulator.simulation import arrival_times as renewal
from controlplane.core.memory import Floats

_GRID = 512
"""Points a period at which a swinging rate is cumulated; between them it is linear."""

Cumulated = Callable[[Floats], Floats]
"""Seconds since any moment -> expected arrivals at an overall mean rate of 1."""


def bursts(on_seconds: float, off_seconds: float) -> tuple[Cumulated, float]:
    """All arrivals fall into the first `on_seconds` of each period. With the period's length."""
    period = on_seconds + off_seconds

    def cumulated(at: Floats) -> Floats:
        whole, rest = np.divmod(at, period)
        return np.asarray(period * (whole + np.minimum(rest, on_seconds) / on_seconds))

    return cumulated, period


def wave(period: float, amplitude: float) -> tuple[Cumulated, float]:
    """The rate swings by `amplitude` of its mean. With the period's length."""
    turn = 2 * math.pi / period

    def cumulated(at: Floats) -> Floats:
        return np.asarray(at + amplitude / turn * (1 - np.cos(turn * at)))

    return cumulated, period


def times(
    rng: np.random.Generator,
    rate: float,
    duration: float,
    *,
    variation: float = 1.0,
    shape: tuple[Cumulated, float] | None = None,
) -> list[float]:
    """Seconds in [0, duration), rising. The gaps have this coefficient of variation in operational time: 0
    even, 1 Poisson, else Gamma. A shape starts at a random moment of its period."""
    if rate <= 0:
        return []
    phase = rng.random()
    expected = rate * duration
    # Far more than a Gamma sum of these gaps can need, bursts included.
    count = int(2 * expected + 12 * (1 + variation) * math.sqrt(expected + 1)) + 16
    if shape is not None:
        count += int(2 * rate * shape[1])
    if variation == 0:
        operational: Floats = np.arange(1, count + 1, dtype=np.float64)
    else:
        operational = np.array(renewal(rng, 1.0, count, variation=variation))
    if shape is None:
        seconds = operational / rate
    else:
        cumulated, period = shape
        start = phase * period
        grid: Floats = start + np.arange(0.0, duration + period, period / _GRID, dtype=np.float64)
        passed = rate * (cumulated(grid) - cumulated(np.array([start])))
        seconds = np.interp(operational, passed, grid - start, right=math.inf)
    return [float(at) for at in seconds if at < duration]
