"""How do a configuration's shares become quotas that move, and who watches the device? Built at the start."""

import logging
from collections.abc import Callable, Mapping

from backends.device import probe as device_probe
from backends.device.kv_memory import (
    DeviceMemory,
    KvcachedMemory,
    StaticMemory,
    kvcached_segment,
    kvcached_unit,
)
from controlplane.config import Config, ConfigError
from controlplane.core.clock import Clock, milliseconds
from controlplane.core.ports import Embedder, Generator
from controlplane.service.gate.dispatcher import Dispatcher
from controlplane.service.memory.foresight import Foresight
from controlplane.service.memory.memory_plan import MemoryPlan
from controlplane.service.memory.monitor import MemoryMonitor
from controlplane.service.memory.quota_controller import Pool, Quotas

log = logging.getLogger(__name__)


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


def pool_of(
    config: Config,
    generators: Mapping[str, Generator],
    embedders: Mapping[str, Embedder],
    workspace_bytes: int,
    device_memory: Callable[[], DeviceMemory] | None,
) -> Pool | None:
    """What the quotas move in; None where they stay as they are. Raises ConfigError."""
    section = config.quota
    if not section.moves or not generators or not embedders:
        return None
    generator = next(iter(generators.values()))
    memory = StaticMemory(generator.kv_bytes, workspace_bytes) if device_memory is None else device_memory()
    try:
        sharing = section.sharing(
            pool_bytes=memory.pool_bytes,
            most_llm_bytes=min(generator.kv_bytes, memory.most_llm_bytes),
            most_embedding_bytes=sum(embedder.workspace_bytes for embedder in embedders.values()),
            block_bytes=generator.geometry.bytes_per_block,
        )
        return Pool(generator, tuple(embedders.values()), memory, sharing)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def quotas_in(pool: Pool, config: Config, clock: Clock, dispatcher: Dispatcher) -> Quotas:
    forecast = config.quota.forecast
    priorities = {one.priority for one in config.classes.values()}
    highest = max(priorities) if len(priorities) > 1 else None
    promised = [one.ttft_ms for one in config.classes.values() if one.priority == highest and one.ttft_ms]
    # Half of what was promised is plenty to spend on waiting; the rest is for the work.
    patience = milliseconds(min(promised, default=0.0) / 2)
    foresight = Foresight(milliseconds(forecast.window_ms), forecast.level, highest, patience)
    return Quotas(clock, dispatcher, pool, foresight)


def monitor_of(plan: MemoryPlan, *, is_static: bool) -> Callable[[Callable[[int], None]], MemoryMonitor]:
    """Given whom to tell what is withheld. Our processes may come to hold the pool and one forward pass more
    than at the start, less a cache that counts since then; half the margin is what nobody minds."""

    def build(withhold: Callable[[int], None]) -> MemoryMonitor:
        probe = device_probe.open_probe()
        has_cache = is_static and probe.counts_untouched
        granted = plan.pool_bytes + plan.activation_bytes - (plan.kv_bytes if has_cache else 0)
        return MemoryMonitor(probe, lambda: granted, withhold, plan.margin_bytes // 2)

    return build
