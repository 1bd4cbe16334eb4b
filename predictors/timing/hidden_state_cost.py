"""What do hidden states add to a step, beside keys and values? Fitted as steps go by.

Rule: `least_squares` of a decode step's time on what it decodes (in all: 1, tokens held, requests; of those
on hidden states: tokens, requests, 1 if any), starting from what was measured at start-up. An error far
outside the usual ones counts no more than one at their edge, so that a stall moves little. What is asked are
the last three, which stand while nobody keeps hidden states. None is below zero: a form that costs less than
nothing need not be paid for.
"""

from math import sqrt

from controlplane.core.view import HiddenStateCost
from predictors.timing.online_least_squares import OnlineLeastSquares, dot

_DECAY = 0.999
# In these units all costs are of the order of a step.
_UNITS = (1.0, 1e4, 1e2, 1e4, 1e2, 1.0)
# How much a step's time is taken to scatter, in seconds.
_TYPICAL_ERROR_SECONDS = 0.003
# How wrong the start may be, in seconds: one deviation. Of keys and values nothing was measured.
_PRIOR_PRECISIONS = [1 / deviation**2 for deviation in (1.0, 1.0, 1.0, 0.03, 0.01, 0.01)]
# The edge, in usual errors. These follow within some twenty steps, so that a lasting change is learned.
_HUBER_THRESHOLD = 4.0
_ERROR_RATE = 0.05


class HiddenStateCostModel:
    """`price` was measured before the first step."""

    def __init__(self, price: HiddenStateCost) -> None:
        costs = (0.0, 0.0, 0.0, price.token, price.request, price.step)
        scaled = [cost * unit for cost, unit in zip(costs, _UNITS, strict=True)]
        self._fit = OnlineLeastSquares(scaled, decay=_DECAY)
        self._usual = _TYPICAL_ERROR_SECONDS

    @property
    def price(self) -> HiddenStateCost:
        costs = [cost / unit for cost, unit in zip(self._fit.costs, _UNITS, strict=True)]
        return HiddenStateCost(*costs[3:])

    def observe(
        self, *, tokens: int, requests: int, hidden_tokens: int, hidden_requests: int, seconds: float
    ) -> None:
        """A step that only decoded; `tokens` and `requests` count those on hidden states too."""
        counts = (1, tokens, requests, hidden_tokens, hidden_requests, hidden_requests > 0)
        load = [count / unit for count, unit in zip(counts, _UNITS, strict=True)]
        edge = _HUBER_THRESHOLD * sqrt(
            self._usual**2 + self._fit.prediction_variance(load, _PRIOR_PRECISIONS)
        )
        error = abs(seconds - dot(load, self._fit.costs))
        weight = min(1.0, edge / max(error, 1e-12)) / _TYPICAL_ERROR_SECONDS**2
        self._usual += _ERROR_RATE * (min(error, edge) - self._usual)
        self._fit.observe(load, seconds, weight=weight, doubts=_PRIOR_PRECISIONS)
