"""Simulated LLM on a simulated device.

Requests queue in front of a `SimulatedDevice`, which gives each of its steps to all kinds of work.
`SimulatedScheduler` forms the LLM's batches over blocks of KV cache. Nothing is computed: all tokens are
equal.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from backends.cost_models.step_time import StepLoad
from backends.simulated.continuous_batching import SimulatedScheduler
from backends.simulated.continuous_batching import SimulatedSequence as EngineSequence
from backends.simulated.shared_device import SimulatedDevice
from controlplane.core.clock import seconds
from controlplane.core.errors import BackendDown, Refused
from controlplane.core.forecast import LengthForecast
from controlplane.core.generation import FIRST_HANDOFF, ChatPrompt, Delta, Handoff, Sampling
from controlplane.core.kv_geometry import KvGeometry
from controlplane.core.ports import EngineState, EngineStep, StepCost
from controlplane.core.request import Request

_TOKEN = 0
_TEXT = "w "
_EXTRA_QUEUED = 64
"""Requests waiting in the engine that an unlimited pool also has room for."""


@dataclass(eq=False, slots=True)
class _Sample(EngineSequence):
    """One sequence of a generation; `is_capped` if max_tokens rather than an end of sequence stops it."""

    index: int = 0
    is_capped: bool = False
    generation: "_Generation" = field(init=False)


@dataclass(eq=False, slots=True)
class _Generation:
    """The samples of one request and the deltas not yet read by its stream."""

    samples: list[_Sample]
    deltas: deque[Delta] = field(default_factory=deque)
    waiter: asyncio.Future[None] | None = None
    down_reason: str | None = None

    def push(self, delta: Delta) -> None:
        """Adds a delta and wakes the stream."""
        self.deltas.append(delta)
        self.wake()

    def wake(self) -> None:
        """Wakes the stream."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def wait_for_delta(self) -> None:
        """Returns when a delta is available. Raises BackendDown if the device is down."""
        if not self.deltas and self.down_reason is None:
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        if not self.deltas and self.down_reason is not None:
            raise BackendDown(f"simulated device: {self.down_reason}")


