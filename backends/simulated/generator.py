"""What would the gate do with an LLM on hardware that is not here? One on a simulated device.

Rule: requests queue in front of a `SimulatedDevice`, which gives each of its steps to all kinds of work. The
LLM batches as `simulated_engine` says, with blocks of KV cache. Nothing is computed: tokens are all alike.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from backends.cost_models.step_time import StepLoad
from backends.simulated.device import SimulatedDevice
from backends.simulated.scheduler import Sequence as EngineSequence
from backends.simulated.scheduler import SimulatedScheduler
from controlplane.core.clock import seconds
from controlplane.core.errors import BackendDown, Refused
from controlplane.core.forecast import LengthForecast
from controlplane.core.generation import FIRST_HANDOFF, ChatPrompt, Delta, Handoff, Sampling
from controlplane.core.geometry import KvGeometry
from controlplane.core.ports import EngineState, EngineStep, StepCost
from controlplane.core.request import Request

_TOKEN = 0
_TEXT = "w "
_EXTRA_QUEUED = 64
"""Requests in the engine's own queue that an unlimited pool has room for."""


@dataclass(eq=False, slots=True)
class _Sample(EngineSequence):
    """`generation` is set when it joins one; `capped` if max_tokens, not the generation's own end, stops it."""

    index: int = 0
    is_capped: bool = False
    generation: "_Generation" = field(init=False)


@dataclass(eq=False, slots=True)
class _Generation:
    samples: list[_Sample]
    deltas: deque[Delta] = field(default_factory=deque)
    waiter: asyncio.Future[None] | None = None
    down_reason: str | None = None

    def push(self, delta: Delta) -> None:
        self.deltas.append(delta)
        self.wake()

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def wait_for_delta(self) -> None:
        """Returns when there are deltas. Raises BackendDown."""
        if not self.deltas and self.down_reason is None:
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        if not self.deltas and self.down_reason is not None:
            raise BackendDown(f"simulated device: {self.down_reason}")


