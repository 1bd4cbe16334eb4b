"""Forecasts quantiles of the next value of a load series by a weighted mixture of simple experts.

Each expert gives a point forecast: the last value, exponential means with four half-lives, or the value one
period ago. Its quantiles are the point plus quantiles of its own past errors, where errors made at a similar
load weigh more; so an idle source is forecast to stay idle, and a burst to last as long as earlier bursts. At
each level the experts are weighted by their recent pinball loss. The level requested from them is adjusted
until the observed coverage equals the nominal level (adaptive conformal inference: Gibbs and Candes, 2021).
No distribution is assumed.
"""

from collections.abc import Sequence

import numpy as np

from controlplane.core.memory_ledger import Floats

LEVELS = (0.5, 0.9, 0.99)

_HALF_LIVES = (2.0, 8.0, 32.0, 128.0)
_WINDOW = 512
_MIN_VALUES = 20
# Kernel width in logarithms of value over mean, and the least weight of an error made at another load.
_SIMILARITY_WIDTH, _MIN_WEIGHT = 0.5, 0.01
_LOSS_MEMORY = 200
# An expert's weight falls by e^_SHARPNESS for each tenth by which its loss exceeds the best expert's.
_SHARPNESS = 3.0
# Step of the requested level at each of LEVELS; small in the tail, where one exceedance weighs much.
_LEVEL_STEPS = np.array((0.005, 0.0036, 0.001))
_LEVEL_MIN, _LEVEL_MAX = 0.02, 0.999
_PERIOD_EVERY, _SHORTEST_PERIOD, _PERIODS_SEEN = 64, 4, 3
_PEAK, _DIP = 0.2, 0.2

_LEVELS = np.array(LEVELS)


class SeriesForecaster:
    """Online quantile forecaster of a series of values >= 0; one `observe` takes about 0.2 ms."""

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
        """Quantiles of the next value at LEVELS, rounded; None until 20 values were observed."""

    @property
    def mean(self) -> float:
        """Exponential mean over the last few hundred values."""
        return self._mean

    @property
    def dispersion(self) -> float:
        """Variance over mean of the values kept: 1 for Poisson counts, above 1 for bursts."""
        kept = self._values[: min(self._count, _WINDOW)]
        return float(kept.var() / kept.mean()) if kept.any() else 1.0

    @property
    def coverage(self) -> tuple[float, ...]:
        """Share of the last few hundred values at or below each forecast quantile."""
        return tuple(float(share) for share in self._covered)

    def observe(self, value: float) -> None:
        """Scores the current forecast with `value`, learns from it and makes the next forecast."""
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
        stated = np.array(self.quantiles)
        # A value equal to the quantile (most often both are 0) is neither a hit nor a miss.
        self._levels += np.where(value == stated, 0.0, _LEVEL_STEPS * (_LEVELS - (value < stated)))
        self._levels = np.clip(self._levels, _LEVEL_MIN, _LEVEL_MAX)
        self._covered += ((value <= stated) - self._covered) / _LOSS_MEMORY

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
        """Last `count` values, oldest first."""
        found: Floats = self._values[np.arange(self._count - count, self._count) % _WINDOW]
        return found

    def _seasonal_point(self) -> float:
        """Mean of the values one, two and three periods ago; the slowest mean if there is no period."""
        if self.period is None:
            return float(self._points[-2])
        seen = min(self._count, _WINDOW) // self.period
        ago = self._count - self.period * np.arange(1, min(seen, _PERIODS_SEEN) + 1)
        return float(self._values[ago % _WINDOW].mean())

    def _expert_quantiles(self) -> Floats:
        """Quantiles of each expert at the requested levels, shape [expert, level]."""
        kept = min(self._count - 1, _WINDOW)
        unit = self._mean or 1.0
        distance = np.log1p(self._points_seen[:kept] / unit) - np.log1p(self._points / unit)
        weights = np.exp(-0.5 * (distance / _SIMILARITY_WIDTH) ** 2) + _MIN_WEIGHT
        age = (self._count - 2 - np.arange(kept)) % _WINDOW
        weights *= (0.5 ** (age / _WINDOW))[:, np.newaxis]
        order = np.argsort(self._errors[:kept], axis=0)
        errors = np.take_along_axis(self._errors[:kept], order, axis=0)
        share = np.cumsum(np.take_along_axis(weights, order, axis=0), axis=0)
        # The largest of n errors bounds the next one, if exchangeable, with probability n / (n + 1).
        share /= share[-1] * (1 + 1 / kept)
        found = [
            errors[np.minimum(np.searchsorted(share[:, k], self._levels), kept - 1), k]
            for k in range(len(self._points))
        ]
        quantiles: Floats = np.maximum(0.0, self._points[:, np.newaxis] + np.array(found))
        return quantiles

    def _weights(self) -> Floats:
        """Weights of the experts at each level, shape [expert, level]; each column sums to 1."""
        best = self._losses.min(axis=0)
        excess_loss = (self._losses - best) / (0.1 * best + 1e-12)
        weights: Floats = np.exp(-_SHARPNESS * excess_loss)
        weights /= weights.sum(axis=0)
        return weights


def find_period(values: Sequence[float] | Floats) -> int | None:
    """Period of the series in values, or None.

    The period is the lag of a peak of the autocorrelation that follows a dip; `values` must span at least
    three periods.
    """
    centred = np.asarray(values) - np.mean(values)
    size = len(centred)
    longest = size // _PERIODS_SEEN
    if longest <= _SHORTEST_PERIOD or not centred.any():
        return None
    spectrum = np.abs(np.fft.rfft(centred, 2 * size)) ** 2
    products = np.fft.irfft(spectrum)[: longest + 1]
    # At longer lags fewer pairs are summed, so the sum is scaled to the full size.
    correlation = products / products[0] * size / (size - np.arange(longest + 1))
    lags = np.arange(_SHORTEST_PERIOD, longest)
    at = correlation[lags]
    is_peak = (at > correlation[lags - 1]) & (at >= correlation[lags + 1]) & (at > _PEAK)
    lowest = np.minimum.accumulate(correlation)[lags]
    peaks = lags[is_peak & (at - lowest > _DIP)]
    if not len(peaks):
        return None
    best = correlation[peaks].max()
    # Multiples of the period peak too; the period is the first lag whose peak is nearly the highest.
    return int(peaks[np.argmax(correlation[peaks] > 0.9 * best)])
