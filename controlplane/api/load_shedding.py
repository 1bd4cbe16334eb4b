"""Controlled delay: rejects requests that waited too long for the event loop while all of them do.

A burst also makes requests wait, but its queue empties. A queue that lasts is recognized by its shortest
delay: if for a whole interval no request waited less than the target, those that waited longer are rejected
(Nichols and Jacobson, "Controlling Queue Delay", ACM Queue 2012; Maurer, "Fail at Scale", ACM Queue 2015).
"""

from collections.abc import Callable

from controlplane.core.clock import Duration, Instant, after, milliseconds
from controlplane.core.request import Kind

INTERVAL = milliseconds(100)


class LoadShedder:
    """Decides from the delays of requests, in their order; calls `on_shed` for each that it rejects."""

    def __init__(self, on_shed: Callable[[Kind], None]) -> None:
        self._on_shed = on_shed
        self._ends = Instant(0)
        self._shortest = Duration(0)
        self._is_overloaded = False

    def sheds(self, kind: Kind, delay: Duration, now: Instant, target: Duration) -> bool:
        """Whether to reject a request that waited for `delay` until `now`; `target` is the longest wait."""
        if now >= self._ends:
            # An interval that ended long before the request came says nothing about the load of now.
            is_recent = now - delay < after(self._ends, INTERVAL)
            self._is_overloaded = is_recent and self._shortest > target
            self._shortest, self._ends = delay, after(now, INTERVAL)
        else:
            self._shortest = min(self._shortest, delay)
        is_shed = self._is_overloaded and delay > target
        if is_shed:
            self._on_shed(kind)
        return is_shed
