"""Computes Retry-After: spaces the retries of rejected requests so that they do not return in one burst."""

from dataclasses import replace

from controlplane.core.clock import Duration, Instant, after, between, scaled, seconds
from controlplane.core.decision import Reject
from controlplane.core.request import Owner

# Retried requests compete with new arrivals, and drains take longer than predicted.
_SAFETY_FACTOR = 3.0
_MAX_EXTRA_DELAY = seconds(2)


class RetrySpacer:
    """Spaces Retry-After so that a rejected burst does not return as the same burst.

    Each rejected request gets a slot of its own: not before the predicted drain, and not while a request
    rejected earlier would still be in service. A slot is as long as the request's predicted service time.
    """

    def __init__(self) -> None:
        self._next_slot: dict[Owner, Instant] = {}

    def space(self, reject: Reject, owner: Owner, service_time: Duration | None, now: Instant) -> Reject:
        """Returns `reject` with `retry_after` moved to the next free slot of `owner`.

        Unchanged if the drain or the service time is not predicted yet.
        """
        if reject.retry_after is None or service_time is None:
            return reject
        extra = min(_MAX_EXTRA_DELAY, scaled(reject.retry_after, _SAFETY_FACTOR - 1))
        slot = after(now, Duration(reject.retry_after + extra))
        slot = max(slot, self._next_slot.get(owner, slot))
        self._next_slot[owner] = after(slot, scaled(service_time, _SAFETY_FACTOR))
        return replace(reject, retry_after=between(now, slot))
