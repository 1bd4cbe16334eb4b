"""Tracks failures of periodic tasks: logs the first failure and the recovery, and counts every failure."""

import logging
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from controlplane.core.device import LimitConflict
from controlplane.core.errors import BackendDown, BackendFailed, Refused

log = logging.getLogger(__name__)


class Fault(StrEnum):
    """The kind of a failure. `defect` is any exception that the code does not expect."""

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
    """Tracks whether the last run of repeated work succeeded.

    `failing_message` and `recovered_message` begin the log lines of the first failure and of the recovery.
    """

    failing_message: str
    recovered_message: str
    fault: Fault | None = field(init=False, default=None)
    """Fault of the last run; None if it succeeded."""
    failures: Counter[Fault] = field(init=False, default_factory=Counter)
    _message: str | None = field(init=False, default=None)
    _consecutive: int = field(init=False, default=0)

    def failed(self, error: Exception) -> None:
        """Counts a failed run, and logs it if the run before succeeded; a defect with its traceback."""
        is_first = self.fault is None
        self.fault = next((f for kind, f in _FAULTS.items() if isinstance(error, kind)), Fault.DEFECT)
        self.failures[self.fault] += 1
        self._consecutive += 1
        self._message = str(error) or repr(error)
        if is_first:
            traceback = error if self.fault is Fault.DEFECT else None
            log.error("%s: %s; retrying", self.failing_message, self._message, exc_info=traceback)

    def succeeded(self) -> None:
        """Ends a series of failures, and logs its length."""
        if self.fault is not None:
            log.info("%s after %d failures", self.recovered_message, self._consecutive)
            self.fault, self._message, self._consecutive = None, None, 0

    def text(self) -> str | None:
        """What fails and why; None if the last run succeeded."""
        return None if self.fault is None else f"{self.failing_message}: {self._message}"

    def to_json(self) -> dict[str, object]:
        """The present fault and its message, and the failures so far by fault."""
        counts = {fault.value: count for fault, count in self.failures.items()}
        return {"fault": self.fault, "message": self._message, "failures": counts}
