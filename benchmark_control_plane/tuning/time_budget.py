"""The time of a command: how much of it is left, and how much further replays take.

Replays of an earlier run count as if they ran now, so a command that goes on ends as if it had never been
interrupted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapreplace
from math import ceil
from time import monotonic

# Another configuration may let more requests through than the mean of those so far.
_SAFETY = 1.2


class TimeIsOver(Exception):
    """A replay would end after the command's time."""


@dataclass(slots=True)
class TimeBudget:
    """Measures replays and predicts further ones.

    Attributes:
        seconds: time of the whole command.
        processes: replays at a time.
        now: a clock in seconds.
        begun: what it showed when the command began.
        cuts: what is left out or reduced because the time does not suffice, one line each.
    """

    seconds: float
    processes: int
    now: Callable[[], float] = monotonic
    begun: float = field(default_factory=monotonic)
    cuts: list[str] = field(default_factory=list)
    _earlier: float = 0.0
    _replays: int = 0
    _replay_seconds: float = 0.0

    @property
    def used(self) -> float:
        """Seconds since the beginning, those of earlier runs included."""
        return self.now() - self.begun + self._earlier

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return self.seconds - self.used

    def measured(self, seconds: float) -> None:
        """Learns from a replay that has just ended."""
        self._replays += 1
        self._replay_seconds += seconds

    def taken_over(self, seconds: Sequence[float]) -> None:
        """Counts replays of an earlier run, as long as they take on all processes."""
        for each in seconds:
            self.measured(each)
        busy = [0.0] * self.processes
        for each in seconds:
            heapreplace(busy, busy[0] + each)
        self._earlier += max(busy)

    def cost(self, replays: int) -> float:
        """Seconds that so many replays take, by the mean of all so far; 0 before the first."""
        return ceil(replays / self.processes) * self._one

    def affordable(self, seconds: float, most: int) -> int:
        """How many replays end within so many seconds, at most `most`."""
        if not self._one:
            return most
        return max(0, min(most, self.processes * int(seconds / self._one)))

    def fits(self, replays: int, *, reserved: float = 0.0) -> bool:
        """Whether so many replays leave `reserved` seconds."""
        return self.cost(replays) <= self.left - reserved

    @property
    def _one(self) -> float:
        return _SAFETY * self._replay_seconds / self._replays if self._replays else 0.0
