"""Predicts the duration of one embedding pass.

`base + per_token * tokens + per_square * tokens * padded_length` over padded tokens: start cost, dense
layers, attention. The coefficients are fitted at startup to a grid of measured passes by least squares of the
relative error, none below zero. Online, a running mean of observed over predicted time scales the model,
which accounts for a device that is shared with other work; the ratio that a tenth of the passes exceed says
how much longer than predicted one may take.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

# A pass this many times as long as its start cost loses 3 % of the best throughput.
_MIN_STARTS_PER_PASS = 32
_MAX_SCALE_CHANGE = 4.0
_CAUTION_LEVEL, _CAUTION_PASSES = 0.9, 64


@dataclass(frozen=True, slots=True)
class TimePoint:
    """Measured duration of one pass."""

    inputs: int
    padded_length: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PassTime:
    """Coefficients of the pass time, in seconds."""

    base: float
    per_token: float
    per_square: float

    def seconds(self, inputs: int, padded_length: int) -> float:
        """Duration of a pass."""
        each = (self.per_token + self.per_square * padded_length) * padded_length
        return self.base + inputs * each

    @property
    def start_tokens(self) -> int:
        """Cost of starting a pass, in tokens computed in the same time."""
        return round(self.base / self.per_token) if self.per_token > 0 else 0

    def full_speed_tokens(self, batch_tokens: int) -> int:
        """Smallest pass with nearly full throughput, in padded tokens; at most `batch_tokens`."""
        if self.per_token <= 0:
            return batch_tokens
        return max(1, min(batch_tokens, _MIN_STARTS_PER_PASS * self.start_tokens))


def fit_time_model(points: Sequence[TimePoint]) -> PassTime:
    """Fits `PassTime` by least relative squares. Raises ValueError without a point."""
    if not points:
        raise ValueError("no pass was measured; a time model needs at least one")
    took = np.array([p.seconds for p in points])
    tokens = np.array([float(p.inputs * p.padded_length) for p in points])
    lengths = np.array([float(p.padded_length) for p in points])
    terms = np.stack([np.ones_like(took), tokens, tokens * lengths], axis=1) / took[:, None]
    best: tuple[float, tuple[float, ...]] = (float("inf"), (0.0, 0.0, 0.0))
    # Non-negative least squares over three terms: the best of seven subsets without a negative coefficient.
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
    """Scales the profiled `model` by the ratio observed over the last `memory` passes."""

    model: PassTime
    memory: int = 32
    scale: float = 1.0
    caution: float = field(default=1.0, init=False)
    """Nine in ten passes took at most this multiple of their prediction, hand-over included; at least 1."""
    _observations: int = 0
    _ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_CAUTION_PASSES), init=False)

    def seconds(self, inputs: int, padded_length: int) -> float:
        """Duration of a pass at the current scale."""
        return self.scale * self.model.seconds(inputs, padded_length)

    def observe_wait(self, point: TimePoint, waited: float) -> None:
        """Updates `caution` by a pass whose result came `waited` seconds after it was sent."""
        expected = self.seconds(point.inputs, point.padded_length)
        if expected > 0:
            self._ratios.append(waited / expected)
            ratios = sorted(self._ratios)
            self.caution = max(1.0, ratios[int(_CAUTION_LEVEL * (len(ratios) - 1))])

    def observe(self, point: TimePoint) -> None:
        """Updates the scale; one pass changes it by a bounded factor."""
        expected = self.model.seconds(point.inputs, point.padded_length)
        if expected <= 0 or point.seconds <= 0:
            return
        self._observations += 1
        rate = max(1 / self.memory, 1 / (self._observations + 1))
        lowest, highest = self.scale / _MAX_SCALE_CHANGE, self.scale * _MAX_SCALE_CHANGE
        ratio = min(max(point.seconds / expected, lowest), highest)
        self.scale += rate * (ratio - self.scale)
