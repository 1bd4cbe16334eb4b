"""Computes Retry-After: spaces the retries of rejected requests so that they do not return in one burst."""

from collections.abc import Iterable
from dataclasses import replace

from controlplane.core.clock import Duration, Instant, after, between, scaled, seconds
from controlplane.core.decision import Reject
from controlplane.core.request import Owner

# Retried requests compete with new arrivals, and drains take longer than predicted.
_SAFETY_FACTOR = 3.0
_MAX_EXTRA_DELAY = seconds(2)

_Slot = tuple[Instant, Instant]


class RetrySpacer:
    """Spaces Retry-After so that a rejected burst does not return as the same burst.

    Each rejected request gets a slot of its own: not before the predicted drain, and not while a request
    rejected earlier would still be in service. A slot is as long as the request's predicted service time.
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
        taken = [slot for slot in self._taken.get(owner, ()) if slot[1] > now]
        start = _first_gap(taken, earliest, length)
        self._taken[owner] = _merged([*taken, (start, after(start, length))])
        return replace(reject, retry_after=between(now, start))


def _first_gap(taken: Iterable[_Slot], earliest: Instant, length: Duration) -> Instant:
    """Begin of the first gap of `length` from `earliest` on; `taken` ascends without overlaps."""
    at = earliest
    for start, end in taken:
        if between(at, start) >= length:
            break
        at = max(at, end)
    return at


def _merged(slots: list[_Slot]) -> list[_Slot]:
    """The slots in ascending order, those that touch as one."""
    merged: list[_Slot] = []
    for slot in sorted(slots):
        if merged and slot[0] <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(slot[1], merged[-1][1]))
        else:
            merged.append(slot)
    return merged
