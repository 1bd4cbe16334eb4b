"""Has this tenant used up its minute? One bucket a limit, refilled continuously.

Output tokens are known only at the end, so a tenant may run into debt; the debt delays what comes next.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from controlplane.core.clock import Duration, Instant, after, between, scaled, seconds, to_seconds
from controlplane.core.decision import Reject
from controlplane.core.request import Owner

_MINUTE = 60.0


@dataclass(slots=True)
class TokenBucket:
    """Holds at most `per_minute` units and starts full."""

    per_minute: float
    level: float
    since: Instant | None = None

    def wait(self, now: Instant, units: float) -> Duration | None:
        """None if so many units may be taken; else when to come back."""
        self._refill(now)
        missing = min(units, self.per_minute) - self.level
        return seconds(missing / self.per_minute * _MINUTE) if missing > 0 else None

    def charge(self, now: Instant, units: float) -> None:
        self._refill(now)
        self.level -= units

    def _refill(self, now: Instant) -> None:
        if self.since is not None:
            gained = to_seconds(between(self.since, now)) / _MINUTE * self.per_minute
            self.level = min(self.per_minute, self.level + gained)
        self.since = now


@dataclass(frozen=True, slots=True)
class TenantLimits:
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None


class RateLimiter:
    """Tenants without limits are not tracked."""

    def __init__(self, limits: Mapping[str, TenantLimits]) -> None:
        self._requests = {
            name: TokenBucket(rate, rate) for name, of in limits.items() if (rate := of.requests_per_minute)
        }
        self._tokens = {
            name: TokenBucket(rate, rate) for name, of in limits.items() if (rate := of.tokens_per_minute)
        }

    def wait(self, tenant: str, now: Instant, tokens: int) -> Duration | None:
        """None if the request may go on; else when to come back, and nothing is taken of either limit."""
        limits = ((self._tokens.get(tenant), tokens), (self._requests.get(tenant), 1))
        asked = [(bucket, units) for bucket, units in limits if bucket is not None]
        waits = [wait for bucket, units in asked if (wait := bucket.wait(now, units)) is not None]
        if waits:
            return max(waits)
        for bucket, units in asked:
            bucket.charge(now, units)
        return None

    def charge(self, tenant: str, now: Instant, tokens: int) -> None:
        if (bucket := self._tokens.get(tenant)) is not None:
            bucket.charge(now, tokens)


# FOLDED returns.py:
# When may each of those turned away come back, so that they do not all come at once?
#
# Rule: nobody is told a time before the predicted drain, nor one at which somebody told earlier would still
# be served: each takes as long as its part of the whole share does. Without this a burst turned away would
# come back as the same burst.

# Those who come back find newcomers, and a drain that took longer than was thought.
_SAFETY_FACTOR = 3.0
_MAX_EXTRA_DELAY = seconds(2)


class RetrySpacer:
    def __init__(self) -> None:
        self._next_slot: dict[Owner, Instant] = {}

    def space(self, reject: Reject, owner: Owner, work: Duration | None, now: Instant) -> Reject:
        """For a request that the owner would be busy with for so long, if that is known."""
        if reject.retry_after is None or work is None:
            return reject
        late = min(_MAX_EXTRA_DELAY, scaled(reject.retry_after, _SAFETY_FACTOR - 1))
        at = after(now, Duration(reject.retry_after + late))
        at = max(at, self._next_slot.get(owner, at))
        self._next_slot[owner] = after(at, scaled(work, _SAFETY_FACTOR))
        return replace(reject, retry_after=between(now, at))
