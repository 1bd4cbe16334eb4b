"""Does the device agree with the ledger? Sampled; what it holds too much is withheld from the pool.

What our processes held when the backends had started (weights, contexts, what was allocated beforehand) is
the base. On top of it they may hold what the ledger gives them. More than that, beyond a bound, is a
disagreement: as much is withheld at once, so the margin stays whole, and let go little by little.
So is what another process takes of the last bytes that are free. A reading that fails changes nothing, and
the next one is taken all the same.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from controlplane.core.device import DeviceProbe, DeviceReading
from controlplane.metrics import Metrics, Readings
from controlplane.service.runtime.health import HealthTracker
from controlplane.service.runtime.timers import LoopTimer

log = logging.getLogger(__name__)

_RELEASE_SHARE = 1 / 16
_HEALTH_MESSAGES = ("the device's memory is not watched", "the device's memory is watched again")


@dataclass(eq=False, slots=True)
class MemoryMonitor:
    """`granted` says what may be held on top of the base; `withhold` is told of every change. `bound` is the
    disagreement, and the least free memory, that is still tolerated. `allocated` is what the embedding
    engines' allocators say that they have reserved."""

    probe: DeviceProbe
    granted: Callable[[], int]
    withhold: Callable[[int], None]
    bound: int
    allocated: Callable[[], int] = lambda: 0
    last: DeviceReading | None = field(init=False, default=None)
    least_free: int | None = field(init=False, default=None)
    most_ours: int = field(init=False, default=0)
    disagreement: int = field(init=False, default=0)
    withheld: int = field(init=False, default=0)
    alerts: int = field(init=False, default=0)
    """How often a disagreement began."""
    health: HealthTracker = field(init=False, default_factory=lambda: HealthTracker(*_HEALTH_MESSAGES))
    _base: int | None = field(init=False, default=None)
    _timer: LoopTimer = field(init=False, default_factory=LoopTimer)

    def start(self, every: float) -> None:
        """Takes the base now, and samples every so many seconds."""
        self.sample()
        self._timer.every(every, self._sample_or_fail)

    def stop(self) -> None:
        self._timer.stop()
        self.probe.close()

    def sample(self) -> None:
        found = self.last = self.probe.read()
        if self._base is None:
            self._base = found.ours
            if not found.ours:
                log.warning("the device shows none of our processes: only its free bytes are watched")
        self.most_ours = max(self.most_ours, found.ours)
        self.least_free = found.free if self.least_free is None else min(self.least_free, found.free)
        had = self.disagreement > self.bound
        self.disagreement = max(0, found.ours - self._base - self.granted())
        self.alerts += self.disagreement > self.bound and not had
        self._set_withheld(max(0, self.disagreement - self.bound, self.bound - found.free))

    def to_json(self) -> dict[str, float]:
        """For a person: bytes, and counts."""
        return self._bytes() | {"alerts": self.alerts, "failures": self.health.failures.total()}

    def readings(self, metrics: Metrics) -> Readings:
        return {
            metrics.device_bytes: self._bytes(),
            metrics.device_alerts: self.alerts,
            metrics.device_failures: self.health.failures.total(),
        }

    def _bytes(self) -> dict[str, float]:
        found = self.last
        seen = {} if found is None else found._asdict()
        return seen | {
            "least_free": self.least_free or 0,
            "most_ours": self.most_ours,
            "disagreement": self.disagreement,
            "withheld": self.withheld,
            "allocator": self.allocated(),
        }

    def _set_withheld(self, needed: int) -> None:
        kept = needed
        if needed < self.withheld:
            kept = max(needed, int(self.withheld * (1 - _RELEASE_SHARE)))
        if kept != self.withheld:
            self.withhold(kept)
            self.withheld = kept

    def _sample_or_fail(self) -> None:
        try:
            self.sample()
        except Exception as error:
            self.health.failed(error)
        else:
            self.health.succeeded()
