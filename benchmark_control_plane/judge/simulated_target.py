"""Target in virtual time: sends requests to the live gate on a simulated device.

Without the gate, requests go directly to the simulated engines, as with vLLM and an embedding server on one
device.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

from backends.cost_models.step_time import StepLoad, affine, embedding_line, llm_only, sequential
from backends.simulated.embedder import SimulatedEmbedder
from backends.simulated.generator import SimulatedGenerator
from benchmark_control_plane.judge.memory_sampler import Sample
from benchmark_control_plane.judge.records import PartialResponse
from benchmark_control_plane.judge.system_schema import SimulatedDeviceSection
from benchmark_control_plane.judge.workload import PlannedRequest
from benchmark_control_plane.simulator.distinct_prompts import prompt_ids
from benchmark_control_plane.simulator.simulated_machine import Machine, divide_pool, engines
from benchmark_control_plane.simulator.simulation import config_of, started
from benchmark_control_plane.simulator.token_reader import read_to_end
from controlplane.core.decision import Outcome
from controlplane.core.generation import Delta, Sampling
from controlplane.core.kv_geometry import KvGeometry
from controlplane.core.request import Kind, Request
from controlplane.service.request_jobs import Caller, EmbedJob, GenerateJob, RequestHints, RequestOrigin
from controlplane.service.service import Service
from controlplane.service.ticket import Rejected

BLOCK_TOKENS = 16
_BYTES_PER_ELEMENT = 2


@dataclass(slots=True)
class _BusyTime:
    """Seconds that a device has computed, its finished steps and passes."""

    seconds: float = 0.0

    def add(self, start: float, duration: float, load: StepLoad) -> None:
        """Observes a finished step."""
        self.seconds += duration


class SimulatedTarget:
    """A simulated system, with the gate or, if not `has_gate`, without it."""

    def __init__(
        self,
        service: Service,
        generator: SimulatedGenerator,
        embedder: SimulatedEmbedder,
        output_tokens: dict[str, int],
        busy: _BusyTime,
        *,
        has_gate: bool,
    ) -> None:
        self.service = service
        self._busy = busy
        self._generator = generator
        self._embedder = embedder
        self._output_tokens = output_tokens
        self._has_gate = has_gate
        self._sent = count()
        self._groups: dict[str, int] = {}

    async def send(self, planned: PlannedRequest, answer: PartialResponse) -> None:
        """Sends a request and fills `answer` in virtual time."""
        loop = asyncio.get_running_loop()
        answer.sent = loop.time()
        self._output_tokens[planned.id] = planned.output_tokens
        hints = RequestHints(planned.service_class, e2e_ms=planned.e2e_ms)
        origin = RequestOrigin(planned.id, Caller(planned.tenant), hints)
        try:
            if planned.kind is Kind.EMBED:
                inputs = [range(length) for length in planned.lengths]
                job = await self.service.intake.embeddings(origin, self._embedder.model, inputs)
                answer.decision = await self._embed(job)
            else:
                answer.decision = await self._generate(await self._generation(planned, origin), answer)
        except Rejected as rejected:
            answer.status = 429
            answer.loss = Outcome.EVICTED if rejected.is_evicted else Outcome.REJECTED
            answer.decision, answer.error = "REJECT", str(rejected.reject.reason)
            return
        answer.status, answer.ended = 200, loop.time()

    async def _generation(self, planned: PlannedRequest, origin: RequestOrigin) -> GenerateJob:
        limit = planned.max_tokens or planned.output_tokens
        group = self._groups.setdefault(planned.prefix_group, len(self._groups))
        prompt = prompt_ids(
            next(self._sent), planned.prompt_tokens, group=group, shared=planned.prefix_tokens
        )
        return await self.service.intake.completion(
            origin, self._generator.model, prompt,
            max_tokens=limit, sampling=Sampling(max_tokens=limit, n=planned.choices),
        )  # fmt: skip

    async def _generate(self, job: GenerateJob, answer: PartialResponse) -> str | None:
        loop = asyncio.get_running_loop()
        deltas: AsyncIterator[Delta]
        decision = None
        if self._has_gate:
            deltas = served = await self.service.gate.generate(job)
            decision = served.ticket.decision
        else:
            deltas = self._generator.generate(job.request, job.prompt, job.sampling)
        lengths, tokens, clock = Counter[int](), answer.tokens, loop.time

        def stamp(choice: int) -> None:
            """As at the gate, the longest choice counts; the response ends with the last token of any."""
            lengths[choice] = length = lengths[choice] + 1
            if length > len(tokens):
                tokens.append(clock())
            else:
                tokens[-1] = clock()

        await read_to_end(self._generator, job.request.id, deltas, on_token=stamp)
        answer.output_tokens = len(answer.tokens)
        return decision

    async def sample(self) -> Sample:
        """Bytes leased by the gate, or without the gate the bytes used by the engines; and busy time."""
        engine = self._generator.state()
        sample = {
            "busy_seconds": self._busy.seconds,
            "preemptions": float(engine.preemptions),
            "recompute_tokens": float(engine.recompute_tokens or 0),
        }
        if not self._has_gate:
            used = {"held:llm": engine.used_bytes, "held:embedding": self._embedder.pass_bytes}
            return sample | {"quota:llm": float(engine.total_bytes)} | {k: float(v) for k, v in used.items()}
        owners: Any = self.service.status.state()["owners"]
        for owner, state in owners.items():
            sample[f"held:{owner}"] = float(state["held_bytes"])
            sample[f"quota:{owner}"] = float(state["quota_bytes"])
        return sample

    async def _embed(self, job: EmbedJob) -> str | None:
        if self._has_gate:
            return (await self.service.gate.embed(job)).ticket.decision
        await self._embedder.embed(job.request, job.inputs, deadline=None)
        return None


@asynccontextmanager
async def simulated_target(
    device: SimulatedDeviceSection, sections: Mapping[str, Any], *, has_gate: bool
) -> AsyncIterator[SimulatedTarget]:
    """Starts the service on a simulated device; a static quota divides the pool once."""
    output_tokens: dict[str, int] = {}

    def length(request: Request) -> int:
        return output_tokens[request.id.rpartition("-")[0]]

    machine, config = _machine_of(device), config_of(sections, has_pool=device.pool is not None)
    if machine.pool_bytes is not None and has_gate and config.static_quota_reason() is not None:
        machine = divide_pool(machine, config.quota.llm.nominal)
    busy = _BusyTime()
    generator, embedder = engines(machine, length, config if has_gate else None, busy.add)
    async with started(generator, embedder, machine, config) as service:
        yield SimulatedTarget(service, generator, embedder, output_tokens, busy, has_gate=has_gate)


def _machine_of(device: SimulatedDeviceSection) -> Machine:
    step = sequential(
        llm_only(affine(*device.step)), embedding_line(*device.embedding, device.embedding_squares)
    )
    elements = device.kv_bytes_per_token // _BYTES_PER_ELEMENT
    return Machine(
        batch_time=step,
        geometry=KvGeometry(
            elements_per_token=elements, bytes_per_element=_BYTES_PER_ELEMENT, block_tokens=BLOCK_TOKENS
        ),
        kv_bytes=device.kv_memory or device.pool,
        max_model_tokens=device.max_model_tokens,
        max_running=device.max_running,
        step_tokens=device.step_tokens,
        embed_batch_tokens=device.embed_batch_tokens,
        workspace_batches=device.workspace_batches,
        embed_bytes_per_token=device.embed_bytes_per_token,
        embed_input_tokens=device.embed_input_tokens,
        pool_bytes=device.pool,
        has_prefix_cache=device.prefix_cache,
    )
