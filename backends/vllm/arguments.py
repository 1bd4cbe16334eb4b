"""Builds vLLM's engine arguments: those of the configuration, unchanged, and those that Tandem sets.

Importing this module imports vLLM, which takes seconds.
"""

import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext

from backends.vllm.argument_names import check_arguments
from backends.vllm.prompt_logits import EXTENSION

# On a GPU vLLM refuses to start unless `gpu_memory_utilization` of the device is free, even if the size of
# the KV cache is given. The default of 92 % is not free while an embedding model loads.
_MIN_GPU_MEMORY_UTILIZATION = 0.01
# Selects vLLM's defaults for tokens per step and running requests: those of its own server. For other
# contexts vLLM has no defaults per device and uses those of the smallest.
CONTEXT = UsageContext.OPENAI_API_SERVER


def engine_args(
    model: str, served_name: str, arguments: Mapping[str, Any], *, reasoning_parser: str | None = None
) -> AsyncEngineArgs:
    """Builds vLLM's AsyncEngineArgs with Tandem's defaults. Raises ValueError for unknown arguments.

    vLLM's periodic log lines and Prometheus metrics stay off unless `disable_log_stats: false` is given. Its
    progress bar of the weights follows TQDM_DISABLE as other bars do. Images are processed before admission,
    so vLLM keeps no processed ones unless `mm_processor_cache_gb` is given. All layers keep their keys and
    values in the same blocks (see `require_one_cache_group`).
    """
    check_arguments(arguments)
    nested = _nested_configs()
    converted = {
        name: nested[name](**value) if name in nested and isinstance(value, Mapping) else value
        for name, value in arguments.items()
    }
    defaults: dict[str, Any] = {
        "model": model,
        "served_model_name": served_name,
        "disable_log_stats": True,
        "use_tqdm_on_load": not os.environ.get("TQDM_DISABLE"),
        "worker_extension_cls": EXTENSION,
        "mm_processor_cache_gb": 0,
        "disable_hybrid_kv_cache_manager": True,
    }
    if reasoning_parser is not None:
        defaults["reasoning_parser"] = reasoning_parser
    if "kv_cache_memory_bytes" in arguments:
        defaults["gpu_memory_utilization"] = _MIN_GPU_MEMORY_UTILIZATION
    if current_platform.is_cpu() and has_one_rank(arguments):
        defaults["distributed_executor_backend"] = "backends.vllm.cpu_executor.InProcessExecutor"
    return AsyncEngineArgs(**(defaults | converted))


def engine_config(
    model: str, served_name: str, arguments: Mapping[str, Any], *, reasoning_parser: str | None
) -> VllmConfig:
    """The configuration of an engine. Raises ValueError for arguments or a model that are not served."""
    args = engine_args(model, served_name, arguments, reasoning_parser=reasoning_parser)
    config = args.create_engine_config(CONTEXT)
    require_one_cache_group(config)
    return config


def require_one_cache_group(config: VllmConfig) -> None:
    """Raises ValueError for a model whose KV-cache blocks do not each hold all layers.

    Plan, leases and quotas count blocks of all layers. vLLM's hybrid KV-cache manager divides layers of
    different kinds into groups, and a block then holds the layers of one group.
    """
    model = config.model_config
    if model.is_hybrid or model.is_attention_free:
        raise ValueError(
            f"{model.model}: some layers keep a state of fixed size (Mamba, linear attention), which the "
            "memory plan and the leases do not count; serve a model whose layers are all attention"
        )
    kinds = sorted(set(getattr(model.hf_text_config, "layer_types", None) or ()))
    if len(kinds) > 1 and not config.scheduler_config.disable_hybrid_kv_cache_manager:
        raise ValueError(
            f"engine arguments: disable_hybrid_kv_cache_manager=False divides the layers of {model.model} "
            f"({', '.join(kinds)}) into groups with blocks of their own, which the memory plan and the "
            "leases do not count; remove it"
        )


def has_one_rank(arguments: Mapping[str, Any]) -> bool:
    """Whether neither tensor, pipeline nor data parallelism is configured."""
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    return all(int(arguments.get(size) or 1) == 1 for size in sizes)


def _nested_configs() -> dict[str, type]:
    """Arguments whose type is a vLLM config class, by name; YAML gives them as mappings."""
    sections = {}
    for field in fields(AsyncEngineArgs):
        kinds = (field.type, *get_args(field.type))
        section = next((kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)), None)
        if section is not None:
            sections[field.name] = section
    return sections
