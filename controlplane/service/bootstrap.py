"""Which engines does a configuration ask for? Made here, started by the service."""

import logging
from collections.abc import Callable

from backends.device import probe as device_probe
from backends.device.kv_memory import KvcachedMemory, kvcached_segment, kvcached_unit
from backends.embedding.client import WorkerEmbedder
from backends.vllm.client import VllmGenerator
from controlplane.config import Config, ConfigError
from controlplane.config.models import EmbeddingModel
from controlplane.core.device import DeviceMemory
from controlplane.core.ports import Generator
from controlplane.service.memory.memory_plan import MemoryPlan, hybrid_setup, memory_plan, plan_text
from controlplane.service.memory.model_config import model_facts
from controlplane.service.memory.monitor import MemoryMonitor
from controlplane.service.prediction.length_training import require_place
from controlplane.service.service import Service

log = logging.getLogger(__name__)


def generators_of(config: Config, plan: MemoryPlan) -> list[Generator]:
    chat = config.models.chat
    if chat is None:
        return []
    scheduling = config.engine_options()
    # By priority vLLM's own scheduler orders what was sent ahead, and picks victims, by the gate's rank.
    own = {"scheduling_policy": "priority"} if scheduling is None else {}
    return [
        VllmGenerator(
            chat.model,
            served_name=chat.served_name,
            engine_arguments={"kv_cache_memory_bytes": plan.kv_bytes, **own, **chat.engine},
            tool_parser=chat.tool_parser,
            reasoning_parser=chat.reasoning_parser,
            scheduling=scheduling,
            hybrid=hybrid_setup(config, model_facts),
            stall_seconds=chat.stall_ms / 1_000,
        )
    ]


def embedders_of(config: Config) -> list[WorkerEmbedder]:
    models = config.models
    # Where no quota moves, a budget falls only for a device that has less than was planned.
    returns_memory = config.pool.kv_allocator == "kvcached" or not config.quota.moves
    return [
        embedder_of(
            model,
            yields_cpu=model.idle_cpu_priority
            if model.idle_cpu_priority is not None
            else models.chat is not None,
            returns_memory=returns_memory,
        )
        for model in models.embeddings
    ]


def embedder_of(
    model: EmbeddingModel, *, yields_cpu: bool = False, returns_memory: bool = False
) -> WorkerEmbedder:
    return WorkerEmbedder(
        model.model,
        served_name=model.served_name,
        batch_tokens=model.batch_tokens,
        max_running=model.max_running,
        device=model.device,
        dtype=model.dtype,
        normalize=model.normalize,
        max_input_tokens=model.max_input_tokens,
        dimensions=model.dimensions,
        threads=model.threads,
        yields_cpu=yields_cpu,
        trust_remote_code=model.trust_remote_code,
        stall_seconds=model.stall_ms / 1_000,
        returns_memory=returns_memory,
    )


# FOLDED sharing_setup.py:
# How do a configuration's shares become quotas that move, and who watches the device? Built at the start.


def warn_if_taken(plan: MemoryPlan) -> None:
    """Before anything is loaded. Raises ValueError as `device.memory_bytes`."""
    free, needed = device_probe.free_gpu_bytes(), plan.memory_bytes - plan.margin_bytes
    if free is not None and free < needed:
        log.warning(
            "the plan takes up to %s bytes of the device and %s are free now; end what else holds it, or set "
            "pool.memory to what may be used",
            *(f"{needed:,}", f"{free:,}"),
        )


def kvcached_memory(plan: MemoryPlan) -> DeviceMemory:
    """Once the engine runs. Raises ConfigError."""
    try:
        segment = kvcached_segment()
        return KvcachedMemory(segment, pool_bytes=plan.pool_bytes, unit_bytes=kvcached_unit(plan.chat_layers))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def monitor_of(plan: MemoryPlan, *, is_static: bool) -> Callable[[Callable[[int], None]], MemoryMonitor]:
    """Given whom to tell what is withheld. Our processes may come to hold the pool and one forward pass more
    than at the start, less a cache that counts since then; half the margin is what nobody minds."""

    def build(withhold: Callable[[int], None]) -> MemoryMonitor:
        probe = device_probe.open_probe()
        has_cache = is_static and probe.counts_untouched
        granted = plan.pool_bytes + plan.activation_bytes - (plan.kv_bytes if has_cache else 0)
        return MemoryMonitor(probe, lambda: granted, withhold, plan.margin_bytes // 2)

    return build


def plan_of(config: Config) -> MemoryPlan:
    """Raises ConfigError."""
    try:
        plan = memory_plan(config, model_facts, device_probe.memory_bytes)
        warn_if_taken(plan)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return plan


def assemble(config: Config) -> Service:
    """The service of a configuration, not started. Raises ConfigError."""
    require_place(config)
    plan, is_static = plan_of(config), config.pool.kv_allocator == "static"
    log.info("the memory plan:\n%s", plan_text(plan))
    return Service(
        config,
        generators_of(config, plan),
        embedders_of(config),
        workspace_bytes=plan.workspace_bytes,
        device_memory=None if is_static else lambda: kvcached_memory(plan),
        monitor=monitor_of(plan, is_static=is_static) if config.pool.monitor_ms else None,
    )
