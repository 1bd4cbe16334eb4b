"""Size cutoff under overload: the largest memory-time (blocks x seconds) at which all arrivals can be served.

By Little's law, requests of memory-time v (token-steps) that arrive at rate r keep r * step * v tokens
resident. Sorted by v, requests are counted until that sum reaches a share of the memory; the last one is the
cutoff. It follows the load; below capacity there is none. Where v includes what a full memory loses during
the prefill, the sum includes that loss. With class weights w the order and the cutoff are those of v / w, and
the sum is of v: it keeps the greatest sum of weights that the memory can serve.

Memory that the arrivals leave free may serve requests that have missed their SLO. The number of resident
tokens fluctuates: for random arrivals its variance is the sum of r * step * v * (tokens of each). Half a
standard deviation is kept free too: with a whole one, those requests hardly start below capacity; with none
they are preempted again.

Predictions may be wrong by any factor, so the sum is corrected by observation: while there is a cutoff and
memory stays clearly emptier than planned, the correction falls, because too much is cut off. While the plan
is met, or without a cutoff, it returns to 1.

The rate of arrivals counts up to now, so cutoff and free memory follow also when arrivals stop.
"""

from collections import deque
from math import exp, inf, sqrt

import numpy as np

from controlplane.core.clock import Duration, Instant, after, to_seconds

FEWEST_ARRIVALS = 30
"""With fewer there is no cutoff."""
_EVERY = 8
_USE_MEMORY_STEPS = 128
_GAIN = 2.0
_SLACK = 0.15
_LEAST = 1 / 64
_DEVIATIONS = 0.5


class SizeCutoff:
    """Cutoff over the last `window` arrivals, planned for `share` of the memory.

    `size` is the cutoff in token-steps per unit of weight, inf without one. `spare` is the share of memory
    that all arrivals together leave free, less half a standard deviation; at most 0 if they leave none.
    """

    def __init__(self, *, window: int, share: float) -> None:
        self._arrived: deque[Instant] = deque(maxlen=window)
        self._sizes: deque[float] = deque(maxlen=window)
        self._weights: deque[float] = deque(maxlen=window)
        self._tokens: deque[int] = deque(maxlen=window)
        self._share = share
        self._arrivals = 0
        self._is_due = False
        self._next_due: Instant | None = None
        self._use = 0.0
        self.correction = 1.0
        self.size = inf
        self.spare = 1.0

    def arrived(self, now: Instant, memory_time: float, tokens: int, weight: float = 1.0) -> None:
        """Records an arrival; `tokens` is its predicted size at its end, `weight` that of its class."""
        self._arrived.append(now)
        self._sizes.append(memory_time)
        self._tokens.append(tokens)
        self._weights.append(weight)
        self._arrivals += 1
        self._is_due = self._is_due or (self._arrivals % _EVERY == 0 and len(self._sizes) >= FEWEST_ARRIVALS)

    def update(self, now: Instant, memory_tokens: int, step: Duration, use: float) -> None:
        """Recomputes the cutoff if enough requests arrived since, or should have; call once per step.

        `use` is the used share of the memory.
        """
        self._use += (use - self._use) / _USE_MEMORY_STEPS
        if not self._is_due and (self._next_due is None or now < self._next_due):
            return
        self._is_due = False
        self._correct()
        elapsed = Duration(max(now, self._arrived[-1]) - self._arrived[0])
        if (span := to_seconds(elapsed)) <= 0:
            self.size, self.spare = inf, 1.0
            return
        self._next_due = after(now, Duration(elapsed // len(self._arrived) * _EVERY))
        steps_a_token = to_seconds(step) / span * self.correction
        costs, tokens, weights = (
            np.fromiter(column, np.float64, len(column))
            for column in (self._sizes, self._tokens, self._weights)
        )
        sizes = costs / weights
        order = np.argsort(sizes, kind="stable")
        resident = np.cumsum(costs[order]) * steps_a_token
        variance = float(costs @ tokens) * steps_a_token
        self.spare = 1.0 - (float(resident[-1]) + _DEVIATIONS * sqrt(variance)) / memory_tokens
        cutoff_index = int(np.searchsorted(resident, self._share * memory_tokens))
        self.size = float(sizes[order[cutoff_index]]) if cutoff_index < len(sizes) else inf

    def largest(self, free: float) -> float:
        """Largest size that may start while this share of the memory is free."""
        return self.size * (1 + max(0.0, free))

    def _correct(self) -> None:
        shortfall = self._share - _SLACK - self._use
        if self.size == inf:
            self.correction += (1.0 - self.correction) / _EVERY
        elif shortfall > 0:
            self.correction = max(_LEAST, self.correction * exp(-_GAIN * shortfall))
        elif self._use > self._share:
            self.correction = min(1.0, self.correction * exp(_GAIN * (self._use - self._share)))
