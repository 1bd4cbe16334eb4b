"""What does a token on hidden states add to a step, beside one on keys and values? Fitted as steps go by.

Rule: recursive least squares of a decode step's time on (1, tokens held, tokens on hidden states, requests),
starting from what was measured at start-up and forgetting slowly. What is asked is the third coefficient; it
is never below zero: a form that costs less than nothing need not be paid for.
"""

import numpy as np

_FORGETTING = 0.999
# In these units all four coefficients are of the order of a step.
_SCALE = np.array([1.0, 1e4, 1e4, 1e2])
# How wrong the start may be over how much a step's time scatters, squared: a second, but 30 ms for what was
# measured; 3 ms from step to step.
_DOUBT = (1.0 / 0.003) ** 2
_MEASURED_DOUBT = (0.03 / 0.003) ** 2


class HiddenCost:
    """`seconds_per_token` is what was measured before the first step."""

    def __init__(self, seconds_per_token: float) -> None:
        self._weights = np.array([0.0, 0.0, seconds_per_token, 0.0]) * _SCALE
        self._spread = np.eye(4) * _DOUBT
        self._spread[2, 2] = _MEASURED_DOUBT

    @property
    def seconds_per_token(self) -> float:
        return max(0.0, float(self._weights[2] / _SCALE[2]))

    def observe(self, *, tokens: int, hidden_tokens: int, requests: int, seconds: float) -> None:
        """A step that only decoded; `tokens` counts those on hidden states too."""
        seen = np.array([1.0, tokens, hidden_tokens, requests]) / _SCALE
        gain = self._spread @ seen / (_FORGETTING + seen @ self._spread @ seen)
        self._weights = self._weights + gain * (seconds - self._weights @ seen)
        spread = (self._spread - np.outer(gain, seen @ self._spread)) / _FORGETTING
        # Directions that the load never takes are forgotten without bound otherwise.
        self._spread = spread * min(1.0, 4 * _DOUBT / max(np.trace(spread), 1e-12))
