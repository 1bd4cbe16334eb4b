"""Checks vLLM engine arguments and adds those that Tandem sets.

Arguments pass through unchanged; an unknown one stops the start. Importing this module imports vLLM, which
takes seconds.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from difflib import get_close_matches
from typing import Any, get_args

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from controlplane.policy.engine.options import EngineOptions

SCHEDULER = "backends.vllm.scheduler.make"

# Engine arguments with a place of their own in Tandem's configuration.
_SET_BY_CONFIG = {
    "model": "models.chat.model",
    "served_model_name": "models.chat.name",
    "reasoning_parser": "models.chat.reasoning_parser",
}

# On a GPU vLLM refuses to start unless `gpu_memory_utilization` of the device is free, even if the size of
# the KV cache is given. The default of 92 % is not free while an embedding model loads.
_MIN_GPU_MEMORY_UTILIZATION = 0.01


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises ValueError naming each unknown argument and the arguments with a similar name."""
    known = {field.name for field in fields(AsyncEngineArgs)}
    problems = []
    for name in arguments:
        if name in _SET_BY_CONFIG:
            problems.append(f"{name} is set by {_SET_BY_CONFIG[name]}")
        elif name not in known:
            close = get_close_matches(name.replace("-", "_"), known, n=3)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            problems.append(f"vLLM has no engine argument {name!r}{hint}")
    if problems:
        raise ValueError("engine arguments: " + "; ".join(problems))


def with_tandem_scheduler(arguments: Mapping[str, Any], options: EngineOptions) -> dict[str, Any]:
    """Returns `arguments` with Tandem's scheduler added. Raises ValueError if they conflict with it."""
    taken = [name for name in ("scheduler_cls", "scheduling_policy") if name in arguments]
    if taken:
        raise ValueError(f"engine arguments: {taken[0]} is set by scheduling.engine; remove one of them")
    if arguments.get("data_parallel_size", 1) != 1:
        raise ValueError(
            "engine arguments: data_parallel_size starts several schedulers, but scheduling.engine controls "
            "only one; remove one of them"
        )
    more = {**arguments.get("additional_config", {}), "tandem": asdict(options)}
    return {**arguments, "scheduler_cls": SCHEDULER, "additional_config": more}


def engine_args(
    model: str, served_name: str, arguments: Mapping[str, Any], *, reasoning_parser: str | None = None
) -> AsyncEngineArgs:
    """Builds vLLM's AsyncEngineArgs with Tandem's defaults. Raises ValueError for unknown arguments.

    vLLM's periodic log lines and Prometheus metrics stay off unless `disable_log_stats: false` is given.
    """
    check_arguments(arguments)
    nested = _nested_configs()
    converted = {
        name: nested[name](**value) if name in nested and isinstance(value, Mapping) else value
        for name, value in arguments.items()
    }
    defaults: dict[str, Any] = {"model": model, "served_model_name": served_name, "disable_log_stats": True}
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
