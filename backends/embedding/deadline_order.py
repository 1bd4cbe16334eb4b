"""Whose inputs are computed first? As many calls in time as there can be.

Rule: calls stand in order (deadline; arrival), but who gives way at the rate of late stands behind those that
stay, and last who has no deadline. It is asked anew for each pass, so who gave way comes back when there is
time. Who is late by a minute goes first of all, so that nobody waits for ever.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Protocol, TypeVar

from controlplane.core.clock import Instant, between, seconds
from controlplane.policy.gate.moore_hodgson import DeadlineJob, late_jobs

Key = tuple[bool, int, int]
_MAX_TARDINESS = seconds(60)
_RATE_MEMORY_PASSES = 32

by_key = attrgetter("key")


def deadline_key(deadline: Instant | None, arrival: int) -> Key:
    return (deadline is None, deadline or 0, arrival)


class Pending(Protocol):
    """`tokens` are those in no pass yet."""

    key: Key
    tokens: int


Entry = TypeVar("Entry", bound=Pending)


def on_time_first(calls: Sequence[Entry], now: Instant, ns_per_token: float) -> Iterator[Entry]:
    """`calls` are sorted by key; `ns_per_token` in nanoseconds, 0 if nothing is known."""
    tardy_end, deadline_end = (
        bisect_left(calls, deadline_key(deadline, 0), key=by_key) for deadline in (_tardy_cutoff(now), None)
    )
    with_deadline = calls[tardy_end:deadline_end]
    tokens_before = sum(call.tokens for call in calls[:tardy_end])
    by_name = {str(call.key[2]): call for call in with_deadline}
    jobs = [
        DeadlineJob(Instant(call.key[1]), call.key[2], name, call.tokens) for name, call in by_name.items()
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
    """How fast is work done lately? From the end of one pass to the end of the next while there is work, so
    that what runs side by side, and what the device does besides, is counted."""

    _busy_ns: float = 0.0
    _tokens: float = 0.0
    _last_end: Instant | None = None

    @property
    def ns_per_token(self) -> float:
        """Nanoseconds; 0 before the first pass ends."""
        return self._busy_ns / self._tokens if self._tokens else 0.0

    def pass_started(self, now: Instant) -> None:
        """A pass does. Time counts from the first one after a rest."""
        if self._last_end is None:
            self._last_end = now

    def pass_finished(self, now: Instant, tokens: int) -> None:
        """A pass of so many tokens did."""
        if self._last_end is not None:
            decay = 1 - 1 / _RATE_MEMORY_PASSES
            self._busy_ns = decay * self._busy_ns + between(self._last_end, now)
            self._tokens = decay * self._tokens + tokens
            self._last_end = now

    def idle(self) -> None:
        """Nobody waits, or nobody is there to work."""
        self._last_end = None
