"""Distributions of token counts, and quantiles and the spread of measured values."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log, sqrt
from statistics import NormalDist, median

import numpy as np

from controlplane.core.memory_ledger import Floats


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Log-normal token counts, rounded and clipped to 1..`cap`; `mean` and `median` are before clipping."""

    mean: float
    median: float
    cap: int

    @property
    def deviation(self) -> float:
        """Standard deviation of the logarithm."""
        return sqrt(2 * log(self.mean / self.median))

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """`count` independent token counts."""
        return self._tokens(rng.lognormal(log(self.median), self.deviation, count))

    def quantiles(self, count: int) -> list[int]:
        """Medians of `count` equally likely parts of the distribution, ascending."""
        normal = NormalDist(log(self.median), self.deviation)
        return self._tokens(np.exp([normal.inv_cdf((i + 0.5) / count) for i in range(count)]))

    def _tokens(self, lengths: Floats) -> list[int]:
        return [int(t) for t in np.clip(np.rint(lengths), 1, self.cap)]


def nearest_rank(values: Sequence[float], level: float) -> float:
    """The least of some values, at least one, that a share `level` of them does not exceed."""
    return sorted(values)[max(0, ceil(level * len(values)) - 1)]


def spread(values: Sequence[float], digits: int) -> dict[str, float]:
    """The least, the median and the largest of some values, rounded to so many digits."""
    found = {"min": min(values), "median": median(values), "max": max(values)}
    return {name: round(value, digits) for name, value in found.items()}