class SimulatedGenerator:
    """A `Generator`. `lengths` gives the true length of a request's generation, which nobody else sees.

    `kv_bytes` None puts no limit on memory in the engine; the gate is told of a pool that all fit in.
    One that `orders` keeps to a quota and says what each request holds; its order stays first come.
    """

    def __init__(
        self,
        device: SimulatedDevice,
        *,
        geometry: KvGeometry,
        lengths: Callable[[Request], int],
        kv_bytes: int | None,
        model: str = "simulated",
        max_model_tokens: int = 4_096,
        max_running: int = 256,
        step_tokens: int = 2_048,
        orders: bool = False,
    ) -> None:
        blocks = None if kv_bytes is None else kv_bytes // geometry.bytes_per_block
        if blocks is not None and blocks < geometry.blocks(max_model_tokens):
            raise ValueError(
                f"kv_bytes={kv_bytes}: {blocks} blocks, but one of max_model_tokens={max_model_tokens} "
                f"takes {geometry.blocks(max_model_tokens)} and would never finish; change one of them"
            )
        ample = geometry.bytes(max_model_tokens) * 2 * (max_running + _EXTRA_QUEUED)
        self.model = model
        self.stall_count = 0
        self.orders = orders
        self.step_cost: StepCost | None = None
        self.on_step: Callable[[EngineStep], None] | None = None
        self.geometry = geometry
        self.kv_bytes = ample if blocks is None else blocks * geometry.bytes_per_block
        self.max_model_tokens = max_model_tokens
        self.max_running = max_running
        self._device = device
        self._lengths = lengths
        self._blocks = blocks
        self._engine: SimulatedScheduler[_Sample] = SimulatedScheduler(
            blocks=blocks,
            block_tokens=geometry.block_tokens,
            max_running=max_running,
            step_tokens=step_tokens,
        )
        self._generations: dict[str, _Generation] = {}
        self._tokens: dict[int, Delta] = {}
        self._step_counts = (0, 0, 0)
        self._gate_preemptions = 0
        self._gate_recompute_tokens = 0
        device.attach(self)

    async def start(self) -> None:
        self._device.start()

    async def stop(self) -> None:
        await self._device.stop()

    async def check(self) -> None:
        self._device.require_up()

    async def tokenize(self, text: str) -> list[int]:
        await self.check()
        return list(text.encode())

    async def render_chat(self, prompt: ChatPrompt) -> list[int]:
        await self.check()
        return list("".join(str(message.get("content") or "") for message in prompt.messages).encode())

    async def generate(
        self,
        request: Request,
        prompt: Sequence[int],
        sampling: Sampling,
        chat: ChatPrompt | None = None,
        *,
        standing: Handoff = FIRST_HANDOFF,
    ) -> AsyncGenerator[Delta]:
        self._device.require_up()
        if sampling.max_tokens < 1 or len(prompt) + sampling.max_tokens > self.max_model_tokens:
            raise Refused(
                f"{len(prompt)} prompt tokens and {sampling.max_tokens} to come: the simulated model "
                f"generates at least 1 and holds {self.max_model_tokens}; change prompt or max_tokens",
                param="max_tokens",
            )
        # A resumed request brings its output so far as prompt.
        left = self._lengths(request) - (len(prompt) - request.prompt_tokens)
        output = max(1, min(left, sampling.max_tokens))
        is_capped = left >= sampling.max_tokens
        generation = _Generation(
            [_Sample(len(prompt), output, index=i, is_capped=is_capped) for i in range(sampling.n)]
        )
        for sample in generation.samples:
            sample.generation = generation
            self._engine.waiting.append(sample)
        self._generations[request.id] = generation
        self._device.wake()
        open_samples = sampling.n
        try:
            while open_samples:
                await generation.wait_for_delta()
                delta = generation.deltas.popleft()
                open_samples -= delta.finish_reason is not None
                yield delta
        finally:
            self._remove(generation)
            self._generations.pop(request.id, None)

    async def preempt(self, request_id: str) -> None:
        generation = self._generations.get(request_id)
        if generation is None:
            return
        self._gate_recompute_tokens += sum(sample.computed for sample in generation.samples)
        for sample in self._remove(generation):
            self._gate_preemptions += 1
            generation.push(Delta(sample.index, "", (), finish_reason="preempted"))

    async def set_quota(self, quota_bytes: int) -> None:
        blocks = quota_bytes // self.geometry.bytes_per_block
        if not self.orders or self._blocks is None:
            raise Refused(f"{self.model!r} keeps to no quota; make it with kv_bytes and orders=True")
        if not 1 <= blocks <= self._blocks:
            raise Refused(f"quota of {quota_bytes} bytes: from one block to {self.kv_bytes}")
        self._engine.set_quota(blocks)
        self._device.wake()

    async def set_options(self, changes: Mapping[str, Any]) -> None:
        raise Refused(f"{self.model!r} serves first come only; it has no options")

    def set_forecast(self, request_id: str, forecast: LengthForecast) -> None:
        pass

    def set_device_contention(self, *, is_shared: bool) -> None:
        pass

    def state(self) -> EngineState:
        self._device.require_up()
        size, engine = self.geometry.bytes_per_block, self._engine
        held = {
            request_id: sum(sample.blocks for sample in generation.samples) * size
            for request_id, generation in self._generations.items()
        }
        used = sum(held.values())
        quota = min(engine.quota * size, self.kv_bytes)
        return EngineState(
            used_bytes=used,
            total_bytes=self.kv_bytes,
            running=len(engine.running),
            waiting=len(engine.waiting),
            preemptions=engine.preemptions + self._gate_preemptions,
            quota_bytes=quota if self.orders else None,
            ceded_bytes=self.kv_bytes - max(quota, used),
            held_bytes={name: size for name, size in held.items() if size} if self.orders else None,
            recompute_tokens=engine.recompute_tokens + self._gate_recompute_tokens,
        )

    @property
    def step_bytes(self) -> int:
        """Of all blocks in use in the step that was planned last."""
        return (self._engine.quota - self._engine.free_blocks) * self.geometry.bytes_per_block

    def plan(self, load: StepLoad) -> bool:
        has_work = self._engine.plan(load)
        self._step_counts = (load.prefill_tokens, load.decodes, load.cells)
        return has_work

    def complete(self, duration: float) -> None:
        if self.on_step is not None:
            self.on_step(EngineStep(*self._step_counts, seconds(duration)))
        for sample in self._engine.complete():
            sample.generation.push(self._token(sample.index) if not sample.is_gone else _final_delta(sample))

    def fail(self, reason: str) -> None:
        for generation in self._generations.values():
            self._remove(generation)
            generation.down_reason = reason
            generation.wake()

    def _remove(self, generation: _Generation) -> list[_Sample]:
        """Takes what has not ended out of the engine."""
        left = [sample for sample in generation.samples if not sample.is_gone]
        for sample in left:
            self._engine.remove(sample)
        return left

    def _token(self, index: int) -> Delta:
        # All alike, so one serves for all: making each would cost more than the rest of a step.
        if index not in self._tokens:
            self._tokens[index] = Delta(index, _TEXT, (_TOKEN,))
        return self._tokens[index]


def _final_delta(sample: _Sample) -> Delta:
    reason = "length" if sample.is_capped else "stop"
    return Delta(sample.index, _TEXT, (_TOKEN,), finish_reason=reason)
