"""Are these vLLM's engine arguments? They pass through unchanged; a misspelt one stops the start.

Importing this module imports vLLM, which takes seconds.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from difflib import get_close_matches
from typing import Any, get_args

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from controlplane.policy.engine.options import EngineOptions

SCHEDULER = "backends.vllm.scheduler.make"

# Stated elsewhere in our own configuration.
_SET_BY_CONFIG = {
    "model": "models.chat.model",
    "served_model_name": "models.chat.name",
    "reasoning_parser": "models.chat.reasoning_parser",
}

# On a GPU vLLM starts only where so much of it is free, also when it is told the bytes of its cache: by
# default 92 %, which an embedding model that loads meanwhile leaves to nobody.
_MIN_GPU_MEMORY_UTILIZATION = 0.01


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises ValueError naming each unknown argument and those that look like it."""
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


def scheduled(arguments: Mapping[str, Any], options: EngineOptions) -> dict[str, Any]:
    """The arguments that put Tandem's scheduler into the engine. Raises ValueError where they are taken."""
    taken = [name for name in ("scheduler_cls", "scheduling_policy") if name in arguments]
    if taken:
        raise ValueError(f"engine arguments: {taken[0]} is set by scheduling.engine; remove one of them")
    if arguments.get("data_parallel_size", 1) != 1:
        raise ValueError(
            "engine arguments: with data_parallel_size each engine has a scheduler of its own, and "
            "scheduling.engine speaks to one; remove one of them"
        )
    more = {**arguments.get("additional_config", {}), "tandem": asdict(options)}
    return {**arguments, "scheduler_cls": SCHEDULER, "additional_config": more}


def engine_args(
    model: str, served_name: str, arguments: Mapping[str, Any], *, reasoning_parser: str | None = None
) -> AsyncEngineArgs:
    """vLLM's log lines and Prometheus metrics stay off unless `disable_log_stats: false` asks for them."""
    check_arguments(arguments)
    sections = _nested_configs()
    given = {
        name: sections[name](**value) if name in sections and isinstance(value, Mapping) else value
        for name, value in arguments.items()
    }
    ours: dict[str, Any] = {"model": model, "served_model_name": served_name, "disable_log_stats": True}
    if reasoning_parser is not None:
        ours["reasoning_parser"] = reasoning_parser
    if "kv_cache_memory_bytes" in arguments:
        ours["gpu_memory_utilization"] = _MIN_GPU_MEMORY_UTILIZATION
    if current_platform.is_cpu() and has_one_rank(arguments):
        ours["distributed_executor_backend"] = "backends.vllm.cpu_executor.InProcessExecutor"
    return AsyncEngineArgs(**(ours | given))


def has_one_rank(arguments: Mapping[str, Any]) -> bool:
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    return all(int(arguments.get(size) or 1) == 1 for size in sizes)


def _nested_configs() -> dict[str, type]:
    """Arguments that are themselves configurations, which YAML can only write as mappings."""
    sections = {}
    for field in fields(AsyncEngineArgs):
        kinds = (field.type, *get_args(field.type))
        section = next((kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)), None)
        if section is not None:
            sections[field.name] = section
    return sections
