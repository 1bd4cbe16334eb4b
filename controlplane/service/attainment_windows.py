"""Counts, per service class, the requests that met every objective, in all and in windows of up to an hour.

A request that was rejected, evicted or failed is a miss; one whose client left does not count. The burn rate
is the share of misses divided by the share that `TARGET` allows: 1 uses the allowance up exactly, 10 ten
times as fast (Beyer et al., The Site Reliability Workbook, chapter 5).
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from operator import itemgetter
from typing import NamedTuple

from controlplane.core.clock import Duration, Instant, between, seconds
from controlplane.core.decision import Outcome

TARGET = 0.9
"""Share of requests that is to meet its objectives, as in `max_goodput_rate`."""
WINDOWS: Mapping[str, Duration] = {"5m": seconds(300), "1h": seconds(3_600)}
LONGEST = max(WINDOWS.values())
"""The counts reach back so far."""
_STEP = seconds(5)


class Attained(NamedTuple):
    """Requests of one class that ended, and those of them that met every objective."""

    met: int = 0
    ended: int = 0

    @property
    def share(self) -> float | None:
        """The attainment; None without requests."""
        return self.met / self.ended if self.ended else None

    def to_json(self) -> dict[str, float | None]:
        """The counts and the burn rate; None without requests."""
        burn = None if self.share is None else round((1 - self.share) / (1 - TARGET), 3)
        return {"met": self.met, "ended": self.ended, "burn": burn}


Counts = Mapping[str, Attained]
"""Counts by class."""


class AttainmentWindows:
    """The counts since the start, and what they were in steps of five seconds of the last hour."""

    def __init__(self) -> None:
        self._counts: dict[str, Attained] = {}
        self._samples: deque[tuple[Instant, Counts]] = deque(maxlen=LONGEST // _STEP + 1)

    def count(self, class_name: str, outcome: Outcome, now: Instant) -> None:
        """Counts one ended request."""
        if outcome is Outcome.ABORTED:
            return
        if not self._samples or between(self._samples[-1][0], now) >= _STEP:
            self._samples.append((now, self.now()))
        met, ended = self._counts.get(class_name, Attained())
        self._counts[class_name] = Attained(met + (outcome is Outcome.MET), ended + 1)

    def now(self) -> Counts:
        """The present counts."""
        return dict(self._counts)

    def at(self, time: Instant) -> Counts:
        """The counts at `time`, or up to five seconds before; at the earliest sample if that is later.

        All requests between two samples ended within five seconds after the first one.
        """
        first = bisect_right(self._samples, time - _STEP, key=itemgetter(0))
        return self._samples[first][1] if first < len(self._samples) else self.now()

    def within(self, window: Duration, now: Instant) -> dict[str, Attained]:
        """The counts of the window that ends now, which may be five seconds longer."""
        return difference(self._counts, self.at(Instant(now - window)))


def difference(later: Counts, earlier: Counts) -> dict[str, Attained]:
    """The requests that ended after `earlier` was counted."""
    none = Attained()
    return {
        name: Attained(met - earlier.get(name, none).met, ended - earlier.get(name, none).ended)
        for name, (met, ended) in later.items()
    }
