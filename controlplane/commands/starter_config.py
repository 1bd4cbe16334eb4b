"""`tandem init`: a commented configuration for given models on the device at hand or a named one.

The memory plan is the one of `tandem check`. The embedding share holds twice the estimated workspace of the
largest batches; the context is the longest of which several requests fit the KV cache at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import PurePath
from typing import Any

from controlplane.config import Config, ConfigError, parse
from controlplane.config.commented_yaml import commented_yaml
from controlplane.core.kv_geometry import DTYPE_BYTES
from controlplane.service.engine_builders import model_facts
from controlplane.service.memory.memory_plan import MemoryPlan, ModelFacts
from controlplane.service.preflight import (
    GPU_RESERVE_BYTES,
    DeviceFacts,
    device_facts,
    estimated_workspace_bytes,
    plan_of,
)

# The worker measures its passes; the estimate from config.json leaves out what its libraries allocate.
_WORKSPACE_HEADROOM = 2.0
_LEAST_SHARE, _MOST_SHARE = 0.05, 0.4
_LEAST_AT_ONCE = 8
_LEAST_CONTEXT = 512
_GIB = 2**30
# Memory with which nothing is short, to read weights and activations from a plan.
_PLENTY = 2**50


@dataclass(frozen=True, slots=True)
class Models:
    """Folders or names of the models to serve."""

    chat: str
    embedding: str
    reranker: str | None = None


@dataclass(frozen=True, slots=True)
class Choices:
    """Sizes that depend on the kind of device."""

    sequences: int
    context_tokens: int
    batch_tokens: int
    reserve_bytes: int
    engine: Mapping[str, Any] = field(default_factory=dict)
    worker: Mapping[str, Any] = field(default_factory=dict)


_ON_GPU = Choices(
    256,
    32_768,
    65_536,
    GPU_RESERVE_BYTES,
    {"max_num_batched_tokens": 8_192},
    {"device": "cuda", "dtype": "float16"},
)
_ON_CPU = Choices(
    64, 4_096, 8_192, 0, {"block_size": 32, "dtype": "bfloat16", "enforce_eager": True}, {"threads": 1}
)


_PURPOSES: Mapping[str, str] = {
    "models.chat.engine.max_num_seqs": "Requests in one step at most.",
    "models.chat.engine.max_num_batched_tokens": "Tokens of one step at most, prompts in chunks included.",
    "models.chat.engine.enforce_eager": "Starts faster than with compilation.",
    "models.chat.engine.enable_prefix_caching": "Requests share the blocks of equal prompt beginnings.",
    "classes.interactive": "A person waits for these.",
    "classes.retrieval": "Embeddings within a request: late ones delay the whole response.",
    "classes.standard": "Requests that name no class.",
    "classes.batch": "Indexing and offline jobs: they use what is left.",
}
"""Comments by path, beside the meaning of the keys."""


def starter_yaml(models: Models, device_name: str | None) -> str:
    """Text of the configuration. Raises ConfigError if a model cannot be read or does not fit the device."""
    device = device_facts(device_name)
    choices = _ON_GPU if device.is_gpu else _ON_CPU
    if not device.has_bfloat16:
        choices = replace(choices, engine={**choices.engine, "dtype": "float16"})
    chat = model_facts(models.chat)
    longest = min(chat.context_tokens, choices.context_tokens)
    content = _content(models, choices)
    reasons = dict(_PURPOSES)
    _set_longest_inputs(content)
    content["pool"]["memory"] = _PLENTY
    _state_memory(content, device, longest, reasons)
    _divide(content, device, models, reasons)
    _set_context(content, device, longest, reasons)
    plan = plan_of(parse(content, source="init"), device)
    content["classes"] = _classes(device, chat, plan)
    return _header(models, device, device_name, plan) + commented_yaml(content, reasons)


def _content(models: Models, choices: Choices) -> dict[str, Any]:
    """The configuration before anything is fitted to the device."""
    engine = {"max_model_len": _LEAST_CONTEXT, "max_num_seqs": choices.sequences, **choices.engine}
    served: dict[str, Any] = {
        "chat": {
            "model": models.chat,
            "name": _served_name(models.chat),
            "engine": {**engine, "enable_prefix_caching": True},
        },
        "embeddings": [_worker(models.embedding, choices)],
    }
    if models.reranker is not None:
        served["rerankers"] = [_worker(models.reranker, choices)]
    return {
        "server": {"host": "127.0.0.1", "port": 8000},
        "models": served,
        "pool": {"memory": "auto", "margin": 0.1, "reserve": choices.reserve_bytes},
        "quota": {
            "llm": {"nominal": round(1 - _LEAST_SHARE, 2)},
            "embedding": {"nominal": _LEAST_SHARE},
        },
        "classes": {"standard": {"default": True}},
    }


def _worker(name: str, choices: Choices) -> dict[str, Any]:
    return {
        "model": name,
        "name": _served_name(name),
        "batch_tokens": choices.batch_tokens,
        **choices.worker,
    }


def _served_name(name: str) -> str:
    return PurePath(name).name.lower()


def _workers(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [*content["models"]["embeddings"], *content["models"].get("rerankers", ())]


def _set_longest_inputs(content: dict[str, Any]) -> None:
    """States the longest input of each worker's model where a batch could not hold it."""
    for worker in _workers(content):
        if model_facts(worker["model"]).context_tokens > worker["batch_tokens"]:
            worker["max_input_tokens"] = worker["batch_tokens"]


