"""Computes Retry-After: spaces the retries of rejected requests so that they do not return in one burst."""

from bisect import bisect_right
from dataclasses import replace

from controlplane.core.clock import Duration, Instant, after, between, scaled, seconds
from controlplane.core.decision import Reject
from controlplane.core.request import Owner
from controlplane.policy.gate.admission import LONGEST_RETRY

# Retried requests compete with new arrivals, and drains take longer than predicted.
_SAFETY_FACTOR = 3.0
_MAX_EXTRA_DELAY = seconds(2)

_Slot = tuple[Instant, Instant]


class RetrySpacer:
    """Spaces Retry-After so that a rejected burst does not return as the same burst.

    Each rejected request gets a slot of its own: not before the predicted drain, and not while a request
    rejected earlier would still be in service. A slot is as long as the request's predicted service time.
    A request whose slot would begin later than `LONGEST_RETRY` from now gets that time and no slot.
    """

    def __init__(self) -> None:
        self._taken: dict[Owner, list[_Slot]] = {}

    def space(self, reject: Reject, owner: Owner, service_time: Duration | None, now: Instant) -> Reject:
        """Returns `reject` with `retry_after` moved to the next free slot of `owner`.

        Unchanged if the drain or the service time is not predicted yet.
        """
        if reject.retry_after is None or service_time is None:
            return reject
        extra = min(_MAX_EXTRA_DELAY, scaled(reject.retry_after, _SAFETY_FACTOR - 1))
        earliest = after(now, Duration(reject.retry_after + extra))
        length = scaled(service_time, _SAFETY_FACTOR)
        taken = self._taken.setdefault(owner, [])
        while taken and taken[0][1] <= now:
            taken.pop(0)
        start = _take_first_gap(taken, earliest, length, after(now, LONGEST_RETRY))
        return replace(reject, retry_after=between(now, start))


def _take_first_gap(taken: list[_Slot], earliest: Instant, length: Duration, latest: Instant) -> Instant:
    """Takes the first gap of `length` from `earliest` on and returns its begin; `latest` if it begins later.

    `taken` ascends; its slots neither overlap nor touch, so under overload there are few of them.
    """
    start, at = earliest, bisect_right(taken, earliest, key=lambda slot: slot[1])
    while at < len(taken) and between(start, taken[at][0]) < length:
        start = taken[at][1]
        at += 1
    if start > latest:
        return latest
    begin, end, first, last = start, after(start, length), at, at
    if at and taken[at - 1][1] == begin:
        begin, first = taken[at - 1][0], at - 1
    if at < len(taken) and taken[at][0] == end:
        end, last = taken[at][1], at + 1
    taken[first:last] = [(begin, end)]
    return start
