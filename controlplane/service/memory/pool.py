"""The memory pool of a service: what the quotas divide, and how embedding models divide theirs."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from controlplane.config import Config, ConfigError
from controlplane.config.pool_and_quota import QuotaSection
from controlplane.core.device import DeviceMemory
from controlplane.core.memory_ledger import MemoryLedger
from controlplane.core.ports import Embedder, Generator
from controlplane.core.request import Owner
from controlplane.policy.sharing.lending import Sharing, split_among_models


@dataclass(frozen=True, slots=True)
class SharedPool:
    """An LLM engine and embedders that share the device's memory by quotas that change.

    Raises ValueError if a minimum quota is smaller than the largest single request.
    """

    generator: Generator
    embedders: Sequence[Embedder]
    memory: DeviceMemory
    sharing: Sharing

    def __post_init__(self) -> None:
        least = self.sharing.options.minimum
        generator = self.generator
        one_request = generator.geometry.bytes(generator.max_model_tokens)
        if self.sharing.options.lowest < one_request:
            raise ValueError(
                f"quota.llm.min gives {self.sharing.options.lowest} bytes and one request of "
                f"{generator.max_model_tokens} tokens takes {one_request}: it would never start; raise "
                "quota.llm.min or lower engine.max_model_len"
            )
        one_input = sum(map(longest_input_bytes, self.embedders))
        if least[Owner.EMBEDDING] < one_input:
            raise ValueError(
                f"quota.embedding.min gives {least[Owner.EMBEDDING]} bytes and the longest input takes "
                f"{one_input}; raise quota.embedding.min or lower max_input_tokens"
            )
        if not generator.has_tandem_scheduler:
            raise ValueError(
                "quota: this LLM engine has no scheduler that enforces a quota, so quotas cannot change; "
                "remove quota.policy and borrow"
            )


def shared_pool(
    config: Config,
    generators: Mapping[str, Generator],
    embedders: Mapping[str, Embedder],
    device_memory: Callable[[], DeviceMemory] | None,
) -> SharedPool | None:
    """The pool that changing quotas divide; None if the quotas are static. Raises ConfigError."""
    section = config.quota
    if config.static_quota_reason() or device_memory is None or not generators or not embedders:
        return None
    generator = next(iter(generators.values()))
    if not generator.has_tandem_scheduler and not section.must_move:
        return None
    return divided_pool(section, generator, tuple(embedders.values()), device_memory())


def divided_pool(
    section: QuotaSection, generator: Generator, embedders: Sequence[Embedder], memory: DeviceMemory
) -> SharedPool:
    """The pool of these engines as the section divides it. Raises ConfigError."""
    try:
        sharing = section.sharing(
            pool_bytes=memory.pool_bytes,
            max_llm_bytes=min(generator.kv_bytes, memory.max_llm_bytes),
            most_embedding_bytes=sum(embedder.workspace_bytes for embedder in embedders),
            block_bytes=generator.geometry.bytes_per_block,
            largest_request={
                Owner.LLM: generator.geometry.bytes(generator.max_model_tokens),
                Owner.EMBEDDING: sum(map(longest_input_bytes, embedders)),
            },
        )
        return SharedPool(generator, embedders, memory, sharing)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def ledger_of(
    pool: SharedPool | None,
    generators: Mapping[str, Generator],
    embedders: Mapping[str, Embedder],
    workspace_bytes: int,
) -> MemoryLedger:
    """The ledger of a pool whose quotas change, or of fixed shares. Raises ConfigError."""
    shares = _fixed_shares(generators, embedders, workspace_bytes) if pool is None else pool.sharing.nominal
    return MemoryLedger(shares)


def _fixed_shares(
    generators: Mapping[str, Generator], embedders: Mapping[str, Embedder], workspace_bytes: int
) -> Mapping[Owner, int]:
    """The quotas where they never change. Raises ConfigError if the largest batches exceed theirs."""
    kv_bytes = sum(generator.kv_bytes for generator in generators.values())
    # Each model has a process of its own, so their batches occupy the device at the same time.
    total = sum(embedder.workspace_bytes for embedder in embedders.values())
    if total > workspace_bytes:
        raise ConfigError(
            f"models.embeddings and models.rerankers ({', '.join(embedders)}): the largest batches "
            f"take {total} bytes and quota.embedding gives {workspace_bytes}; lower batch_tokens, or raise "
            "quota.embedding.nominal or pool.memory"
        )
    return {Owner.LLM: kv_bytes, Owner.EMBEDDING: workspace_bytes if embedders else 0}


def longest_input_bytes(embedder: Embedder) -> int:
    """The device memory of the longest input that the model accepts, by its memory model."""
    return embedder.batch_bytes([embedder.max_input_tokens])


def split_budget(budget: int, embedders: Collection[Embedder]) -> None:
    """Divides `budget` bytes over the embedding models' batches.

    Each model gets its longest input first, if the budget allows, and then a part of the rest in proportion
    to what its largest batch could use.
    """
    least = [longest_input_bytes(embedder) for embedder in embedders]
    full = [embedder.workspace_bytes for embedder in embedders]
    for embedder, part in zip(embedders, split_among_models(budget, least, full), strict=True):
        embedder.set_budget_bytes(part)
