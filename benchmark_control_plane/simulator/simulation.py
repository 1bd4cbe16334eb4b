"""What becomes of a list of requests? The live gate on a simulated device, in virtual time.

Rule: intake, dispatcher and policies are the server's own; only the clock, the backends and the clients
are not. A client asks when its time has come and reads its answer to the end. The trace hash covers every
request's record and every step of the device, so equal hashes mean equal courses.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from backends.cost_models.step_time import BatchTime, StepLoad
from backends.device.kv_memory import ElasticMemory
from backends.simulated.device import OnStep, SimulatedDevice
from backends.simulated.embedder import SimulatedEmbedder
from backends.simulated.generator import SimulatedGenerator
from benchmark_control_plane.simulator.virtual_time import run
from controlplane.config import Config, parse
from controlplane.core.generation import Sampling
from controlplane.core.geometry import KvGeometry
from controlplane.core.ports import LengthPredictor
from controlplane.core.request import Request
from controlplane.service.bootstrap import build_service
from controlplane.service.jobs import Caller, RequestHints
from controlplane.service.runtime.timers import LoopClock
from controlplane.service.service import Service
from controlplane.service.ticket import Rejected, Ticket

_CALLER = Caller("simulation")
_GEOMETRY = KvGeometry(elements_per_token=512, bytes_per_element=2, block_tokens=16)


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """A generation: the client asks for at most `max_tokens`, the answer would be `output_tokens` long."""

    at: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int | None = None
    service_class: str | None = None


@dataclass(frozen=True, slots=True)
class Embed:
    at: float
    lengths: tuple[int, ...]
    service_class: str | None = None


Offered = SimulatedRequest | Embed


@dataclass(frozen=True, slots=True)
class Machine:
    """`kv_bytes` None: no memory limit. `workspace_batches` is the embedding quota in largest batches. With
    `pool_bytes` the cache and the workspace are parts of one elastic pool, which `quota` in the sections
    shares out if it is to move; else each kind takes what it finds, up to `kv_bytes` and a whole batch."""

    batch_time: BatchTime
    geometry: KvGeometry = _GEOMETRY
    kv_bytes: int | None = None
    max_model_tokens: int = 4_096
    max_running: int = 256
    step_tokens: int = 2_048
    embed_batch_tokens: int = 16_384
    embed_max_running: int = 256
    workspace_batches: int = 2
    embed_bytes_per_token: int = 1_024
    embed_input_tokens: int = 512
    pool_bytes: int | None = None


def divided(machine: Machine, llm_share: float) -> Machine:
    """The same pool in two parts, once and for all: whole blocks for the cache, the rest for batches."""
    assert machine.pool_bytes is not None
    block = machine.geometry.bytes_per_block
    kv_bytes = int(machine.pool_bytes * llm_share) // block * block
    tokens = (machine.pool_bytes - kv_bytes) // machine.embed_bytes_per_token
    return replace(machine, kv_bytes=kv_bytes, embed_batch_tokens=min(machine.embed_batch_tokens, tokens))


@dataclass(frozen=True, slots=True)
class SimulatedRecord:
    """Stamps in nanoseconds; of a rejected request only the arrival is known."""

    number: int
    outcome: str
    arrival: int
    dispatched: int | None = None
    first_token: int | None = None
    finished: int | None = None
    output_tokens: int = 0
    longest_gap: int = 0
    preemptions: int = 0


@dataclass(slots=True)
class MemoryUse:
    """Of the steps: bytes at the fullest, byte-seconds of either kind, steps that found more than the pool
    has, and batches that failed for it."""

    peak: int = 0
    kv_area: float = 0.0
    workspace_area: float = 0.0
    overflows: int = 0
    failed_batches: int = 0


@dataclass(slots=True)
class SimulationResult:
    """`records` in the order of the requests; `presence` is (time, requests present) at each sample."""

    records: list[SimulatedRecord] = field(default_factory=list)
    presence: list[tuple[float, int]] = field(default_factory=list)
    steps: int = 0
    busy_seconds: float = 0.0
    engine_preemptions: int = 0
    memory: MemoryUse = field(default_factory=MemoryUse)
    reclaimed_bytes: int = 0
    trace_hash: str = ""


def arrival_times(
    rng: np.random.Generator, rate: float, count: int, *, variation: float = 1.0
) -> list[float]:
    """Renewal arrivals with Gamma gaps of this coefficient of variation; 1 is Poisson."""
    shape = variation**-2
    gaps = rng.gamma(shape, 1 / (rate * shape), count)
    return [float(at) for at in np.cumsum(gaps)]


def simulate(
    offered: Sequence[Offered],
    machine: Machine,
    sections: Mapping[str, Any] | None = None,
    *,
    sample_every: float | None = None,
    lengths: LengthPredictor | None = None,
) -> SimulationResult:
    """Runs until every client has its answer. `sections` are those of the server's YAML besides models;
    `lengths` stands in for the predictor that they name. Ids of requests begin with their number and "-"."""
    return run(_play(offered, machine, sections or {}, sample_every, lengths))


async def _play(
    offered: Sequence[Offered],
    machine: Machine,
    sections: Mapping[str, Any],
    sample_every: float | None,
    lengths: LengthPredictor | None,
) -> SimulationResult:
    course = SimulationResult()
    digest = hashlib.sha256()

    def on_step(start: float, duration: float, load: StepLoad) -> None:
        course.steps += 1
        course.busy_seconds += duration
        digest.update(f"{start} {duration} {load}".encode())
        if machine.pool_bytes is not None:
            _note_memory(
                course.memory, machine.pool_bytes, generator.step_bytes, embedder.pass_bytes, duration
            )

    def length(request: Request) -> int:
        one = offered[int(request.id.partition("-")[0])]
        assert isinstance(one, SimulatedRequest)
        return one.output_tokens

    generator, embedder = engines(machine, length, on_step)
    async with started(generator, embedder, machine, sections, lengths) as service:
        sampler = None
        if sample_every is not None:
            sampler = asyncio.create_task(_sample(service, course, sample_every))
        course.records = await _all_clients(service, offered)
        if sampler is not None:
            sampler.cancel()
        course.engine_preemptions = generator.state().preemptions
        course.memory.failed_batches = embedder.out_of_memory
        if service.quota_controller is not None:
            course.reclaimed_bytes = service.quota_controller.reclaimed_bytes
    for record in course.records:
        digest.update(repr(record).encode())
    course.trace_hash = digest.hexdigest()
    return course


def engines(
    machine: Machine, lengths: Callable[[Request], int], on_step: OnStep | None = None
) -> tuple[SimulatedGenerator, SimulatedEmbedder]:
    """On one device. `lengths` gives the true length of a request's answer."""
    device = SimulatedDevice(machine.batch_time, on_step=on_step)
    generator = SimulatedGenerator(
        device,
        geometry=machine.geometry,
        lengths=lengths,
        kv_bytes=machine.kv_bytes,
        max_model_tokens=machine.max_model_tokens,
        max_running=machine.max_running,
        step_tokens=machine.step_tokens,
        orders=machine.pool_bytes is not None,
    )
    pool = machine.pool_bytes
    embedder = SimulatedEmbedder(
        device,
        batch_tokens=machine.embed_batch_tokens,
        max_running=machine.embed_max_running,
        max_input_tokens=machine.embed_input_tokens,
        bytes_per_token=machine.embed_bytes_per_token,
        room=None if pool is None else lambda: pool - generator.step_bytes,
    )
    return generator, embedder


