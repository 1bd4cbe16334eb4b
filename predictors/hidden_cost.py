"""What do hidden states add to a step, beside keys and values? Fitted as steps go by.

Rule: recursive least squares of a decode step's time on what it decodes (in all: 1, tokens held, requests; of
those on hidden states: tokens, requests, 1 if any), starting from what was measured at start-up and
forgetting slowly. An error far outside the usual ones counts no more than one at their edge, so that a stall
moves little. What is asked are the last three; none is below zero: a form that costs less than nothing need
not be paid for.
"""

from math import sqrt

import numpy as np

from controlplane.core.view import HiddenPrice

_FORGETTING = 0.999
# In these units all coefficients are of the order of a step.
_SCALE = np.array([1.0, 1e4, 1e2, 1e4, 1e2, 1.0])
# How much a step's time is taken to scatter, in seconds, before any was seen.
_SCATTER = 0.003
# How wrong the start may be over that, squared.
_DOUBT = (np.array([1.0, 1.0, 1.0, 0.03, 0.01, 0.01]) / _SCATTER) ** 2
# The edge, in usual errors. These follow within some twenty steps, so that a lasting change is learned.
_EDGE = 4.0
_FOLLOWING = 0.05


class HiddenCost:
    """`price` was measured before the first step."""

    def __init__(self, price: HiddenPrice) -> None:
        self._weights = np.array([0.0, 0.0, 0.0, price.token, price.request, price.step]) * _SCALE
        self._spread = np.diag(_DOUBT)
        self._usual = _SCATTER

    @property
    def price(self) -> HiddenPrice:
        return HiddenPrice(*(self._weights / _SCALE)[3:].clip(0.0).tolist())

    def observe(
        self, *, tokens: int, requests: int, hidden_tokens: int, hidden_requests: int, seconds: float
    ) -> None:
        """A step that only decoded; `tokens` and `requests` count those on hidden states too."""
        load = [1.0, tokens, requests, hidden_tokens, hidden_requests, float(hidden_requests > 0)]
        seen = np.array(load) / _SCALE
        unsure = seen @ self._spread @ seen
        gain = self._spread @ seen / (_FORGETTING + unsure)
        edge = _EDGE * sqrt(self._usual**2 + _SCATTER**2 * unsure)
        error = min(edge, max(-edge, seconds - self._weights @ seen))
        self._usual += _FOLLOWING * (abs(error) - self._usual)
        self._weights = self._weights + gain * error
        spread = (self._spread - np.outer(gain, seen @ self._spread)) / _FORGETTING
        # Directions that the load never takes are forgotten without bound otherwise.
        self._spread = spread * min(1.0, 4 * _DOUBT.max() / max(np.trace(spread), 1e-12))
