"""Decisions of the gate and outcomes of requests.

Reject: never accepted, because the pool cannot serve the request. Evict: accepted, then dropped by Tandem.
Preempt: loses its blocks and will resume. Abort: the client disconnected, or sent parameters that the engine
does not serve. Fail: an error in Tandem or an engine.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from controlplane.core.clock import NO_TIME, Duration, Instant
from controlplane.core.memory_ledger import Footprint


class Outcome(StrEnum):
    """Final state of a request; a metric label, so the set is closed."""

    MET = "met"
    LATE = "late"
    REJECTED = "rejected"
    EVICTED = "evicted"
    ABORTED = "aborted"
    FAILED = "failed"


class Reason(StrEnum):
    """Cause of a deferral or rejection; a metric label, so the set is closed."""

    NO_MEMORY = "no_memory"
    NO_SLOT = "no_slot"
    TPOT_GUARD = "tpot_guard"
    BEHIND_OTHERS = "behind_others"
    NEVER_FITS = "never_fits"
    SLO_UNATTAINABLE = "slo_unattainable"
    DEVICE_TIME = "device_time"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    RATE_LIMITED = "rate_limited"
    ENGINE_DOWN = "engine_down"
    SHUTTING_DOWN = "shutting_down"


@dataclass(frozen=True, slots=True)
class Victim:
    """A request to preempt, and the memory that this frees."""

    request_id: str
    freed_bytes: int


@dataclass(frozen=True, slots=True)
class Admit:
    """Start now, after preempting `victims`; `wait` is the predicted wait inside the engine.

    With `is_explored` the request is admitted instead of rejected, to learn whether it would be late.
    """

    footprint: Footprint
    victims: tuple[Victim, ...] = ()
    wait: Duration = NO_TIME
    is_explored: bool = False


@dataclass(frozen=True, slots=True)
class Defer:
    """Wait for a release or a quota change.

    The request is decided at `until` at the latest; None if it was accepted before and waits without a bound.
    `wait` is the predicted wait, if the policy predicted one.
    """

    until: Instant | None
    reason: Reason
    wait: Duration | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Reject:
    """Not accepted. `retry_after` is the predicted drain; None if a retry cannot help.

    `wait` is the predicted wait behind the decision, if the policy predicted one.
    """

    reason: Reason
    retry_after: Duration | None
    detail: str = ""
    wait: Duration | None = field(default=None, compare=False)


AdmissionDecision = Admit | Defer | Reject


@dataclass(frozen=True, slots=True)
class Plan:
    """Decisions of one cycle, each part in the order decided, by request id.

    A rejection may be of a call in flight; it frees what the call held for the dispatches.
    """

    dispatches: tuple[tuple[str, Admit], ...] = ()
    deferrals: tuple[tuple[str, Defer], ...] = ()
    rejections: tuple[tuple[str, Reject], ...] = ()