def _state_memory(
    content: dict[str, Any], device: DeviceFacts, longest: int, reasons: dict[str, str]
) -> None:
    """Sets `pool.memory`: a GPU whole; of a host what the models can use, at most half of it."""
    pool = content["pool"]
    if not device.is_gpu:
        pool["memory"] = _host_memory(content, device, longest)
        reasons["pool.memory"] = (
            f"Enough for {content['models']['chat']['engine']['max_num_seqs']} requests of {longest:,} "
            f"tokens, and at most half of this host's {device.memory_bytes / _GIB:.1f} GiB."
        )
    elif device.is_at_hand:
        pool["memory"] = "auto"
    else:
        pool["memory"] = f"{device.memory_bytes // 10**9}GB"
        reasons["pool.memory"] = (
            "The size on the data sheet, so that this file can be checked without the device; there, write "
            "auto."
        )
    if reserve := pool.pop("reserve"):
        pool["reserve"] = f"{reserve // _GIB}GiB"


def _host_memory(content: Mapping[str, Any], device: DeviceFacts, longest: int) -> str:
    plan = plan_of(parse(content, source="init"))
    assert plan.geometry is not None
    sequences = content["models"]["chat"]["engine"]["max_num_seqs"]
    weights = plan.chat_weight_bytes + plan.embedding_weight_bytes + plan.activation_bytes
    shared = sequences * plan.geometry.bytes(longest) + _workspace_bytes(content)
    needed = weights + shared / (1 - content["pool"]["margin"])
    gibibytes = max(1, min(ceil(needed / _GIB), int(device.memory_bytes / 2 / _GIB)))
    return f"{gibibytes}GiB"


def _workspace_bytes(content: Mapping[str, Any]) -> float:
    """Memory for the largest batches of all workers at once, with headroom."""
    found = 0
    for worker in _workers(content):
        facts = model_facts(worker["model"])
        found += estimated_workspace_bytes(
            facts,
            batch_tokens=worker["batch_tokens"],
            max_input_tokens=worker.get("max_input_tokens", facts.context_tokens),
            bytes_per_element=DTYPE_BYTES[worker.get("dtype", "float32")],
        )
    return _WORKSPACE_HEADROOM * found


