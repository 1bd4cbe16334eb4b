"""Compares the device's memory with the ledger and withholds the excess from the pool.

The baseline is what our processes held once the backends had started: weights, contexts, preallocated memory.
On top of it they may hold what the ledger grants. An excess beyond `bound` is a disagreement: as far as the
free bytes would not cover all that is granted and the bound, it is withheld from the pool at once, and
released in small steps, so that the safety margin stays free. So memory that a process keeps on a device with
room for it costs no quota. Memory that another process takes of the last free bytes is withheld likewise. A
failed reading changes nothing.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from controlplane.core.device import DeviceProbe, DeviceReading
from controlplane.metric_series import Readings
from controlplane.metrics import Metrics
from controlplane.service.runtime.health_tracker import HealthTracker
from controlplane.service.runtime.timers import LoopTimer

log = logging.getLogger(__name__)

_RELEASE_SHARE = 1 / 16
_HEALTH_MESSAGES = ("reading the device's memory failed", "the device's memory is read again")


@dataclass(eq=False, slots=True)
class MemoryMonitor:
    """Samples the device's memory at a fixed period, by the loop's own timer since the period may be 10 ms.

    Attributes:
        probe: reads the device.
        granted: bytes that our processes may hold on top of the baseline.
        withhold: called with the withheld bytes whenever they change.
        bound: tolerated disagreement and least free memory, in bytes.
        allocated: bytes that the embedding workers' allocators have reserved.
    """

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
    """How many disagreements began."""
    health: HealthTracker = field(init=False, default_factory=lambda: HealthTracker(*_HEALTH_MESSAGES))
    _baseline: int | None = field(init=False, default=None)
    _timer: LoopTimer = field(init=False, default_factory=LoopTimer)

    def start(self, every: float) -> None:
        """Takes the baseline now and samples every `every` seconds."""
        self.sample()
        self._timer.schedule_periodic(every, self._sample_or_fail)

    def stop(self) -> None:
        """Stops sampling and closes the probe."""
        self._timer.stop()
        self.probe.close()

    def sample(self) -> None:
        """Reads the device once and adjusts the withheld bytes; the first reading is the baseline."""
        reading = self.last = self.probe.read()
        if self._baseline is None:
            self._baseline = reading.own_bytes
            if not reading.own_bytes:
                log.warning("the device lists none of our processes; only its free bytes are monitored")
        self.most_ours = max(self.most_ours, reading.own_bytes)
        self.least_free = reading.free if self.least_free is None else min(self.least_free, reading.free)
        was_over = self.disagreement > self.bound
        granted = self.granted()
        self.disagreement = max(0, reading.own_bytes - self._baseline - granted)
        self.alerts += self.disagreement > self.bound and not was_over
        missing = granted + self.bound - reading.free
        excess = min(self.disagreement - self.bound, missing)
        self._set_withheld(max(0, excess, self.bound - reading.free))

    def to_json(self) -> dict[str, float]:
        """The last reading and the extremes in bytes, and the numbers of alerts and failures."""
        return self._bytes() | {"alerts": self.alerts, "failures": self.health.failures.total()}

    def readings(self, metrics: Metrics) -> Readings:
        """The values of `to_json` for Prometheus."""
        return {
            metrics.device_bytes: self._bytes(),
            metrics.device_alerts: self.alerts,
            metrics.device_failures: self.health.failures.total(),
        }

    def _bytes(self) -> dict[str, float]:
        reading: dict[str, float] = {}
        if (last := self.last) is not None:
            reading = {
                "total": last.total,
                "free": last.free,
                "ours": last.own_bytes,
                "others": last.other_bytes,
            }
        return reading | {
            "least_free": self.least_free or 0,
            "most_ours": self.most_ours,
            "disagreement": self.disagreement,
            "withheld": self.withheld,
            "allocator": self.allocated(),
        }

    def _set_withheld(self, needed: int) -> None:
        withheld = needed
        if needed < self.withheld:
            withheld = max(needed, int(self.withheld * (1 - _RELEASE_SHARE)))
        if withheld != self.withheld:
            self.withhold(withheld)
            self.withheld = withheld

    def _sample_or_fail(self) -> None:
        try:
            self.sample()
        except Exception as error:
            self.health.failed(error)
        else:
            self.health.succeeded()
