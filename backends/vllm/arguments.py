"""Builds vLLM's engine arguments: those of the configuration, unchanged, and those that Tandem sets.

Importing this module imports vLLM, which takes seconds.
"""

import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from backends.vllm.argument_names import check_arguments
from backends.vllm.prompt_logits import EXTENSION

# On a GPU vLLM refuses to start unless `gpu_memory_utilization` of the device is free, even if the size of
# the KV cache is given. The default of 92 % is not free while an embedding model loads.
_MIN_GPU_MEMORY_UTILIZATION = 0.01


def engine_args(
    model: str, served_name: str, arguments: Mapping[str, Any], *, reasoning_parser: str | None = None
) -> AsyncEngineArgs:
    """Builds vLLM's AsyncEngineArgs with Tandem's defaults. Raises ValueError for unknown arguments.

    vLLM's periodic log lines and Prometheus metrics stay off unless `disable_log_stats: false` is given. Its
    progress bar of the weights follows TQDM_DISABLE as other bars do. Images are processed before admission,
    so vLLM keeps no processed ones unless `mm_processor_cache_gb` is given.
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
    }
    if reasoning_parser is not None:
        defaults["reasoning_parser"] = reasoning_parser
    if "kv_cache_memory_bytes" in arguments:
        defaults["gpu_memory_utilization"] = _MIN_GPU_MEMORY_UTILIZATION
    if current_platform.is_cpu() and has_one_rank(arguments):
        defaults["distributed_executor_backend"] = "backends.vllm.cpu_executor.InProcessExecutor"
    return AsyncEngineArgs(**(defaults | converted))


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
