"""Runs a list of requests through the live service on a simulated device, in virtual time.

Intake, dispatcher and policies are those of the server; clock, backends and clients are simulated. A client
sends its request at its arrival time and reads the response to the end, or leaves before. The trace hash
covers the record of every request and every step of the device, so equal hashes mean equal runs.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from backends.cost_models.step_time import StepLoad
from backends.device.kv_memory import ElasticMemory
from backends.simulated.embedder import SimulatedEmbedder
from backends.simulated.generator import SimulatedGenerator
from benchmark_control_plane.simulator.distinct_prompts import prompt_ids
from benchmark_control_plane.simulator.memory_use import MemoryUse
from benchmark_control_plane.simulator.simulated_machine import Machine, engines
from benchmark_control_plane.simulator.token_reader import read_to_end
from benchmark_control_plane.simulator.virtual_time import LoopTimers, run
from controlplane.config import Config, parse
from controlplane.core.clock import after, seconds
from controlplane.core.decision import Outcome
from controlplane.core.generation import Sampling
from controlplane.core.ports import LengthPredictor
from controlplane.core.request import Request
from controlplane.service.bootstrap import build_service
from controlplane.service.request_jobs import Caller, GenerateJob, RequestHints, RequestOrigin
from controlplane.service.runtime.timers import LoopClock
from controlplane.service.service import Service
from controlplane.service.ticket import Rejected, Ticket


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """Who sends a request, and the objectives in milliseconds (`ttft_ms`, ...) that it states itself.

    `host_delay` are the seconds from its arrival until it reaches the gate. So many seconds after its arrival
    as `leaves_after` says the client leaves, if the response has not ended by then.
    """

    tenant: str = "simulation"
    objectives: Mapping[str, float] = field(default_factory=dict)
    host_delay: float = 0.0
    leaves_after: float | None = None


@dataclass(frozen=True, slots=True)
class SimulatedRequest(Sender):
    """A generation that stops after `output_tokens`; `at` is the arrival time in seconds.

    The first `prefix_tokens` of its prompt are those of its `prefix_group`; no others are shared, unless
    `prompt` makes its token ids, when the request is sent.
    """

    at: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int | None = None
    service_class: str | None = None
    prefix_group: int = 0
    prefix_tokens: int = 0
    prompt: Callable[[], Sequence[int]] | None = None
    sequences: int = 1


@dataclass(frozen=True, slots=True)
class SimulatedEmbedding(Sender):
    """An embedding request with inputs of these token counts; `at` is the arrival in seconds."""

    at: float
    lengths: tuple[int, ...]
    service_class: str | None = None


Offered = SimulatedRequest | SimulatedEmbedding


@dataclass(frozen=True, slots=True)
class SimulatedRecord:
    """Outcome of one request; times in nanoseconds.

    A rejected request has only an arrival time, and one whose client left before the gate let it begin.
    """

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
class SimulationResult:
    """Result of a simulation.

    Attributes:
        records: one record per request, in the order offered.
        presence: (time, requests in the system) at each sample.
        steps: steps of the device, without passes that do not take turns with them.
        busy_seconds: time of these steps.
        engine_preemptions: preemptions by the engine.
        memory: memory use, if there is a pool.
        trace_hash: SHA-256 over these steps and all records.
    """

    records: list[SimulatedRecord] = field(default_factory=list)
    presence: list[tuple[float, int]] = field(default_factory=list)
    steps: int = 0
    busy_seconds: float = 0.0
    engine_preemptions: int = 0
    memory: MemoryUse = field(default_factory=MemoryUse)
    trace_hash: str = ""


def arrival_times(
    rng: np.random.Generator, rate: float, count: int, *, variation: float = 1.0
) -> list[float]:
    """Arrival times in seconds, with Gamma gaps of this coefficient of variation; 1 is Poisson."""
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
    on_start: Callable[[Service], None] = lambda service: None,
) -> SimulationResult:
    """Runs until every request has its response or is rejected.

    Args:
        offered: requests, in any order of arrival.
        machine: device and engines.
        sections: sections of the server's YAML, without `models`.
        sample_every: seconds between two samples of the number of requests in the system.
        lengths: replaces the length predictor that `sections` name.
        on_start: called with the started service.

    Request ids are the index in `offered`, then "-" and a serial number.
    """
    return run(_play(offered, machine, sections or {}, sample_every, lengths, on_start))


async def _play(
    offered: Sequence[Offered],
    machine: Machine,
    sections: Mapping[str, Any],
    sample_every: float | None,
    lengths: LengthPredictor | None,
    on_start: Callable[[Service], None],
) -> SimulationResult:
    result = SimulationResult()
    digest = hashlib.sha256()

    def on_step(start: float, duration: float, load: StepLoad) -> None:
        result.steps += 1
        result.busy_seconds += duration
        digest.update(f"{start} {duration} {load}".encode())
        if machine.pool_bytes is not None:
            used = generator.step_bytes, embedder.pass_bytes
            result.memory.note(machine.pool_bytes, *used, duration)

    def length(request: Request) -> int:
        offer = offered[int(request.id.partition("-")[0])]
        assert isinstance(offer, SimulatedRequest)
        return offer.output_tokens

    config = config_of(sections, has_pool=machine.pool_bytes is not None)
    generator, embedder = engines(machine, length, config, on_step)
    async with started(generator, embedder, machine, config, lengths) as service:
        on_start(service)
        sampler = None
        if sample_every is not None:
            sampler = asyncio.create_task(_sample(service, result, sample_every))
        result.records = await _all_clients(service, generator, offered)
        if sampler is not None:
            sampler.cancel()
        result.engine_preemptions = generator.state().preemptions
        result.memory.failed_batches = embedder.out_of_memory
    for record in result.records:
        digest.update(repr(record).encode())
    result.trace_hash = digest.hexdigest()
    return result


def config_of(sections: Mapping[str, Any], *, has_pool: bool) -> Config:
    """Server configuration of the sections, with simulated models; raises ConfigError.

    Memory of an elastic pool moves between both, as with kvcached.
    """
    models = {"chat": {"model": "simulated"}, "embeddings": [{"model": "simulated-embeddings"}]}
    pool = {**sections.get("pool", {}), "kv_allocator": "kvcached" if has_pool else "static"}
    return parse({**sections, "models": models, "pool": pool})


@asynccontextmanager
async def started(
    generator: SimulatedGenerator,
    embedder: SimulatedEmbedder,
    machine: Machine,
    config: Config,
    lengths: LengthPredictor | None = None,
) -> AsyncIterator[Service]:
    """Runs the service on these engines; it is drained and stopped on leaving.

    Raises ConfigError for a configuration that the server refuses.
    """
    pool = machine.pool_bytes
    workspace = round(machine.workspace_batches * embedder.workspace_bytes)
    service = build_service(
        config,
        [generator],
        [embedder],
        workspace_bytes=workspace
        if pool is None
        else max(embedder.workspace_bytes, pool - generator.kv_bytes),
        device_memory=None if pool is None else lambda: ElasticMemory(pool, generator.kv_bytes),
        clock=LoopClock(),
        ticks=LoopTimers(),
        lengths=lengths,
    )
    await service.start()
    try:
        yield service
    finally:
        await service.stop()


async def _all_clients(
    service: Service, llm: SimulatedGenerator, offered: Sequence[Offered]
) -> list[SimulatedRecord]:
    """Starts each client when its request reaches the gate, simultaneous ones in the order given.

    Returns when all have ended.
    """
    loop = asyncio.get_running_loop()
    clients: dict[int, asyncio.Task[SimulatedRecord]] = {}
    times = [offer.at + offer.host_delay for offer in offered]
    for number in sorted(range(len(offered)), key=lambda n: (times[n], n)):
        offer = offered[number]
        if times[number] > loop.time():
            await asyncio.sleep(times[number] - loop.time())
        clients[number] = asyncio.create_task(_client(service, llm, number, offer))
    await asyncio.gather(*clients.values())
    return [clients[number].result() for number in range(len(offered))]


async def _client(service: Service, llm: SimulatedGenerator, number: int, offer: Offered) -> SimulatedRecord:
    hints = RequestHints(offer.service_class, **offer.objectives)
    arrival = after(service.gate.clock.now(), seconds(-offer.host_delay))
    origin = RequestOrigin(str(number), Caller(offer.tenant), hints, arrival)
    arrived_at = asyncio.get_running_loop().time() - offer.host_delay
    leaves_at = None if offer.leaves_after is None else arrived_at + offer.leaves_after
    ticket: Ticket | None = None
    try:
        async with asyncio.timeout_at(leaves_at) as patience:
            if isinstance(offer, SimulatedRequest):
                generation = await _generation(service, number, offer, origin)
                answer = await service.gate.generate(generation)
                ticket = answer.ticket
                await read_to_end(llm, generation.request.id, answer)
            else:
                inputs = [range(length) for length in offer.lengths]
                job = await service.intake.embeddings(origin, "simulated-embedding", inputs)
                ticket = (await service.gate.embed(job)).ticket
    except Rejected as rejected:
        return SimulatedRecord(number, f"rejected: {rejected.reject.reason}", rejected.request.arrival)
    except TimeoutError:
        if not patience.expired():
            raise
        if ticket is None:
            return SimulatedRecord(number, str(Outcome.ABORTED), arrival)
    assert ticket is not None
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


async def _generation(
    service: Service, number: int, offer: SimulatedRequest, origin: RequestOrigin
) -> GenerateJob:
    limit = offer.max_tokens or offer.output_tokens
    shared, group = offer.prefix_tokens, offer.prefix_group
    usual = partial(prompt_ids, number, offer.prompt_tokens, group=group, shared=shared)
    sampling = Sampling(limit, offer.sequences)
    prompt = (offer.prompt or usual)()
    return await service.intake.completion(origin, "simulated", prompt, max_tokens=limit, sampling=sampling)


async def _sample(service: Service, result: SimulationResult, every: float) -> None:
    loop = asyncio.get_running_loop()
    while True:
        result.presence.append((loop.time(), len(service.gate.tickets())))
        await asyncio.sleep(every)
