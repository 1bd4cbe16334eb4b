"""What is the next value of a load's series, and how sure is that? Quantiles, without assuming a law.

Rule: a few simple experts each name a value: the last one, means over longer and longer memories, the
one a period ago. To each are added its own past errors, those it made at a like level before the others,
so that a silent source stays silent and a burst is expected to last as long as bursts do. At each level the
experts are weighted by the pinball loss that they had lately, and the level asked of them is moved until
what happens keeps the one that was promised (adaptive conformal inference: Gibbs and Candes, 2021).
"""

from collections.abc import Sequence

import numpy as np

from controlplane.core.memory import Floats

LEVELS = (0.5, 0.9, 0.99)

_HALF_LIVES = (2.0, 8.0, 32.0, 128.0)
_WINDOW = 512
_MIN_VALUES = 20
# How alike two levels are, in logarithms of value over mean; errors made elsewhere count this little.
_SIMILARITY_WIDTH, _MIN_WEIGHT = 0.5, 0.01
_LOSS_MEMORY = 200
# Weights fall by this power of e for each tenth of the best expert's loss that another loses more.
_SHARPNESS = 3.0
# Steps of the asked level; tails move slowly, since an exceedance there says a lot.
_LEVEL_STEPS = np.array((0.005, 0.0036, 0.001))
_LEVEL_MIN, _LEVEL_MAX = 0.02, 0.999
_PERIOD_EVERY, _SHORTEST_PERIOD, _PERIODS_SEEN = 64, 4, 3
_PEAK, _DIP = 0.2, 0.2

_LEVELS = np.array(LEVELS)


