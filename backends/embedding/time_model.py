"""How long does one embedding pass take?

Rule: `base + per_token * tokens + per_square * tokens * padded_length`, over padded tokens: starting, the
dense layers, attention. Fitted at start-up to a grid of measured passes, none of the three below zero,
each point weighted by what it took, so that short passes count as much as long ones. Online, the whole
line is scaled by a running mean of seen over predicted: a device that is shared is slower.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

# Batches this many times as long as starting them lose 3 % of the best throughput.
_MIN_STARTS_PER_PASS = 32
_MAX_SCALE_CHANGE = 4.0


@dataclass(frozen=True, slots=True)
class TimePoint:
    inputs: int
    padded_length: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PassTime:
    """Seconds."""

    base: float
    per_token: float
    per_square: float

    def seconds(self, inputs: int, padded_length: int) -> float:
        return self.base + inputs * self._per_input(padded_length)

    def max_inputs(self, padded_length: int, seconds: float) -> int:
        """How many inputs of this length a pass of that time holds; one at least."""
        each = self._per_input(padded_length)
        return max(1, int((seconds - self.base) / each)) if each > 0 else 2**31

    @property
    def start_tokens(self) -> int:
        """What starting a pass costs, in tokens computed in the same time."""
        return round(self.base / self.per_token) if self.per_token > 0 else 0

    def full_speed_tokens(self, batch_tokens: int) -> int:
        """The smallest pass of nearly full throughput; `batch_tokens` bounds it."""
        if self.per_token <= 0:
            return batch_tokens
        return max(1, min(batch_tokens, _MIN_STARTS_PER_PASS * self.start_tokens))

    def _per_input(self, padded_length: int) -> float:
        return (self.per_token + self.per_square * padded_length) * padded_length


def fit_time_model(points: Sequence[TimePoint]) -> PassTime:
    """Least relative squares. Raises ValueError without a point."""
    if not points:
        raise ValueError("no pass was measured: a time model needs one at least")
    took = np.array([p.seconds for p in points])
    tokens = np.array([float(p.inputs * p.padded_length) for p in points])
    lengths = np.array([float(p.padded_length) for p in points])
    terms = np.stack([np.ones_like(took), tokens, tokens * lengths], axis=1) / took[:, None]
    best: tuple[float, tuple[float, ...]] = (float("inf"), (0.0, 0.0, 0.0))
    # Three terms have seven subsets: the best one without a negative coefficient is the answer.
    for size in (1, 2, 3):
        for chosen in combinations(range(3), size):
            found, *_ = np.linalg.lstsq(terms[:, chosen], np.ones(len(took)), rcond=None)
            error = float(((terms[:, chosen] @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < best[0] - 1e-12:
                whole = np.zeros(3)
                whole[list(chosen)] = found
                best = error, tuple(map(float, whole))
    return PassTime(*best[1])


@dataclass(slots=True)
class ObservedTime:
    """`model` as measured, `scale` as seen lately over `memory` passes."""

    model: PassTime
    memory: int = 32
    scale: float = 1.0
    _observations: int = 0

    def seconds(self, inputs: int, padded_length: int) -> float:
        return self.scale * self.model.seconds(inputs, padded_length)

    def max_inputs(self, padded_length: int, seconds: float) -> int:
        return self.model.max_inputs(padded_length, seconds / self.scale)

    def observe(self, point: TimePoint) -> None:
        expected = self.model.seconds(point.inputs, point.padded_length)
        if expected <= 0 or point.seconds <= 0:
            return
        self._observations += 1
        rate = max(1 / self.memory, 1 / (self._observations + 1))
        lowest, highest = self.scale / _MAX_SCALE_CHANGE, self.scale * _MAX_SCALE_CHANGE
        ratio = min(max(point.seconds / expected, lowest), highest)
        self.scale += rate * (ratio - self.scale)