def _note_memory(use: MemoryUse, pool: int, kv: int, workspace: int, duration: float) -> None:
    use.peak = max(use.peak, kv + workspace)
    use.kv_area += kv * duration
    use.workspace_area += workspace * duration
    use.overflows += kv + workspace > pool


class _LoopTicks:
    """On the loop's own clock, which may be virtual."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    def every(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        async def repeat() -> None:
            while True:
                await asyncio.sleep(seconds)
                await work()

        self._tasks.append(asyncio.create_task(repeat()))

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()


def config_of(sections: Mapping[str, Any]) -> Config:
    """Raises ConfigError."""
    return parse({"models": {"chat": {"model": "simulated"}}, **sections})


@asynccontextmanager
async def started(
    generator: SimulatedGenerator,
    embedder: SimulatedEmbedder,
    machine: Machine,
    sections: Mapping[str, Any],
    lengths: LengthPredictor | None = None,
) -> AsyncIterator[Service]:
    """The gate over these engines, drained and stopped on leaving."""
    config = config_of(sections)
    pool = machine.pool_bytes
    workspace = machine.workspace_batches * embedder.workspace_bytes
    service = build_service(
        config,
        [generator],
        [embedder],
        workspace_bytes=workspace
        if pool is None
        else max(embedder.workspace_bytes, pool - generator.kv_bytes),
        device_memory=None if pool is None else lambda: ElasticMemory(pool, generator.kv_bytes),
        clock=LoopClock(),
        ticks=_LoopTicks(),
        lengths=lengths,
    )
    await service.start()
    try:
        yield service
    finally:
        await service.stop()


async def _all_clients(service: Service, offered: Sequence[Offered]) -> list[SimulatedRecord]:
    """Sets out each client at its time; those of one instant in the order given."""
    loop = asyncio.get_running_loop()
    clients: dict[int, asyncio.Task[SimulatedRecord]] = {}
    for number in sorted(range(len(offered)), key=lambda n: (offered[n].at, n)):
        one = offered[number]
        if one.at > loop.time():
            await asyncio.sleep(one.at - loop.time())
        clients[number] = asyncio.create_task(_client(service, number, one))
    await asyncio.gather(*clients.values())
    return [clients[number].result() for number in range(len(offered))]


async def _client(service: Service, number: int, one: Offered) -> SimulatedRecord:
    hints = RequestHints(service_class=one.service_class)
    try:
        if isinstance(one, SimulatedRequest):
            ticket = await _generated(service, number, one, hints)
        else:
            inputs = [range(length) for length in one.lengths]
            embed_job = await service.intake.embeddings(
                str(number), _CALLER, "simulated-embedding", inputs, hints
            )
            ticket = (await service.gate.embed(embed_job)).ticket
    except Rejected as rejected:
        return SimulatedRecord(number, f"rejected: {rejected.reject.reason}", rejected.request.arrival)
    seen = ticket.timeline
    return SimulatedRecord(
        number,
        str(ticket.outcome),
        seen.arrival,
        seen.dispatched,
        seen.first_token,
        seen.finished,
        seen.output_tokens,
        seen.longest_gap,
        ticket.preemptions,
    )


async def _generated(service: Service, number: int, one: SimulatedRequest, hints: RequestHints) -> Ticket:
    limit = one.max_tokens or one.output_tokens
    job = await service.intake.completion(
        str(number),
        _CALLER,
        "simulated",
        range(one.prompt_tokens),
        max_tokens=limit,
        sampling=Sampling(max_tokens=limit),
        hints=hints,
    )
    answer = await service.gate.generate(job)
    async for _ in answer:
        pass
    return answer.ticket


async def _sample(service: Service, course: SimulationResult, every: float) -> None:
    loop = asyncio.get_running_loop()
    while True:
        course.presence.append((loop.time(), len(service.gate.tickets())))
        await asyncio.sleep(every)
