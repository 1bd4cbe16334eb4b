"""Does work that is done again and again still succeed? The log tells once when it no longer does, and once
when it does again; every failure is counted, and shown while it lasts.
"""

import logging
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from controlplane.core.device import LimitConflict
from controlplane.core.errors import BackendDown, BackendFailed, Refused

log = logging.getLogger(__name__)


class Fault(StrEnum):
    """`defect` is whatever should not have been possible."""

    BACKEND_DOWN = "backend_down"
    BACKEND_FAILED = "backend_failed"
    REFUSED = "refused"
    LIMIT_CONFLICT = "limit_conflict"
    OS_ERROR = "os_error"
    DEFECT = "defect"


_FAULTS: dict[type[Exception], Fault] = {
    BackendDown: Fault.BACKEND_DOWN,
    BackendFailed: Fault.BACKEND_FAILED,
    Refused: Fault.REFUSED,
    LimitConflict: Fault.LIMIT_CONFLICT,
    OSError: Fault.OS_ERROR,
}


@dataclass(eq=False, slots=True)
class HealthTracker:
    """`failing_message` and `recovered_message` say in the log what no longer, and what again, goes on."""

    failing_message: str
    recovered_message: str
    fault: Fault | None = field(init=False, default=None)
    """Of the last run; None if it succeeded."""
    failures: Counter[Fault] = field(init=False, default_factory=Counter)
    _message: str | None = field(init=False, default=None)
    _consecutive: int = field(init=False, default=0)

    def failed(self, error: Exception) -> None:
        is_new = self.fault is None
        self.fault = next((f for kind, f in _FAULTS.items() if isinstance(error, kind)), Fault.DEFECT)
        self.failures[self.fault] += 1
        self._consecutive += 1
        self._message = str(error) or repr(error)
        if is_new:
            where = error if self.fault is Fault.DEFECT else None
            log.error("%s: %s; trying on", self.failing_message, self._message, exc_info=where)

    def succeeded(self) -> None:
        if self.fault is not None:
            log.info("%s after %d failures", self.recovered_message, self._consecutive)
            self.fault, self._message, self._consecutive = None, None, 0

    def to_json(self) -> dict[str, object]:
        counts = {fault.value: count for fault, count in self.failures.items()}
        return {"fault": self.fault, "message": self._message, "failures": counts}
