"""Arrival times of a renewal process whose rate may follow bursts or a sine wave.

Gaps of mean 1 are summed in operational time and mapped to seconds by the inverse of the cumulative rate. One
seed therefore gives the same sequence at every rate, compressed or stretched, while the period of bursts is
unchanged.
"""

import math
from collections.abc import Callable

import numpy as np

from benchmark_control_plane.simulator.simulation import arrival_times as renewal
from controlplane.core.memory_ledger import Floats

_GRID = 512
"""Grid points per period for the cumulative rate; it is linear between them."""

Cumulated = Callable[[Floats], Floats]
"""Seconds -> expected number of arrivals at a mean rate of 1."""


def bursts(on_seconds: float, off_seconds: float) -> tuple[Cumulated, float]:
    """On-off rate: all arrivals in the first `on_seconds` of each period; returned with the period."""
    period = on_seconds + off_seconds

    def cumulated(at: Floats) -> Floats:
        whole, rest = np.divmod(at, period)
        return np.asarray(period * (whole + np.minimum(rest, on_seconds) / on_seconds))

    return cumulated, period


def wave(period: float, amplitude: float) -> tuple[Cumulated, float]:
    """Sinusoidal rate with relative `amplitude`; returned with the period."""
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
    """Arrival times in [0, duration), in seconds, ascending.

    Args:
        rng: random generator.
        rate: mean arrivals per second.
        duration: seconds.
        variation: coefficient of variation of the gaps in operational time: 0 even, 1 Poisson, else Gamma.
        shape: result of `bursts` or `wave`; it starts at a random phase.
    """
    if rate <= 0:
        return []
    phase = rng.random()
    expected = rate * duration
    # More gaps than are needed with any realistic probability, bursts included.
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
