"""How much memory is there, who owns which part of it, and by which rule do the parts move?"""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass as section

from controlplane.config.fields import (
    STRICT,
    Bytes,
    BytesOrAuto,
    Fraction,
    Milliseconds,
    MillisecondsFromZero,
)
from controlplane.core.clock import milliseconds
from controlplane.core.request import Owner
from controlplane.policy.sharing.lending import Sharing, split
from controlplane.policy.sharing.quota import QuotaOptions, UrgencyOptions

Weight = Annotated[float, Field(ge=0, le=1_000)]

# 0.075 - 0.025 is a little less than 0.05.
_ROUNDING = 1e-9


@section(frozen=True, config=STRICT)
class PoolSection:
    """`memory` is the whole device's; what the models' weights, `activation`, `reserve` and the margin
    leave is shared out by quota. With `kv_allocator: kvcached` the KV cache is mapped on demand, so
    quotas move bytes; with `static` they only bound use. Every `monitor_ms` the device is asked whether
    it agrees with the ledger; 0 is never."""

    memory: BytesOrAuto = "auto"
    margin: Annotated[float, Field(ge=0, lt=1)] = 0.1
    activation: BytesOrAuto = "auto"
    reserve: Bytes = 0
    kv_allocator: Literal["static", "kvcached"] = "static"
    monitor_ms: Annotated[float, Field(ge=0, le=60_000)] = 100


@section(frozen=True, config=STRICT)
class ShareSection:
    """Fractions of the pool: owned when nothing is urgent, never taken away, borrowed at most, lent at
    most."""

    nominal: Fraction
    min: Fraction = 0.0
    borrow: Fraction = 0.0
    lend: Fraction = 0.0

    def __post_init__(self) -> None:
        if self.min > self.nominal:
            raise ValueError(
                f"min={self.min}: what is never taken away is part of nominal={self.nominal}; lower min"
            )
        if self.lend > self.nominal - self.min + _ROUNDING:
            raise ValueError(
                f"lend={self.lend}: of nominal={self.nominal} at most what is above min={self.min} can be "
                "lent; lower lend"
            )


@section(frozen=True, config=STRICT)
class ForecastSection:
    """Memory is kept for the embedding work, and the requests of the highest priority, that will arrive in
    the next `window_ms` with probability `quantile` at most; null reserves nothing."""

    quantile: Annotated[float, Field(gt=0, le=0.99)] | None = 0.9
    window_ms: Milliseconds = 1_000


@section(frozen=True, config=STRICT)
class QuotaSection:
    """`dynamic` moves the quotas each tick towards the kind with the more urgent requests, by at most
    `max_step` of the pool a tick; where they move to changes by more than `dead_band` of it or not at all. A
    request is urgent with less than `critical_ms` to spare. `urgency_aggregation` weighs either kind
    by the part of its requests that is urgent or was turned away (`mean`), or by their number (`sum`); an
    urgency of one kind of `nominal_weight` moves the quotas half way from their nominal place."""

    policy: Literal["static", "dynamic"] = "static"
    llm: ShareSection = ShareSection(nominal=0.9)
    embedding: ShareSection = ShareSection(nominal=0.1)
    tick_ms: Annotated[float, Field(ge=5, le=10_000)] = 50
    max_step: Annotated[float, Field(gt=0, le=1)] = 0.05
    dead_band: Fraction = 0.01
    nominal_weight: Weight = 0.3
    critical_ms: Milliseconds = 500
    critical_weight: Weight = 1.0
    violation_weight: Weight = 1.0
    lateness_cap_ms: MillisecondsFromZero = 10_000
    urgency_aggregation: Literal["sum", "mean"] = "mean"
    forecast: ForecastSection = ForecastSection()

    def require_room_for_both(self) -> None:
        """Raises ValueError. Who is served alone shares with nobody."""
        if self.llm.nominal + self.embedding.nominal > 1 + _ROUNDING:
            raise ValueError(
                f"quota: shares must sum to at most 1 and quota.llm.nominal={self.llm.nominal} + "
                f"quota.embedding.nominal={self.embedding.nominal} do not; lower one of them"
            )

    @property
    def moves(self) -> bool:
        return self.policy == "dynamic" or self.llm.borrow > 0 or self.embedding.borrow > 0

    def sharing(
        self, *, pool_bytes: int, most_llm_bytes: int, most_embedding_bytes: int, block_bytes: int
    ) -> Sharing:
        """In bytes of the pool that there really is. Neither is given more than it can use: the LLM what its
        cache can hold, the embeddings their largest batches.
        """
        reserved = max(int(self.embedding.min * pool_bytes), pool_bytes - most_llm_bytes)
        useful = max(reserved, most_embedding_bytes)
        kept = min(max(int(self.llm.min * pool_bytes), pool_bytes - useful), pool_bytes - reserved)
        # Down: a floor of more blocks than the nominal share holds could not be kept.
        least = kept // block_bytes * block_bytes
        owned = min(max(int(self.llm.nominal * pool_bytes), least), pool_bytes - reserved)
        nominal = split(pool_bytes, owned, block_bytes)
        options = QuotaOptions(
            pool=pool_bytes,
            minimum={Owner.LLM: least, Owner.EMBEDDING: reserved},
            resting=nominal[Owner.LLM],
            resting_weight=self.nominal_weight,
            rate=self.max_step / (self.tick_ms / 1_000),
            dead_band=int(self.dead_band * pool_bytes),
            block_bytes=block_bytes,
            urgency=UrgencyOptions(
                milliseconds(self.critical_ms),
                self.critical_weight,
                self.violation_weight,
                milliseconds(self.lateness_cap_ms),
                by_mean=self.urgency_aggregation == "mean",
            ),
        )
        shares = {Owner.LLM: self.llm, Owner.EMBEDDING: self.embedding}
        return Sharing(
            options,
            nominal,
            borrow={owner: int(share.borrow * pool_bytes) for owner, share in shares.items()},
            lend={owner: int(share.lend * pool_bytes) for owner, share in shares.items()},
            follows_urgency=self.policy == "dynamic",
        )
