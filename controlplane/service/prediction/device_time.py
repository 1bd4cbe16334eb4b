"""Counts the time of the device by owner."""

from collections import deque
from typing import NamedTuple

from controlplane.core.clock import Duration, Instant
from controlplane.core.request import Owner

# Steps beside the longest pass; of more only the newest are seen.
_KEPT = 1_000


class CountedWork(NamedTuple):
    """A step or pass that took the time from `began` to `ended`, and what of it was counted."""

    began: int
    ended: int
    counted: int


class DeviceTime:
    """Counts each step and pass at most with the part of its time that the other owner's work left.

    What a step or a pass is expected to take alone is a prediction: without this bound the two together could
    exceed the time that has passed.
    """

    def __init__(self) -> None:
        self._counted: dict[Owner, deque[CountedWork]] = {owner: deque(maxlen=_KEPT) for owner in Owner}

    def count(self, owner: Owner, ended: Instant, took: Duration, alone: Duration) -> Duration:
        """The counted time of work that ended now, took `took`, and takes `alone` without other work."""
        began = ended - took
        others = 0
        for other, work in self._counted.items():
            if other is owner:
                continue
            for one in reversed(work):
                if one.ended <= began:
                    break
                others += _within(one, began, ended)
        counted = Duration(max(0, min(alone, took - others)))
        self._counted[owner].append(CountedWork(began, ended, counted))
        return counted


def _within(one: CountedWork, began: int, ended: int) -> int:
    """The most that counted work may have between two instants."""
    return min(one.counted, max(0, min(one.ended, ended) - max(one.began, began)))
