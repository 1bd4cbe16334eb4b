"""The memory plan of the device: weights, activations, margin, KV blocks and embedding workspace, in bytes.

available = memory - weights - activation - reserve; pool = available * (1 - margin); each owner gets its
quota of the pool. A chat model on several GPUs is planned per rank: the device is the first GPU, which also
holds the embedding models, and every rank has a cache of this size. Also whether requests may keep hidden
states instead of keys and values, and what that saves.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any, NamedTuple, Protocol

from controlplane.config import Config, ConfigError
from controlplane.core.kv_geometry import DTYPE_BYTES, GeometryError, KvGeometry, kv_geometry

log = logging.getLogger(__name__)

_EXAMPLE_LENGTHS = (512, 2_048, 8_192, 32_768)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model's config.json and the size of its weight files."""

    config: Mapping[str, Any]
    weight_bytes: int

    @property
    def context_tokens(self) -> int:
        """The model's own context limit. Raises ConfigError if config.json does not state it."""
        text = self.config.get("text_config") or self.config
        for key in ("max_position_embeddings", "n_positions", "max_seq_len"):
            if text.get(key):
                return int(text[key])
        raise ConfigError("the model's config.json has no max_position_embeddings; set engine.max_model_len")

    def loaded_bytes(self, dtype: str | None) -> int:
        """Bytes of the weights loaded as `dtype`, at least those of the files.

        Not every config.json states the type that the files hold.
        """
        named = str(self.config.get("dtype") or self.config.get("torch_dtype"))
        stored, loaded = DTYPE_BYTES.get(named.removeprefix("torch.")), DTYPE_BYTES.get(str(dtype))
        if stored is None or loaded is None or "quantization_config" in self.config:
            return self.weight_bytes
        return max(self.weight_bytes, self.weight_bytes * loaded // stored)


Facts = Callable[[str], ModelFacts]


class DeviceDefaults(NamedTuple):
    """Engine limits where none are stated, and the reserve of `auto`, at most an eighth of the memory."""

    sequences: int
    step_tokens: int
    reserve_bytes: int


# Bounds of vLLM's defaults on one or two sockets. A host's memory holds no CUDA contexts.
WITHOUT_GPU = DeviceDefaults(256, 8_192, 0)


class HybridFallback(Protocol):
    """Engine arguments that shrink the KV cache without hidden states, and their loss in quality."""

    @property
    def name(self) -> str:
        """Name in messages to the operator."""

    @property
    def arguments(self) -> Mapping[str, str]:
        """Engine arguments of vLLM."""

    @property
    def element_bytes(self) -> int:
        """Bytes of a cached number under these arguments."""

    @property
    def loss(self) -> str:
        """Text on the accuracy that the output loses."""


class HybridSupport(Protocol):
    """The LLM backend's rules for hidden states in its cache, from config.json and engine arguments."""

    def refusal(self, config: Mapping[str, Any], arguments: Mapping[str, Any]) -> str | None:
        """Reason that hidden states are not possible; None if they are and save memory."""

    def memory_ratio(self, config: Mapping[str, Any]) -> float:
        """Bytes of a token's hidden state over those of its keys and values."""

    def scratch_bytes(self, config: Mapping[str, Any], *, requests: int, tokens: int) -> int:
        """Extra bytes of a layer while `requests` of `tokens` each decode from hidden states."""

    def fallbacks(self, arguments: Mapping[str, Any], element_bytes: int) -> Iterator[HybridFallback]:
        """Those that take less than `element_bytes` a number and contradict no argument."""


class HybridChoice(NamedTuple):
    """Hidden states are on: for a model of `architecture`, with `forms` as configured, auto or on."""

    architecture: str
    forms: str


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The parts of the device's memory in bytes; `geometry` is None without a chat model.

    With several `ranks` they are those of one rank.
    """

    memory_bytes: int
    chat_weight_bytes: int
    embedding_weight_bytes: int
    activation_bytes: int
    reserve_bytes: int
    margin_bytes: int
    pool_bytes: int
    kv_bytes: int
    workspace_bytes: int
    geometry: KvGeometry | None
    max_model_tokens: int
    chat_layers: int = 0
    ranks: int = 1

    @property
    def kv_blocks(self) -> int:
        """KV blocks that fit the cache."""
        return self.kv_bytes // self.geometry.bytes_per_block if self.geometry else 0

    def concurrent(self, tokens: int) -> int:
        """Number of requests of `tokens` each, prompt and output, that fit the cache at once."""
        return self.kv_blocks // self.geometry.blocks(tokens) if self.geometry else 0


def memory_plan(
    config: Config,
    facts: Facts,
    device_memory: Callable[[], int],
    hybrid: HybridSupport,
    defaults: DeviceDefaults = WITHOUT_GPU,
) -> MemoryPlan:
    """Divides the device's memory. Raises ConfigError with the sizes if the parts do not fit."""
    chat = config.models.chat
    chat_facts = facts(chat.model) if chat else None
    embedding_facts = [facts(model.model) for model in config.models.encoders]
    memory = device_memory() if config.pool.memory == "auto" else config.pool.memory
    weights = _rank_weights(chat.engine, chat_facts) if chat and chat_facts else 0
    embedding_weights = sum(
        found.loaded_bytes(model.dtype)
        for found, model in zip(embedding_facts, config.models.encoders, strict=True)
    )
    activation = _activation_bytes(config, chat_facts, hybrid, defaults)
    unstated = min(defaults.reserve_bytes, memory // 8)
    reserve = unstated if config.pool.reserve == "auto" else config.pool.reserve
    available = memory - weights - embedding_weights - activation - reserve
    if available <= 0:
        raise ConfigError(
            f"pool.memory={memory}: weights {weights + embedding_weights}, activation {activation} and "
            f"reserve {reserve} bytes leave no memory for the cache; use a larger device, a smaller or "
            "quantised model, a larger engine.tensor_parallel_size, or a lower engine.max_num_batched_tokens"
        )
    margin = round(available * config.pool.margin)
    pool = available - margin
    geometry = _geometry(config, chat_facts) if chat_facts else None
    is_elastic = config.pool.kv_allocator == "kvcached"
    # kvcached maps blocks on demand, so the cache may be as large as the LLM's quota can ever become.
    kv = int(pool * (1 - (config.quota.embedding.min or 0.0) if is_elastic else config.quota.llm.nominal))
    max_model_tokens = 0
    if geometry is not None and chat is not None and chat_facts is not None:
        kv = _stated_cache(chat.engine, kv) // geometry.bytes_per_block * geometry.bytes_per_block
        max_model_tokens = _max_model_tokens(chat.engine, chat_facts)
        if geometry.bytes(max_model_tokens) > kv:
            raise ConfigError(
                f"models.chat.engine.max_model_len={max_model_tokens}: one such request takes "
                f"{geometry.bytes(max_model_tokens)} bytes of KV cache and quota.llm gives {kv}; "
                f"set it to at most {kv // geometry.bytes_per_token} or raise quota.llm.nominal"
            )
    return MemoryPlan(
        memory, weights, embedding_weights, activation, reserve, margin, pool,
        kv if geometry else 0, int(pool * config.quota.embedding.nominal) if embedding_facts else 0,
        geometry, max_model_tokens, _stage_layers(chat.engine, chat_facts) if chat and chat_facts else 0,
        prod(parallel_sizes(chat.engine)) if chat else 1,
    )  # fmt: skip


def parallel_sizes(engine: Mapping[str, Any]) -> tuple[int, int]:
    """Tensor and pipeline parallelism of the engine's arguments; their product is the number of GPUs."""
    return int(engine.get("tensor_parallel_size") or 1), int(engine.get("pipeline_parallel_size") or 1)


def _rank_weights(engine: Mapping[str, Any], facts: ModelFacts) -> int:
    """Bytes of the weights on the rank that holds most.

    The first and the last stage of a pipeline hold the embedding table beside their layers.
    """
    tensor, pipeline = parallel_sizes(engine)
    weights = facts.loaded_bytes(engine.get("dtype"))
    if pipeline > 1 and (layers := _layers(facts)):
        text = facts.config.get("text_config") or facts.config
        table = 2 * int(text.get("vocab_size") or 0) * int(text.get("hidden_size") or 0)
        weights = weights * _stage_layers(engine, facts) // layers + table
    return -(-weights // tensor)


def _stated_cache(engine: Mapping[str, Any], share: int) -> int:
    """The cache size that the engine's arguments state, or the LLM's share of the pool in bytes."""
    stated = engine.get("kv_cache_memory_bytes")
    if stated is None:
        return share
    if not isinstance(stated, int):
        raise ConfigError(
            f"models.chat.engine.kv_cache_memory_bytes={stated!r}: a whole number of bytes is needed, as "
            f"vLLM takes it; write for example {2**30}"
        )
    if stated > share:
        raise ConfigError(
            f"models.chat.engine.kv_cache_memory_bytes={stated}: quota.llm gives {share} bytes; lower it, "
            "leave it out to use the whole share, or raise quota.llm.nominal or pool.memory"
        )
    return stated


def _geometry(config: Config, facts: ModelFacts) -> KvGeometry:
    engine = config.models.chat.engine if config.models.chat else {}
    stated = (str(engine.get(name) or "auto") for name in ("kv_cache_dtype", "dtype"))
    tensor, pipeline = parallel_sizes(engine)
    try:
        return kv_geometry(
            facts.config,
            block_tokens=int(engine.get("block_size") or 16),
            cache_dtype=next((dtype for dtype in stated if dtype != "auto"), "auto"),
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
        )
    except GeometryError as error:
        raise ConfigError(f"models.chat: {error}") from error


def _layers(facts: ModelFacts) -> int:
    text = facts.config.get("text_config") or facts.config
    return int(text.get("num_hidden_layers") or text.get("n_layer") or 0)


def _stage_layers(engine: Mapping[str, Any], facts: ModelFacts) -> int:
    """Layers of the largest stage of a pipeline, or of the model without one."""
    return -(-_layers(facts) // parallel_sizes(engine)[1])


def _max_model_tokens(engine: Mapping[str, Any], facts: ModelFacts) -> int:
    return int(engine.get("max_model_len") or facts.context_tokens)


def _activation_bytes(
    config: Config, facts: ModelFacts | None, hybrid: HybridSupport, defaults: DeviceDefaults
) -> int:
    """Peak of one full prefill: hidden states, the MLP's two halves and fp32 logits of every sequence.

    With hidden states in the cache, decoding from them may need more memory in a layer than its MLP. Tensor
    parallelism divides the MLP only: every rank holds whole hidden states, and logits of the whole
    vocabulary. A stage of a pipeline takes as much as the whole model.
    """
    if config.pool.activation != "auto":
        return config.pool.activation
    if facts is None or config.models.chat is None:
        return 0
    chat, text = config.models.chat, facts.config.get("text_config") or facts.config
    engine = chat.engine
    hidden = int(text.get("hidden_size") or text.get("n_embd") or 0)
    inner = int(text.get("intermediate_size") or text.get("ffn_dim") or 4 * hidden)
    # vLLM doubles its defaults for throughput.
    factor = 2 if engine.get("performance_mode") == "throughput" else 1
    tokens = int(engine.get("max_num_batched_tokens") or factor * defaults.step_tokens)
    sequences = int(engine.get("max_num_seqs") or factor * defaults.sequences)
    largest = 2 * tokens * 2 * -(-inner // parallel_sizes(engine)[0])
    if chat.hybrid_cache != "off" and hybrid.refusal(facts.config, engine) is None:
        longest = _max_model_tokens(engine, facts)
        largest = max(largest, hybrid.scratch_bytes(facts.config, requests=sequences, tokens=longest))
    return 2 * tokens * 4 * hidden + largest + 4 * sequences * int(text.get("vocab_size") or 0)


_PARTS = (
    ("device memory", "memory_bytes"),
    ("chat weights", "chat_weight_bytes"),
    ("embedding weights", "embedding_weight_bytes"),
    ("activation peak", "activation_bytes"),
    ("reserve", "reserve_bytes"),
    ("margin", "margin_bytes"),
    ("pool", "pool_bytes"),
    ("  KV cache", "kv_bytes"),
    ("  embedding workspace", "workspace_bytes"),
)


def plan_rows(sizes: Mapping[str, int]) -> list[tuple[str, str]]:
    """The parts of a plan and their MiB; `sizes` holds the plan's fields in bytes."""
    return [(name, f"{sizes[key] / 2**20:,.1f}") for name, key in _PARTS]


def ranks_text(ranks: int) -> str:
    """Which of several GPUs the sizes are those of."""
    return f"the chat model runs on {ranks} GPUs; these are the sizes of its part on the first one"


def example_lengths(plan: MemoryPlan) -> list[int]:
    """Lengths of requests in tokens for which a plan states how many fit at once."""
    lengths = sorted({*_EXAMPLE_LENGTHS, plan.max_model_tokens})
    return [tokens for tokens in lengths if tokens <= plan.max_model_tokens]


def plan_text(plan: MemoryPlan) -> str:
    """The plan as a table."""
    lines = [f"{name:<24}{size:>12} MiB" for name, size in plan_rows(asdict(plan))]
    if plan.ranks > 1:
        lines.append(ranks_text(plan.ranks))
    if plan.geometry is not None:
        lines.append(
            f"KV blocks: {plan.kv_blocks:,} of {plan.geometry.block_tokens} tokens, "
            f"{plan.geometry.bytes_per_token:,} bytes a token"
        )
        lines += [
            f"  {plan.concurrent(tokens):>7,} requests of {tokens:,} tokens (prompt + output) fit at once"
            for tokens in example_lengths(plan)
        ]
    return "\n".join(lines)


def hybrid_choice(config: Config, facts: Facts, support: HybridSupport) -> HybridChoice | None:
    """Whether requests may keep hidden states; None for keys and values only.

    Raises ConfigError if the configuration requires hidden states and they are not possible.
    """
    chat = config.models.chat
    if chat is None or chat.hybrid_cache == "off":
        return None
    setting = f"models.chat.hybrid_cache={chat.hybrid_cache}"
    if config.scheduling.engine is None:
        raise ConfigError(
            f"{setting}: Tandem's scheduler in the engine decides which requests keep hidden states; remove "
            "scheduling.engine: off"
        )
    reason = _refusal(config, facts, support)
    if reason is None:
        architecture = facts(chat.model).config["architectures"][0]
        log.info(
            "%s: requests may keep hidden states; prefix caching is off, since they cannot be shared", setting
        )
        return HybridChoice(architecture, chat.hybrid_cache)
    if chat.hybrid_cache == "on":
        raise ConfigError(f"{setting}: {reason}; choose auto or off")
    log.info("%s: requests keep keys and values only. %s", setting, reason)
    return None


def hybrid_text(config: Config, facts: Facts, plan: MemoryPlan, support: HybridSupport) -> str | None:
    """Text on the memory that hidden states save; None without a chat model. Raises ConfigError."""
    chat, geometry = config.models.chat, plan.geometry
    if chat is None or geometry is None:
        return None
    setup = hybrid_choice(config, facts, support)
    title = f"hybrid cache: {chat.hybrid_cache}"
    reason = _refusal(config, facts, support)
    if reason is not None:
        refused = f"{title}; not possible for this model and engine ({reason})"
        return "\n".join([refused, *_alternatives(chat.engine, plan, support)])
    ratio = support.memory_ratio(facts(chat.model).config)
    tokens = plan.max_model_tokens
    rows = int(geometry.block_tokens / ratio)
    hidden = plan.kv_blocks // -(-tokens // rows)
    verb = "would take" if setup is None else "take"
    return (
        f"{title}; hidden states {verb} {ratio:g} of the memory: {hidden:,} instead of "
        f"{plan.concurrent(tokens):,} requests of {tokens:,} tokens at once; without prefix caching"
    )


def _alternatives(engine: Mapping[str, Any], plan: MemoryPlan, support: HybridSupport) -> Iterator[str]:
    """The alternatives to hidden states, one line each."""
    if plan.geometry is None:
        return
    tokens, size = plan.max_model_tokens, plan.geometry.bytes_per_element
    for fallback in support.fallbacks(engine, size):
        smaller = replace(plan, geometry=replace(plan.geometry, bytes_per_element=fallback.element_bytes))
        stated = ", ".join(f"{name}: {value}" for name, value in fallback.arguments.items())
        yield (
            f"  instead, models.chat.engine {{{stated}}}: {fallback.name} take "
            f"{fallback.element_bytes / size:g} of the memory, {smaller.concurrent(tokens):,} instead of "
            f"{plan.concurrent(tokens):,} requests of {tokens:,} tokens; {fallback.loss}"
        )


def _refusal(config: Config, facts: Facts, support: HybridSupport) -> str | None:
    chat = config.models.chat
    return None if chat is None else support.refusal(facts(chat.model).config, chat.engine)
