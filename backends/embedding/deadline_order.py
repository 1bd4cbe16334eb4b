"""Orders embedding calls so that as many as possible meet their deadline (Moore-Hodgson).

Calls are ordered by (deadline, arrival). Calls that must be late at the current service rate move behind
those that can be on time; calls without a deadline come last. The order is recomputed before every pass, so a
deferred call may become feasible again. A call that is late by a minute comes first, which prevents
starvation.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import NamedTuple, Protocol, TypeVar

from controlplane.core.clock import Duration, Instant, between, seconds
from controlplane.policy.gate.moore_hodgson import DeadlineJob, late_jobs

_MAX_TARDINESS = seconds(60)
_RATE_MEMORY_PASSES = 32

by_key = attrgetter("key")


class DeadlineKey(NamedTuple):
    """Sort key of a call: by deadline, then arrival number; calls without a deadline (0 here) last."""

    has_no_deadline: bool
    deadline: Instant
    arrival: int


def deadline_key(deadline: Instant | None, arrival: int) -> DeadlineKey:
    """The key of a call with this deadline, or with none."""
    return DeadlineKey(deadline is None, deadline or Instant(0), arrival)


def time_left(key: DeadlineKey, now: Instant) -> Duration | None:
    """Time to the deadline of a call with this key, negative if it has passed; None without a deadline."""
    return None if key.has_no_deadline else between(now, key.deadline)


class Pending(Protocol):
    """A call with `tokens` that are not part of any pass yet."""

    key: DeadlineKey
    tokens: int


Entry = TypeVar("Entry", bound=Pending)


def on_time_first(calls: Sequence[Entry], now: Instant, ns_per_token: float) -> Iterator[Entry]:
    """Yields `calls` in the order in which to compute them.

    Args:
        calls: sorted by `key`.
        now: current time.
        ns_per_token: service time of a token in nanoseconds; 0 if unknown, then nothing is deferred except
            calls already late.
    """
    tardy_end, deadline_end = (
        bisect_left(calls, deadline_key(deadline, 0), key=by_key) for deadline in (_tardy_cutoff(now), None)
    )
    with_deadline = calls[tardy_end:deadline_end]
    tokens_before = sum(call.tokens for call in calls[:tardy_end])
    by_name = {str(call.key.arrival): call for call in with_deadline}
    jobs = [
        DeadlineJob(call.key.deadline, call.key.arrival, name, call.tokens) for name, call in by_name.items()
    ]
    late = late_jobs(jobs, now + ns_per_token * tokens_before, ns_per_token)
    return chain(
        calls[:tardy_end],
        (call for name, call in by_name.items() if name not in late),
        (call for name, call in by_name.items() if name in late),
        calls[deadline_end:],
    )


def _tardy_cutoff(now: Instant) -> Instant:
    return Instant(now - _MAX_TARDINESS)


@dataclass(slots=True)
class ServiceRate:
    """Recent service time per token, measured while a pass is in flight.

    Lanes that run concurrently and other work on the device are included. The time between two passes is not:
    calls with time to spare wait then for the generations, and urgent ones would not. Older passes decay
    exponentially, with a memory of 32 passes.
    """

    _busy_ns: float = 0.0
    _tokens: float = 0.0
    _last_end: Instant | None = None

    @property
    def ns_per_token(self) -> float:
        """Nanoseconds per token; 0 before the first pass ends."""
        return self._busy_ns / self._tokens if self._tokens else 0.0

    def pass_started(self, now: Instant) -> None:
        """Starts the measurement if no pass was in flight."""
        if self._last_end is None:
            self._last_end = now

    def pass_finished(self, now: Instant, tokens: int) -> None:
        """Records the end of a pass of `tokens` tokens."""
        if self._last_end is not None:
            decay = 1 - 1 / _RATE_MEMORY_PASSES
            self._busy_ns = decay * self._busy_ns + between(self._last_end, now)
            self._tokens = decay * self._tokens + tokens
            self._last_end = now

    def idle(self) -> None:
        """Stops the measurement: no pass is in flight."""
        self._last_end = None
