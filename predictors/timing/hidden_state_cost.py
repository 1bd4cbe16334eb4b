"""Learns the additional step time of requests whose cache holds hidden states instead of keys and values.

The time of a decode step is regressed by `online_least_squares` on six terms: 1, tokens held and requests of
the whole batch; tokens, requests and an indicator of the part on hidden states. The fit starts from a
measurement at start-up. Errors beyond the Huber threshold are down-weighted, so a stall has little effect.
The last three coefficients are the cost; they keep their values while no request uses hidden states, and are
never negative.
"""

from math import sqrt

from controlplane.core.pool_view import HiddenStateCost
from predictors.timing.online_least_squares import OnlineLeastSquares, dot

_DECAY = 0.999
# Scales of the six terms that make all coefficients of the order of a step time.
_UNITS = (1.0, 1e4, 1e2, 1e4, 1e2, 1.0)
# Initial scatter of a step time, in seconds.
_TYPICAL_ERROR_SECONDS = 0.003
# From prior deviations in seconds; wide for the first three terms, of which nothing was measured.
_PRIOR_PRECISIONS = [1 / deviation**2 for deviation in (1.0, 1.0, 1.0, 0.03, 0.01, 0.01)]
# Threshold in typical errors. The typical error follows within about twenty steps, so a lasting change is
# learned.
_HUBER_THRESHOLD = 4.0
_ERROR_RATE = 0.05


class HiddenStateCostModel:
    """Online estimate of the hidden-state cost; `price` is the measurement at start-up."""

    def __init__(self, price: HiddenStateCost) -> None:
        costs = (0.0, 0.0, 0.0, price.token, price.request, price.step)
        scaled = [cost * unit for cost, unit in zip(costs, _UNITS, strict=True)]
        self._fit = OnlineLeastSquares(scaled, decay=_DECAY)
        self._typical_error = _TYPICAL_ERROR_SECONDS

    @property
    def price(self) -> HiddenStateCost:
        """Current estimate, in seconds per token, per request and per step."""
        costs = [cost / unit for cost, unit in zip(self._fit.costs, _UNITS, strict=True)]
        return HiddenStateCost(*costs[3:])

    def observe(
        self, *, tokens: int, requests: int, hidden_tokens: int, hidden_requests: int, seconds: float
    ) -> None:
        """Learns from a decode-only step; `tokens` and `requests` include those on hidden states."""
        counts = (1, tokens, requests, hidden_tokens, hidden_requests, hidden_requests > 0)
        load = [count / unit for count, unit in zip(counts, _UNITS, strict=True)]
        edge = _HUBER_THRESHOLD * sqrt(
            self._typical_error**2 + self._fit.prediction_variance(load, _PRIOR_PRECISIONS)
        )
        error = abs(seconds - dot(load, self._fit.costs))
        weight = min(1.0, edge / max(error, 1e-12)) / _TYPICAL_ERROR_SECONDS**2
        self._typical_error += _ERROR_RATE * (min(error, edge) - self._typical_error)
        self._fit.observe(load, seconds, weight=weight, precisions=_PRIOR_PRECISIONS)
