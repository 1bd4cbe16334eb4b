"""Counts, per service class, the requests that met every objective within the last minutes and the last hour.

A request that was rejected, evicted or failed is a miss; one whose client left does not count. The burn rate
is the share of misses divided by the share that `TARGET` allows: 1 uses the allowance up exactly, 10 ten
times as fast (Beyer et al., The Site Reliability Workbook, chapter 5).
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from controlplane.core.clock import Duration, Instant, seconds
from controlplane.core.decision import Outcome

TARGET = 0.9
"""Share of requests that is to meet its objectives, as in `max_goodput_rate`."""
WINDOWS: Mapping[str, Duration] = {"5m": seconds(300), "1h": seconds(3_600)}
_STEP = seconds(10)


class Attained(NamedTuple):
    """Requests of one class that ended, and those of them that met every objective."""

    met: int = 0
    ended: int = 0

    def to_json(self) -> dict[str, float | None]:
        """The counts and the burn rate; None without requests."""
        burn = (1 - self.met / self.ended) / (1 - TARGET) if self.ended else None
        return {"met": self.met, "ended": self.ended, "burn": None if burn is None else round(burn, 3)}


class AttainmentWindows:
    """Running totals, of which a snapshot is kept every ten seconds; so long a window may be too long."""

    def __init__(self) -> None:
        self._totals: dict[str, Attained] = {}
        self._snapshots: deque[tuple[Instant, dict[str, Attained]]]
        self._snapshots = deque(maxlen=max(WINDOWS.values()) // _STEP + 2)

    def count(self, class_name: str, outcome: Outcome) -> None:
        """Counts one ended request."""
        if outcome is not Outcome.ABORTED:
            met, ended = self._totals.get(class_name, Attained())
            self._totals[class_name] = Attained(met + (outcome is Outcome.MET), ended + 1)

    def advance(self, now: Instant) -> None:
        """Keeps a snapshot of the totals if the last one is old enough; call it about once a second."""
        if not self._snapshots or now - self._snapshots[-1][0] >= _STEP:
            self._snapshots.append((now, dict(self._totals)))

    def within(self, window: Duration, now: Instant) -> Mapping[str, Attained]:
        """The counts of the window that ends now, by class."""
        first = bisect_right(self._snapshots, now - window, key=lambda snapshot: snapshot[0])
        # Without a snapshot that old, the window begins with the service.
        before = self._snapshots[first - 1][1] if first else {}
        found = {}
        for name, (met, ended) in self._totals.items():
            earlier = before.get(name, Attained())
            found[name] = Attained(met - earlier.met, ended - earlier.ended)
        return found
