"""Token-bucket rate limits of tenants: requests and tokens per minute."""

from collections.abc import Mapping
from dataclasses import dataclass

from controlplane.core.clock import Duration, Instant, between, seconds, to_seconds

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
        """Time until `units`, at most the capacity, may be taken; None if they may be taken now."""
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
        self._requests: dict[str, TokenBucket] = {}
        self._tokens: dict[str, TokenBucket] = {}
        self.set_limits(limits)

    def set_limits(self, limits: Mapping[str, TenantLimits]) -> None:
        """Replaces the limits; a bucket keeps its level and its debt, up to its new capacity."""
        requests = {name: of.requests_per_minute for name, of in limits.items()}
        tokens = {name: of.tokens_per_minute for name, of in limits.items()}
        self._requests, self._tokens = _resized(self._requests, requests), _resized(self._tokens, tokens)

    def try_charge(self, tenant: str, now: Instant, tokens: int) -> Duration | None:
        """Charges one request and the `tokens` of its prompt, and returns None.

        If the limits do not allow it now, charges nothing and returns the time until they do.
        """
        limits = ((self._tokens.get(tenant), tokens), (self._requests.get(tenant), 1))
        buckets = [(bucket, units) for bucket, units in limits if bucket is not None]
        waits = [wait for bucket, units in buckets if (wait := bucket.wait(now, units)) is not None]
        if waits:
            return max(waits)
        for bucket, units in buckets:
            bucket.charge(now, units)
        return None

    def correct(self, tenant: str, now: Instant, charged: int, tokens: int) -> Duration | None:
        """Replaces the tokens that `try_charge` has charged by those that the prompt has, and returns None.

        If the limits do not allow that now, changes nothing and returns the time until they do.
        """
        bucket = self._tokens.get(tenant)
        if bucket is None:
            return None
        bucket.charge(now, -charged)
        wait = bucket.wait(now, tokens)
        bucket.charge(now, tokens if wait is None else charged)
        return wait

    def charge_output(self, tenant: str, now: Instant, tokens: int) -> None:
        """Charges the output tokens of a request that has ended, whatever the level."""
        if (bucket := self._tokens.get(tenant)) is not None:
            bucket.charge(now, tokens)


def _resized(buckets: Mapping[str, TokenBucket], rates: Mapping[str, float | None]) -> dict[str, TokenBucket]:
    found: dict[str, TokenBucket] = {}
    for name, rate in rates.items():
        if rate:
            former = buckets.get(name, TokenBucket(rate, rate))
            found[name] = TokenBucket(rate, min(rate, former.level), former.since)
    return found