class SimulatedGenerator:
    """`Generator` on a `SimulatedDevice`.

    Args:
        device: shared device.
        geometry: size of blocks and tokens of the KV cache.
        lengths: true output length of a request, which the gate does not see.
        kv_bytes: KV cache; None for no limit in the engine, the gate then sees a pool in which all requests
            fit.
        model: name.
        max_model_tokens: longest sequence.
        max_running: sequences in a batch.
        step_tokens: tokens in a step (chunked prefill).
        orders: enforce a quota and report the bytes of each request; the order stays FCFS.
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
        has_own_scheduler: bool = False,
    ) -> None:
        blocks = None if kv_bytes is None else kv_bytes // geometry.bytes_per_block
        if blocks is not None and blocks < geometry.blocks(max_model_tokens):
            raise ValueError(
                f"kv_bytes={kv_bytes}: {blocks} blocks, but a sequence of "
                f"max_model_tokens={max_model_tokens} takes {geometry.blocks(max_model_tokens)} and would "
                "never finish; change either"
            )
        ample = geometry.bytes(max_model_tokens) * 2 * (max_running + _EXTRA_QUEUED)
        self.model = model
        self.stall_count = 0
        self.has_own_scheduler = has_own_scheduler
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
        """Starts the device if it is stopped."""
        self._device.start()

    async def stop(self) -> None:
        """Stops the device if no other backend uses it."""
        await self._device.stop()

    async def check(self) -> None:
        """Raises BackendDown if the device is down."""
        self._device.require_up()

    async def tokenize(self, text: str) -> list[int]:
        """One token per UTF-8 byte."""
        await self.check()
        return list(text.encode())

    async def render_chat(self, prompt: ChatPrompt) -> list[int]:
        """Concatenates the contents of the messages."""
        await self.check()
        return list("".join(str(message.get("content") or "") for message in prompt.messages).encode())

    async def generate(
        self,
        request: Request,
        prompt: Sequence[int],
        sampling: Sampling,
        chat: ChatPrompt | None = None,
        *,
        handoff: Handoff = FIRST_HANDOFF,
    ) -> AsyncGenerator[Delta]:
        """Streams one delta per token and sample. Raises Refused if prompt and output do not fit."""
        self._device.require_up()
        if sampling.max_tokens < 1 or len(prompt) + sampling.max_tokens > self.max_model_tokens:
            raise Refused(
                f"{len(prompt)} prompt tokens and max_tokens={sampling.max_tokens}: the simulated model "
                f"generates at least 1 and holds {self.max_model_tokens}; change prompt or max_tokens",
                param="max_tokens",
            )
        # A resumed request has its previous output in the prompt.
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
        """Removes the request from the engine and ends its stream with `preempted`."""
        generation = self._generations.get(request_id)
        if generation is None:
            return
        self._gate_recompute_tokens += sum(sample.computed for sample in generation.samples)
        for sample in self._remove(generation):
            self._gate_preemptions += 1
            generation.push(Delta(sample.index, "", (), finish_reason="preempted"))

    async def set_quota(self, quota_bytes: int) -> None:
        """Sets the quota, from the next step on. Raises Refused outside one block to `kv_bytes`."""
        blocks = quota_bytes // self.geometry.bytes_per_block
        if not self.has_own_scheduler or self._blocks is None:
            raise Refused(
                f"{self.model!r} enforces no quota; create it with kv_bytes and has_own_scheduler=True"
            )
        if not 1 <= blocks <= self._blocks:
            raise Refused(f"quota of {quota_bytes} bytes: choose one block to {self.kv_bytes} bytes")
        self._engine.set_quota(blocks)
        self._device.wake()

    async def set_options(self, changes: Mapping[str, Any]) -> None:
        """Raises Refused: the simulated scheduler has no options."""
        raise Refused(f"{self.model!r} schedules FCFS only and has no options; remove them")

    def set_forecast(self, request_id: str, forecast: LengthForecast) -> None:
        """Does nothing: the simulated scheduler uses no forecast."""

    def set_device_contention(self, *, is_shared: bool) -> None:
        """Does nothing: the device itself shares its steps."""

    def state(self) -> EngineState:
        """Memory, queues and preemptions now. Raises BackendDown if the device is down."""
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
            quota_bytes=quota if self.has_own_scheduler else None,
            ceded_bytes=self.kv_bytes - max(quota, used),
            held_bytes={name: size for name, size in held.items() if size}
            if self.has_own_scheduler
            else None,
            recompute_tokens=engine.recompute_tokens + self._gate_recompute_tokens,
        )

    @property
    def step_bytes(self) -> int:
        """Bytes of all blocks in use in the step planned last."""
        return (self._engine.quota - self._engine.free_blocks) * self.geometry.bytes_per_block

    def plan(self, load: StepLoad) -> bool:
        """Adds the LLM's next batch to `load`."""
        has_work = self._engine.plan(load)
        self._step_counts = (load.prefill_tokens, load.decodes, load.cells)
        return has_work

    def complete(self, duration: float) -> None:
        """Delivers the tokens of the planned step."""
        if self.on_step is not None:
            self.on_step(EngineStep(*self._step_counts, seconds(duration)))
        for sample in self._engine.complete():
            sample.generation.push(
                self._token(sample.index) if not sample.is_removed else _final_delta(sample)
            )

    def fail(self, reason: str) -> None:
        """Fails all generations with BackendDown."""
        for generation in self._generations.values():
            self._remove(generation)
            generation.down_reason = reason
            generation.wake()

    def _remove(self, generation: _Generation) -> list[_Sample]:
        """Removes the unfinished samples from the engine and returns them."""
        left = [sample for sample in generation.samples if not sample.is_removed]
        for sample in left:
            self._engine.remove(sample)
        return left

    def _token(self, index: int) -> Delta:
        # Shared between requests: creating a delta per token would cost more than the rest of a step.
        if index not in self._tokens:
            self._tokens[index] = Delta(index, _TEXT, (_TOKEN,))
        return self._tokens[index]


def _final_delta(sample: _Sample) -> Delta:
    reason = "length" if sample.is_capped else "stop"
    return Delta(sample.index, _TEXT, (_TOKEN,), finish_reason=reason)
