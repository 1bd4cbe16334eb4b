"""The simulated machine: the sizes of device and engines, and the engines on it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from backends.cost_models.step_time import BatchTime
from backends.simulated.embedder import SimulatedEmbedder
from backends.simulated.generator import SimulatedGenerator
from backends.simulated.shared_device import OnStep, SimulatedDevice
from controlplane.config import Config
from controlplane.core.engine_reports import DeviceSharing
from controlplane.core.kv_geometry import KvGeometry
from controlplane.core.request import Request

GEOMETRY = KvGeometry(elements_per_token=512, bytes_per_element=2, block_tokens=16)


@dataclass(frozen=True, slots=True)
class Machine:
    """Simulated device and engines.

    `kv_bytes` None means no memory limit. `workspace_batches` is the embedding quota, in largest batches.
    With `pool_bytes`, KV cache and embedding workspace share one elastic pool, divided by quotas that move;
    with `quota.policy: static` each takes free memory, up to `kv_bytes` and one whole batch. Without
    `has_prefix_cache` every request computes and holds its whole prompt.

    Unless steps and passes take turns (`sharing`), each kind computes at the same time as the other, a step
    takes `step_slowdown` times as long during a pass, and a pass `pass_slowdown` times as long during steps.
    `step_spread` are factors of the times of steps, each as likely as the others. Tokens reach the gate
    `delivery` seconds after their step, the second number for each of its tokens.
    """

    batch_time: BatchTime
    geometry: KvGeometry = GEOMETRY
    kv_bytes: int | None = None
    max_model_tokens: int = 4_096
    max_running: int = 256
    step_tokens: int = 2_048
    embed_batch_tokens: int = 16_384
    embed_max_running: int = 256
    workspace_batches: float = 2
    embed_bytes_per_token: int = 1_024
    embed_input_tokens: int = 512
    pool_bytes: int | None = None
    has_prefix_cache: bool = True
    sharing: DeviceSharing = DeviceSharing.TURNS
    step_slowdown: float = 1.0
    pass_slowdown: float = 1.0
    step_spread: Sequence[float] = (1.0,)
    delivery: tuple[float, float] = (0.0, 0.0)


def divide_pool(machine: Machine, llm_share: float) -> Machine:
    """The machine with its pool statically divided: whole blocks for the KV cache, the rest for batches."""
    assert machine.pool_bytes is not None
    block = machine.geometry.bytes_per_block
    kv_bytes = int(machine.pool_bytes * llm_share) // block * block
    tokens = (machine.pool_bytes - kv_bytes) // machine.embed_bytes_per_token
    return replace(machine, kv_bytes=kv_bytes, embed_batch_tokens=min(machine.embed_batch_tokens, tokens))


def engines(
    machine: Machine,
    lengths: Callable[[Request], int],
    config: Config | None,
    on_step: OnStep | None = None,
) -> tuple[SimulatedGenerator, SimulatedEmbedder]:
    """Simulated generator and embedder on one machine; `lengths` gives a request's true output length.

    The generator schedules as the server's does under `config`: by an engine policy, or by the gate's rank;
    without `config`, as behind no gate, in order of arrival. `on_step` observes the generator's device.
    """
    device = SimulatedDevice(machine.batch_time, on_step=on_step, spread=machine.step_spread)
    if machine.sharing is DeviceSharing.TURNS:
        pass_device = device
    else:
        pass_device = SimulatedDevice(machine.batch_time)
        pass_device.slow_down(device, machine.step_slowdown)
        device.slow_down(pass_device, machine.pass_slowdown)
    generator = SimulatedGenerator(
        device,
        geometry=machine.geometry,
        lengths=lengths,
        kv_bytes=machine.kv_bytes,
        max_model_tokens=machine.max_model_tokens,
        max_running=machine.max_running,
        step_tokens=machine.step_tokens,
        scheduling=None if config is None else config.engine_options(),
        is_ranked=config is not None,
        has_prefix_cache=machine.has_prefix_cache,
        delivery=machine.delivery,
    )
    pool = machine.pool_bytes
    embedder = SimulatedEmbedder(
        pass_device,
        batch_tokens=machine.embed_batch_tokens,
        max_running=machine.embed_max_running,
        max_input_tokens=machine.embed_input_tokens,
        bytes_per_token=machine.embed_bytes_per_token,
        room=None if pool is None else lambda: pool - generator.step_bytes,
        sharing=machine.sharing,
    )
    return generator, embedder