def _divide(content: dict[str, Any], device: DeviceFacts, models: Models, reasons: dict[str, str]) -> None:
    """Sets the quotas: the embedding share holds the largest batches, which are halved until it is small."""
    config: Config = parse(content, source="init")
    pool = plan_of(config, device).pool_bytes
    least = {id(worker): _longest_input(worker) for worker in _workers(content)}
    while (share := ceil(100 * _workspace_bytes(content) / pool) / 100) > _MOST_SHARE:
        larger = [worker for worker in _workers(content) if worker["batch_tokens"] > least[id(worker)]]
        if not larger:
            raise ConfigError(
                f"{models.embedding}: a batch of one longest input takes {share:.0%} of the pool of "
                f"{pool:,} bytes; name a larger device or a smaller embedding model"
            )
        for worker in larger:
            worker["batch_tokens"] = max(least[id(worker)], worker["batch_tokens"] // 2)
    share = max(_LEAST_SHARE, share)
    content["quota"] = {"llm": {"nominal": round(1 - share, 2)}, "embedding": {"nominal": share}}
    reasons["quota.embedding"] = (
        f"Holds the largest batches: {_WORKSPACE_HEADROOM:g} times the workspace estimated from config.json."
    )


def _longest_input(worker: Mapping[str, Any]) -> int:
    return int(worker.get("max_input_tokens") or model_facts(worker["model"]).context_tokens)


def _set_context(content: dict[str, Any], device: DeviceFacts, longest: int, reasons: dict[str, str]) -> None:
    """Sets max_model_len: as long as several requests of that length fit at once."""
    plan, tokens = plan_of(parse(content, source="init"), device), longest
    while plan.concurrent(tokens) < _LEAST_AT_ONCE and tokens // 2 >= _LEAST_CONTEXT:
        tokens //= 2
    content["models"]["chat"]["engine"]["max_model_len"] = tokens
    reasons["models.chat.engine"] = (
        f"With this max_model_len, {plan.concurrent(tokens):,} requests of {tokens:,} tokens fit at once."
    )


def _classes(device: DeviceFacts, chat: ModelFacts, plan: MemoryPlan) -> dict[str, Any]:
    """Four classes; objectives that the roofline of a GPU shows to be too short are lengthened."""
    ttft_ms, tpot_ms = 1_000, 100
    geometry = plan.geometry
    cost = None if geometry is None else device.step_cost(chat, geometry.bytes_per_token)
    if cost is not None:
        # Twice the time of a full prompt chunk, and of a step of 64 requests of 1,024 tokens.
        chunk = cost.step + 8_192 * cost.prompt_token
        step = cost.step + 64 * (cost.decode + 1_024 * cost.cell)
        ttft_ms = max(ttft_ms, _round_up(2_000 * chunk, 100))
        tpot_ms = max(tpot_ms, _round_up(2_000 * step, 10))
    return {
        "interactive": {"priority": 10, "ttft_ms": ttft_ms, "tpot_ms": tpot_ms},
        "retrieval": {"priority": 10, "e2e_ms": 300 if device.is_gpu else 1_000},
        "standard": {"priority": 5, "ttft_ms": 5 * ttft_ms, "sheddable": False, "default": True},
        "batch": {"priority": 0, "sheddable": False},
    }


def _round_up(value: float, unit: int) -> int:
    return ceil(value / unit) * unit


def _header(models: Models, device: DeviceFacts, device_name: str | None, plan: MemoryPlan) -> str:
    options = f" --rerank {models.reranker}" if models.reranker else ""
    options += f" --device {device_name}" if device_name else ""
    return (
        f"# Written by: tandem init {models.chat} --embed {models.embedding}{options}\n"
        f"# Planned for {device.text}: {plan.kv_bytes / _GIB:.1f} GiB of KV cache.\n"
        "#\n"
        "#   tandem check FILE      prints the memory plan, loads no model\n"
        "#   tandem serve FILE      starts the engines and the API\n"
        "#\n"
        "# The objectives of the classes are examples: state those that your users need.\n"
        "# Keys that are left out have their defaults; docs/configuration.md lists all.\n"
    )
