"""Splits the time of the device between the owners, for the metric of device time."""

from collections import deque
from typing import NamedTuple

from controlplane.core.clock import Duration, Instant
from controlplane.core.request import Owner

# Works of each owner that are remembered: more than the steps during the longest pass.
_KEPT = 1_000


class CountedWork(NamedTuple):
    """A step or pass from `began` to `ended` (instants), of which `counted` ns went to its owner."""

    began: int
    ended: int
    counted: int


class DeviceTime:
    """Counts for each step and pass its predicted time alone, up to what the other owner's work has left.

    Without this bound the counted times of both owners, which are predictions, could exceed the elapsed time.
    """

    def __init__(self) -> None:
        self._counted: dict[Owner, deque[CountedWork]] = {owner: deque(maxlen=_KEPT) for owner in Owner}

    def count(self, owner: Owner, ended: Instant, took: Duration, alone: Duration) -> Duration:
        """The time counted for a step or pass.

        Args:
            owner: of the work.
            ended: its end.
            took: its measured time.
            alone: its predicted time without other work on the device.
        """
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
    """Upper bound of the counted time of `one` between two instants, in ns."""
    return min(one.counted, max(0, min(one.ended, ended) - max(one.began, began)))