class SeriesForecaster:
    """Learns with `observe`, one value of at least 0 each time; about 0.2 ms each."""

    def __init__(self) -> None:
        experts = len(_HALF_LIVES) + 2
        self._rates = np.array([1.0, *(1 - 0.5 ** (1 / life) for life in _HALF_LIVES)])
        self._points = np.zeros(experts)
        self._points_seen = np.zeros((_WINDOW, experts))
        self._errors = np.zeros((_WINDOW, experts))
        self._values = np.zeros(_WINDOW)
        self._count = 0
        self._mean = 0.0
        self._losses = np.zeros((experts, len(LEVELS)))
        self._levels = _LEVELS.copy()
        self._by_expert: Floats | None = None
        self._covered = _LEVELS.copy()
        self.period: int | None = None
        self.quantiles: tuple[float, ...] | None = None
        """Of the next value at LEVELS, whole numbers; None while too little was seen."""

    @property
    def mean(self) -> float:
        """Over the last few hundred values."""
        return self._mean

    @property
    def dispersion(self) -> float:
        """Variance over mean of the values kept: 1 for Poisson counts, more where they come in bursts."""
        kept = self._values[: min(self._count, _WINDOW)]
        return float(kept.var() / kept.mean()) if kept.any() else 1.0

    @property
    def coverage(self) -> tuple[float, ...]:
        """Share of the last few hundred values that were within each quantile."""
        return tuple(float(share) for share in self._covered)

    def observe(self, value: float) -> None:
        if self._count:
            self._update_weights(value)
            slot = (self._count - 1) % _WINDOW
            self._points_seen[slot] = self._points
            self._errors[slot] = value - self._points
        self._learn(value)
        if self._count >= _MIN_VALUES:
            self._by_expert = self._expert_quantiles()
            blended = (self._weights() * self._by_expert).sum(axis=0)
            found = np.maximum.accumulate(np.rint(blended))
            self.quantiles = tuple(float(q) for q in found)

    def _update_weights(self, value: float) -> None:
        if self._by_expert is None or self.quantiles is None:
            return
        short = value - self._by_expert
        losses = np.where(short >= 0, _LEVELS * short, (_LEVELS - 1) * short)
        self._losses += (losses - self._losses) / _LOSS_MEMORY
        said = np.array(self.quantiles)
        # A value that is exactly the quantile (both 0, most often) speaks neither for nor against it.
        self._levels += np.where(value == said, 0.0, _LEVEL_STEPS * (_LEVELS - (value < said)))
        self._levels = np.clip(self._levels, _LEVEL_MIN, _LEVEL_MAX)
        self._covered += ((value <= said) - self._covered) / _LOSS_MEMORY

    def _learn(self, value: float) -> None:
        self._values[self._count % _WINDOW] = value
        self._count += 1
        if self._count % _PERIOD_EVERY == 0:
            self.period = find_period(self._recent(min(self._count, _WINDOW)))
        fastest = 1.0 / self._count
        self._points[:-1] += np.maximum(self._rates, fastest) * (value - self._points[:-1])
        self._points[-1] = self._seasonal_point()
        self._mean += max(1.0 / _WINDOW, fastest) * (value - self._mean)

    def _recent(self, count: int) -> Floats:
        """The last `count` values, oldest first."""
        found: Floats = self._values[np.arange(self._count - count, self._count) % _WINDOW]
        return found

    def _seasonal_point(self) -> float:
        if self.period is None:
            return float(self._points[-2])
        seen = min(self._count, _WINDOW) // self.period
        ago = self._count - self.period * np.arange(1, min(seen, _PERIODS_SEEN) + 1)
        return float(self._values[ago % _WINDOW].mean())

    def _expert_quantiles(self) -> Floats:
        """[expert, level]"""
        kept = min(self._count - 1, _WINDOW)
        unit = self._mean or 1.0
        distance = np.log1p(self._points_seen[:kept] / unit) - np.log1p(self._points / unit)
        weights = np.exp(-0.5 * (distance / _SIMILARITY_WIDTH) ** 2) + _MIN_WEIGHT
        age = (self._count - 2 - np.arange(kept)) % _WINDOW
        weights *= (0.5 ** (age / _WINDOW))[:, np.newaxis]
        order = np.argsort(self._errors[:kept], axis=0)
        errors = np.take_along_axis(self._errors[:kept], order, axis=0)
        share = np.cumsum(np.take_along_axis(weights, order, axis=0), axis=0)
        # One more error than were seen: the largest of n bounds the next with probability n / (n + 1).
        share /= share[-1] * (1 + 1 / kept)
        found = [
            errors[np.minimum(np.searchsorted(share[:, k], self._levels), kept - 1), k]
            for k in range(len(self._points))
        ]
        quantiles: Floats = np.maximum(0.0, self._points[:, np.newaxis] + np.array(found))
        return quantiles

    def _weights(self) -> Floats:
        best = self._losses.min(axis=0)
        behind = (self._losses - best) / (0.1 * best + 1e-12)
        weights: Floats = np.exp(-_SHARPNESS * behind)
        weights /= weights.sum(axis=0)
        return weights


def find_period(values: Sequence[float] | Floats) -> int | None:
    """The lag at which the series repeats itself best, if it does: a peak of the autocorrelation after a
    dip, of which at least three fit into the values."""
    centred = np.asarray(values) - np.mean(values)
    size = len(centred)
    longest = size // _PERIODS_SEEN
    if longest <= _SHORTEST_PERIOD or not centred.any():
        return None
    spectrum = np.abs(np.fft.rfft(centred, 2 * size)) ** 2
    products = np.fft.irfft(spectrum)[: longest + 1]
    # Fewer pairs are summed at longer lags.
    correlation = products / products[0] * size / (size - np.arange(longest + 1))
    lags = np.arange(_SHORTEST_PERIOD, longest)
    at = correlation[lags]
    is_peak = (at > correlation[lags - 1]) & (at >= correlation[lags + 1]) & (at > _PEAK)
    lowest = np.minimum.accumulate(correlation)[lags]
    peaks = lags[is_peak & (at - lowest > _DIP)]
    if not len(peaks):
        return None
    best = correlation[peaks].max()
    # A multiple of the period repeats as well; the first that is nearly the best is the period itself.
    return int(peaks[np.argmax(correlation[peaks] > 0.9 * best)])
