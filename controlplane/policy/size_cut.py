"""Which requests are too large for the load? The memory-time up to which all arrivals can be served.

By Little's law requests of memory-time v (token-steps) that arrive at rate r keep r * step * v tokens
resident. Sorted by v, the smallest are served until that sum reaches a share of the memory: the last
one served is the cut. It follows the load; below capacity there is none. With what a full memory loses while
the prompt is read in v, the sum is that much more memory than there would be if reading took no time.

Predictions may be wrong by any factor, so the sum is corrected by what is seen: while there is a cut and
memory stays clearly emptier than planned, too much is cut off, and the correction falls. While the
plan is met, or without a cut, it returns to 1.
"""

from collections import deque
from math import exp, inf

import numpy as np

from controlplane.core.clock import Duration, Instant, to_seconds

_FEWEST = 30
_EVERY = 8
_USE_MEMORY_STEPS = 128
_GAIN = 2.0
_SLACK = 0.15
_LEAST = 1 / 64


class SizeCut:
    """Looks back over `window` arrivals; `share` of the memory is planned for."""

    def __init__(self, *, window: int, share: float) -> None:
        self._seen: deque[tuple[Instant, float]] = deque(maxlen=window)
        self._share = share
        self._arrivals = 0
        self._is_due = False
        self._use = 0.0
        self.correction = 1.0
        self.size = inf

    def arrived(self, now: Instant, memory_time: float) -> None:
        self._seen.append((now, memory_time))
        self._arrivals += 1
        self._is_due = self._is_due or (self._arrivals % _EVERY == 0 and len(self._seen) >= _FEWEST)

    def update(self, memory_tokens: int, step: Duration, use: float) -> None:
        """Call once a step with the used share of the memory; finds the cut anew after some arrivals."""
        self._use += (use - self._use) / _USE_MEMORY_STEPS
        if not self._is_due:
            return
        self._is_due = False
        self._correct()
        span = to_seconds(Duration(self._seen[-1][0] - self._seen[0][0]))
        if span <= 0:
            self.size = inf
            return
        sizes = np.sort(np.array([size for _, size in self._seen]))
        resident = np.cumsum(sizes) / span * to_seconds(step) * self.correction
        over = int(np.searchsorted(resident, self._share * memory_tokens))
        self.size = float(sizes[over]) if over < len(sizes) else inf

    def _correct(self) -> None:
        missing = self._share - _SLACK - self._use
        if self.size == inf:
            self.correction += (1.0 - self.correction) / _EVERY
        elif missing > 0:
            self.correction = max(_LEAST, self.correction * exp(-_GAIN * missing))
        elif self._use > self._share:
            self.correction = min(1.0, self.correction * exp(_GAIN * (self._use - self._share)))
