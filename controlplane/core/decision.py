"""What was decided, and how did it end? Four losses, four words.

Reject: not done, because the pool cannot, or because its engine cannot do what it asks. Evict: accepted,
then dropped by us. Preempt: loses blocks, will resume. Abort: the client left. Fail is a fault of ours.
"""

from dataclasses import dataclass
from enum import StrEnum

from controlplane.core.clock import NO_TIME, Duration, Instant
from controlplane.core.memory import Footprint


class Outcome(StrEnum):
    MET = "met"
    LATE = "late"
    REJECTED = "rejected"
    EVICTED = "evicted"
    ABORTED = "aborted"
    FAILED = "failed"


class Reason(StrEnum):
    """Why a request was deferred or rejected; a metric label, so the set is closed."""

    NO_MEMORY = "no_memory"
    NO_SLOT = "no_slot"
    NO_PACE = "no_pace"
    BEHIND_OTHERS = "behind_others"
    NEVER_FITS = "never_fits"
    SLO_UNATTAINABLE = "slo_unattainable"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    RATE_LIMITED = "rate_limited"
    SHUTTING_DOWN = "shutting_down"


@dataclass(frozen=True, slots=True)
class Victim:
    """`goodput_lost` in seconds of work that must be done again, weighted by urgency."""

    request_id: str
    freed_bytes: int
    goodput_lost: float


@dataclass(frozen=True, slots=True)
class Admit:
    """`wait` is what it is predicted to wait still, inside the engine."""

    footprint: Footprint
    victims: tuple[Victim, ...] = ()
    wait: Duration = NO_TIME


@dataclass(frozen=True, slots=True)
class Defer:
    """Wait for a release or a quota change, and be decided at `until` at the latest (None: it was
    accepted before, so it waits as long as it takes)."""

    until: Instant | None
    reason: Reason


@dataclass(frozen=True, slots=True)
class Reject:
    """`retry_after` is the predicted drain; `None` when trying again cannot help."""

    reason: Reason
    retry_after: Duration | None
    detail: str = ""


AdmissionDecision = Admit | Defer | Reject


@dataclass(frozen=True, slots=True)
class Plan:
    """What one cycle decided, each part in the order decided. Ids are those of the waiting requests; a
    rejection may be of one that was let in before, and frees what it held for the dispatches."""

    dispatches: tuple[tuple[str, Admit], ...] = ()
    deferrals: tuple[tuple[str, Defer], ...] = ()
    rejections: tuple[tuple[str, Reject], ...] = ()
