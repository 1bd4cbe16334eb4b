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
_LONGEST_LATE = seconds(60)
_MEMORY_PASSES = 32

by_key = attrgetter("key")


def key_of(deadline: Instant | None, arrival: int) -> Key:
    return (deadline is None, deadline or 0, arrival)


class Pending(Protocol):
    """`tokens` are those in no pass yet."""

    key: Key
    tokens: int


Entry = TypeVar("Entry", bound=Pending)


def in_time_first(calls: Sequence[Entry], now: Instant, per_token: float) -> Iterator[Entry]:
    """`calls` are sorted by key; `per_token` in nanoseconds, 0 if nothing is known."""
    long_late, unpromised = (
        bisect_left(calls, key_of(deadline, 0), key=by_key) for deadline in (_long_before(now), None)
    )
    promised = calls[long_late:unpromised]
    first = sum(call.tokens for call in calls[:long_late])
    named = {str(call.key[2]): call for call in promised}
    turns = [DeadlineJob(Instant(one.key[1]), one.key[2], name, one.tokens) for name, one in named.items()]
    behind = late_jobs(turns, now + per_token * first, per_token)
    return chain(
        calls[:long_late],
        (call for name, call in named.items() if name not in behind),
        (call for name, call in named.items() if name in behind),
        calls[unpromised:],
    )


def _long_before(now: Instant) -> Instant:
    return Instant(now - _LONGEST_LATE)


@dataclass(slots=True)
class Drain:
    """How fast is work done lately? From the end of one pass to the end of the next while there is work, so
    that what runs side by side, and what the device does besides, is counted."""

    _took: float = 0.0
    _tokens: float = 0.0
    _since: Instant | None = None

    @property
    def per_token(self) -> float:
        """Nanoseconds; 0 before the first pass ends."""
        return self._took / self._tokens if self._tokens else 0.0

    def begins(self, now: Instant) -> None:
        """A pass does. Time counts from the first one after a rest."""
        if self._since is None:
            self._since = now

    def ends(self, now: Instant, tokens: int) -> None:
        """A pass of so many tokens did."""
        if self._since is not None:
            kept = 1 - 1 / _MEMORY_PASSES
            self._took = kept * self._took + between(self._since, now)
            self._tokens = kept * self._tokens + tokens
            self._since = now

    def rests(self) -> None:
        """Nobody waits, or nobody is there to work."""
        self._since = None
