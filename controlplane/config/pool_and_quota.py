"""Sections `pool` and `quota`: the device's memory, its shares, and how the shares change at run time."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass as section

from controlplane.config.fields import STRICT, BytesOrAuto, Fraction, Milliseconds
from controlplane.core.clock import milliseconds
from controlplane.core.request import Owner
from controlplane.policy.sharing.lending import Sharing
from controlplane.policy.sharing.quota import QuotaOptions, UrgencyOptions

Weight = Annotated[float, Field(ge=0, le=1_000)]

# In floating point 0.075 - 0.025 is less than 0.05.
_ROUNDING = 1e-9


@section(frozen=True, config=STRICT)
class PoolSection:
    """The memory pool: what weights, activation, reserve and margin leave of the device."""

    memory: BytesOrAuto = "auto"
    """Memory of the whole device; `auto` reads it from the device."""
    margin: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Fraction of the remaining memory kept free for fragmentation and prediction error."""
    activation: BytesOrAuto = "auto"
    """Peak memory of one full prefill step; `auto` computes it from the model's config.json."""
    reserve: BytesOrAuto = "auto"
    """Memory for CUDA contexts, CUDA graphs and other processes. `auto`: 0 without a GPU, else 3 GiB, at most
    an eighth of `memory`."""
    kv_allocator: Literal["static", "kvcached"] = "static"
    """`static` allocates the KV cache at the start and cannot give memory of it back, so quotas are static;
    `kvcached` maps blocks on demand, so that quotas move bytes between both (docs/memory.md)."""
    monitor_ms: Annotated[float, Field(ge=0, le=60_000)] = 100
    """Interval at which the use of the device is compared with the leases; 0 disables it."""


@section(frozen=True, config=STRICT)
class ShareSection:
    """One owner's part of the pool, as fractions of the pool."""

    nominal: Fraction
    """The quota while nothing is urgent."""
    min: Fraction | None = None
    """The part of `nominal` that is never taken away; by default what the largest request needs, and
    for embeddings a full pass as far as `nominal` holds it."""
    borrow: Fraction | None = None
    """Largest part that this owner may borrow from the other; by default all that the other lends."""
    lend: Fraction | None = None
    """Largest part that this owner may lend to the other, at most `nominal` - `min`; by default that much."""

    def __post_init__(self) -> None:
        least = self.min or 0.0
        if least > self.nominal:
            raise ValueError(
                f"min={self.min}: it is part of nominal={self.nominal} and cannot exceed it; lower min"
            )
        if (self.lend or 0.0) > self.nominal - least + _ROUNDING:
            raise ValueError(
                f"lend={self.lend}: at most nominal={self.nominal} - min={least} can be lent; lower lend"
            )


@section(frozen=True, config=STRICT)
class ForecastSection:
    """Memory kept for forecast embeddings; it has an effect only if quotas change at run time."""

    quantile: Annotated[float, Field(gt=0, le=0.99)] | None = 0.9
    """Quantile of the forecast for which embeddings keep memory; null keeps none."""
    window_ms: Milliseconds = 1_000
    """Forecast horizon."""


@section(frozen=True, config=STRICT)
class QuotaSection:
    """Division of the pool between the LLM's KV cache and the workspace of embedding batches."""

    policy: Literal["auto", "static", "dynamic"] = "auto"
    """`dynamic` moves quotas towards the owner with more urgent requests; `static` keeps the nominal ones.
    `auto` is `dynamic` where memory can move: with `pool.kv_allocator: kvcached` and `scheduling.engine`."""
    llm: ShareSection = ShareSection(nominal=0.9)
    """Share of the LLM."""
    embedding: ShareSection = ShareSection(nominal=0.1)
    """Share of the embedding models together."""
    tick_ms: Annotated[float, Field(ge=5, le=10_000)] = 50
    """Interval of the quota controller; it also runs when an owner is short of memory."""
    max_step: Annotated[float, Field(gt=0, le=1)] = 0.05
    """Largest change per tick, as a fraction of the pool."""
    dead_band: Fraction = 0.01
    """A new target that differs from the last by at most this fraction of the pool is ignored."""
    nominal_weight: Weight = 0.3
    """Urgency of one owner alone that moves its quota half way from nominal to its maximum; 0 moves it all
    the way."""
    critical_ms: Milliseconds = 500
    """A request with less slack than this, or than half its objective if that is shorter, is urgent."""
    critical_weight: Weight = 1.0
    """Urgency of a request whose slack is 0; it falls linearly to 0 at `critical_ms`."""
    forecast: ForecastSection = ForecastSection()
    """Memory kept for predicted embeddings."""

    def require_room_for_both(self) -> None:
        """Raises ValueError if the nominal shares exceed the pool; only relevant if both are served."""
        if self.llm.nominal + self.embedding.nominal > 1 + _ROUNDING:
            raise ValueError(
                f"quota: shares must sum to at most 1, but quota.llm.nominal={self.llm.nominal} + "
                f"quota.embedding.nominal={self.embedding.nominal} exceed it; lower one of them"
            )

    @property
    def must_move(self) -> bool:
        """Whether the section asks for quotas that change: by urgency, or by lending."""
        return self.policy == "dynamic" or bool(self.llm.borrow or self.embedding.borrow)

    def sharing(
        self,
        *,
        pool_bytes: int,
        max_llm_bytes: int,
        most_embedding_bytes: int,
        block_bytes: int,
        largest_request: Mapping[Owner, int],
    ) -> Sharing:
        """Converts the shares to bytes of the actual pool.

        No owner gets more than it can use: the LLM at most its cache, the embeddings their largest batches.
        A minimum that is not stated is the memory of the owner's `largest_request`, and for embeddings that
        of a full pass as far as their nominal share allows: shorter passes take more time of the device.
        """
        shares = {Owner.LLM: self.llm, Owner.EMBEDDING: self.embedding}
        full_pass = {Owner.EMBEDDING: min(most_embedding_bytes, int(self.embedding.nominal * pool_bytes))}
        minimum = {
            owner: max(largest_request[owner], full_pass.get(owner, 0))
            if share.min is None
            else int(share.min * pool_bytes)
            for owner, share in shares.items()
        }
        follows_urgency = self.policy != "static"
        unstated = pool_bytes if follows_urgency else 0
        reserved = max(minimum[Owner.EMBEDDING], pool_bytes - max_llm_bytes)
        useful = max(reserved, most_embedding_bytes)
        kept = min(max(minimum[Owner.LLM], pool_bytes - useful), pool_bytes - reserved)
        # Rounded down: a minimum of more blocks than the nominal share could not be kept.
        least = kept // block_bytes * block_bytes
        owned = min(max(int(self.llm.nominal * pool_bytes), least), pool_bytes - reserved)
        options = QuotaOptions(
            pool=pool_bytes,
            minimum={Owner.LLM: least, Owner.EMBEDDING: reserved},
            nominal_llm_bytes=owned // block_bytes * block_bytes,
            nominal_weight=self.nominal_weight,
            rate=self.max_step / (self.tick_ms / 1_000),
            dead_band=int(self.dead_band * pool_bytes),
            block_bytes=block_bytes,
            urgency=UrgencyOptions(milliseconds(self.critical_ms), self.critical_weight),
        )
        return Sharing(
            options,
            borrow={
                owner: unstated if share.borrow is None else int(share.borrow * pool_bytes)
                for owner, share in shares.items()
            },
            # The minimum bounds what is lent, too.
            lend={
                owner: pool_bytes if share.lend is None else int(share.lend * pool_bytes)
                for owner, share in shares.items()
            },
            follows_urgency=follows_urgency,
        )
