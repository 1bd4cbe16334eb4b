"""Which requests are too large for the load? The memory-time up to which all arrivals can be served.

By Little's law requests of memory-time v (token-steps) that arrive at rate r keep r * step * v tokens
resident. Sorted by v, the smallest are served until that sum reaches the memory: the last one served
is the cut. It follows the load; below capacity there is none.
"""

from collections import deque
from math import inf

import numpy as np

from controlplane.core.clock import Duration, Instant, to_seconds

_FEWEST = 30
_EVERY = 8


class SizeCut:
    """Looks back over `window` arrivals; `share` of the memory is planned for."""

    def __init__(self, *, window: int, share: float) -> None:
        self._seen: deque[tuple[Instant, float]] = deque(maxlen=window)
        self._share = share
        self._arrivals = 0
        self._due = False
        self.size = inf

    def arrived(self, now: Instant, memory_time: float) -> None:
        self._seen.append((now, memory_time))
        self._arrivals += 1
        self._due = self._due or (self._arrivals % _EVERY == 0 and len(self._seen) >= _FEWEST)

    def update(self, memory_tokens: int, step: Duration) -> None:
        """Call once a step; does something only after some more arrivals."""
        if not self._due:
            return
        self._due = False
        span = to_seconds(Duration(self._seen[-1][0] - self._seen[0][0]))
        if span <= 0:
            self.size = inf
            return
        sizes = np.sort(np.array([size for _, size in self._seen]))
        resident = np.cumsum(sizes) / span * to_seconds(step)
        over = int(np.searchsorted(resident, self._share * memory_tokens))
        self.size = float(sizes[over]) if over < len(sizes) else inf
