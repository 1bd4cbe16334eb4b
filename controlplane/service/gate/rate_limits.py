"""Token-bucket rate limits of tenants, and the spacing of Retry-After."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from controlplane.core.clock import Duration, Instant, after, between, scaled, seconds, to_seconds
from controlplane.core.decision import Reject
from controlplane.core.request import Owner

_MINUTE = 60.0


@dataclass(slots=True)
class TokenBucket:
    """A bucket of at most `per_minute` units, full at the start and refilled continuously.

    The level may become negative: output tokens are charged when a request ends. The debt delays later
    requests.
    """

    per_minute: float
    level: float
    since: Instant | None = None

    def wait(self, now: Instant, units: float) -> Duration | None:
        """None if `units` may be taken, else the time until then; more than the capacity counts as that."""
        self._refill(now)
        missing = min(units, self.per_minute) - self.level
        return seconds(missing / self.per_minute * _MINUTE) if missing > 0 else None

    def charge(self, now: Instant, units: float) -> None:
        """Takes `units`, whatever the level."""
        self._refill(now)
        self.level -= units

    def _refill(self, now: Instant) -> None:
        if self.since is not None:
            gained = to_seconds(between(self.since, now)) / _MINUTE * self.per_minute
            self.level = min(self.per_minute, self.level + gained)
        self.since = now


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """The rate limits of one tenant; None for no limit."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None


class RateLimiter:
    """Limits the requests and tokens per minute of each tenant; a tenant without limits is not tracked."""

    def __init__(self, limits: Mapping[str, TenantLimits]) -> None:
        self._requests = {
            name: TokenBucket(rate, rate) for name, of in limits.items() if (rate := of.requests_per_minute)
        }
        self._tokens = {
            name: TokenBucket(rate, rate) for name, of in limits.items() if (rate := of.tokens_per_minute)
        }

    def wait(self, tenant: str, now: Instant, tokens: int) -> Duration | None:
        """None if the request may proceed, and then charges it; else the time until it may.

        `tokens` are those of the prompt.
        """
        limits = ((self._tokens.get(tenant), tokens), (self._requests.get(tenant), 1))
        buckets = [(bucket, units) for bucket, units in limits if bucket is not None]
        waits = [wait for bucket, units in buckets if (wait := bucket.wait(now, units)) is not None]
        if waits:
            return max(waits)
        for bucket, units in buckets:
            bucket.charge(now, units)
        return None

    def charge(self, tenant: str, now: Instant, tokens: int) -> None:
        """Charges output tokens when a request ends."""
        if (bucket := self._tokens.get(tenant)) is not None:
            bucket.charge(now, tokens)


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
