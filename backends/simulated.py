"""What would the gate do on hardware that is not here? An LLM and an embedding model on one simulated device.

Rule: both are queues in front of a `SimulatedDevice`, which gives each of its steps to both. The LLM batches
as `simulated_engine` says, with blocks of KV cache; embeddings go earliest deadline first. Nothing is
computed: tokens are all alike, and so are vectors.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from typing import Any

import numpy as np

from backends.batch_time import StepLoad
from backends.simulated_device import SimulatedDevice
from backends.simulated_engine import Engine
from backends.simulated_engine import Sequence as EngineSequence
from controlplane.core.clock import Duration, Instant, seconds, to_seconds
from controlplane.core.forecast import LengthForecast
from controlplane.core.geometry import KvGeometry
from controlplane.core.ports import (
    NEWCOMER,
    BackendDown,
    ChatPrompt,
    Delta,
    EmbeddingPass,
    EngineState,
    Refused,
    Sampling,
    Standing,
    Vectors,
)
from controlplane.core.request import Request

_TOKEN = 0
_TEXT = "w "
_QUEUED_AHEAD = 64
"""Requests in the engine's own queue that an unlimited pool has room for."""


@dataclass(eq=False, slots=True)
class _Sample(EngineSequence):
    """`answer` is set when it joins one; `capped` if max_tokens, not the answer's own end, stops it."""

    index: int = 0
    is_capped: bool = False
    answer: "_Answer" = field(init=False)


@dataclass(eq=False, slots=True)
class _Answer:
    samples: list[_Sample]
    deltas: deque[Delta] = field(default_factory=deque)
    waiter: asyncio.Future[None] | None = None
    lost: str | None = None

    def push(self, delta: Delta) -> None:
        self.deltas.append(delta)
        self.wake()

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def more(self) -> None:
        """Returns when there are deltas. Raises BackendDown."""
        if not self.deltas and self.lost is None:
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        if not self.deltas and self.lost is not None:
            raise BackendDown(f"simulated device: {self.lost}")


class SimulatedGenerator:
    """A `Generator`. `lengths` gives the true length of a request's answer, which nobody else sees.

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
        ample = geometry.bytes(max_model_tokens) * 2 * (max_running + _QUEUED_AHEAD)
        self.model = model
        self.orders = orders
        self.geometry = geometry
        self.kv_bytes = ample if blocks is None else blocks * geometry.bytes_per_block
        self.max_model_tokens = max_model_tokens
        self.max_running = max_running
        self._device = device
        self._lengths = lengths
        self._blocks = blocks
        self._engine: Engine[_Sample] = Engine(
            blocks=blocks,
            block_tokens=geometry.block_tokens,
            max_running=max_running,
            step_tokens=step_tokens,
        )
        self._answers: dict[str, _Answer] = {}
        self._tokens: dict[int, Delta] = {}
        self._gate_preemptions = 0
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
        standing: Standing = NEWCOMER,
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
        answer = _Answer(
            [_Sample(len(prompt), output, index=i, is_capped=is_capped) for i in range(sampling.n)]
        )
        for sample in answer.samples:
            sample.answer = answer
            self._engine.waiting.append(sample)
        self._answers[request.id] = answer
        self._device.wake()
        open_samples = sampling.n
        try:
            while open_samples:
                await answer.more()
                delta = answer.deltas.popleft()
                open_samples -= delta.finish_reason is not None
                yield delta
        finally:
            self._drop(answer)
            self._answers.pop(request.id, None)

    async def preempt(self, request_id: str) -> None:
        answer = self._answers.get(request_id)
        if answer is None:
            return
        for sample in self._drop(answer):
            self._gate_preemptions += 1
            answer.push(Delta(sample.index, "", (), finish_reason="preempted"))

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

    def state(self) -> EngineState:
        self._device.require_up()
        size, engine = self.geometry.bytes_per_block, self._engine
        held = {
            request_id: sum(sample.blocks for sample in answer.samples) * size
            for request_id, answer in self._answers.items()
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
        )

    def plan(self, load: StepLoad) -> bool:
        return self._engine.plan(load)

    def complete(self, duration: float) -> None:
        for sample in self._engine.complete():
            sample.answer.push(self._token(sample.index) if not sample.is_gone else _last(sample))

    def fail(self, reason: str) -> None:
        for answer in self._answers.values():
            self._drop(answer)
            answer.lost = reason
            answer.wake()

    def _drop(self, answer: _Answer) -> list[_Sample]:
        """Takes what has not ended out of the engine."""
        left = [sample for sample in answer.samples if not sample.is_gone]
        for sample in left:
            self._engine.remove(sample)
        return left

    def _token(self, index: int) -> Delta:
        # All alike, so one serves for all: making each would cost more than the rest of a step.
        if index not in self._tokens:
            self._tokens[index] = Delta(index, _TEXT, (_TOKEN,))
        return self._tokens[index]


def _last(sample: _Sample) -> Delta:
    reason = "length" if sample.is_capped else "stop"
    return Delta(sample.index, _TEXT, (_TOKEN,), finish_reason=reason)


@dataclass(eq=False, slots=True)
class _Call:
    """`left` inputs are to be computed still; `lengths` holds those in no batch yet."""

    lengths: list[int]
    left: int
    done: asyncio.Future[None]


class SimulatedEmbedder:
    """An `Embedder`: one batch a step, earliest deadline first, padded to its longest input."""

    def __init__(
        self,
        device: SimulatedDevice,
        *,
        model: str = "simulated-embedding",
        dimension: int = 8,
        max_input_tokens: int = 512,
        batch_tokens: int = 16_384,
        bytes_per_token: int = 1_024,
        max_running: int = 256,
    ) -> None:
        if batch_tokens < max_input_tokens:
            raise ValueError(
                f"batch_tokens={batch_tokens}: an input of max_input_tokens={max_input_tokens} must fit a "
                "batch; raise it"
            )
        self.model = model
        self.dimension = dimension
        self.supported_dimensions: Sequence[int] = (dimension,)
        self.max_input_tokens = max_input_tokens
        self.max_running = max_running
        self.on_pass: Callable[[EmbeddingPass], None] | None = None
        self.batch_limit: Callable[[], Duration | None] | None = None
        self.prompts: Mapping[str, str] = {}
        self.budget_bytes = batch_tokens * bytes_per_token
        self._device = device
        self._batch_tokens = batch_tokens
        self._bytes_per_token = bytes_per_token
        self._serial = count()
        self._queue: list[tuple[float, int, _Call]] = []
        self._batch: list[tuple[_Call, int]] = []
        self._calls: dict[_Call, None] = {}
        self._padded = 0
        device.attach(self)

    @property
    def workspace_bytes(self) -> int:
        return self._batch_tokens * self._bytes_per_token

    async def start(self) -> None:
        self._device.start()

    async def stop(self) -> None:
        await self._device.stop()

    async def check(self) -> None:
        self._device.require_up()

    def set_budget_bytes(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._device.wake()

    def batch_time(self, token_counts: Sequence[int]) -> Duration:
        """Longest first, with the device to themselves."""
        ordered, took = sorted(token_counts, reverse=True), 0.0
        while ordered:
            inputs = max(1, self._tokens_now() // ordered[0])
            took += self._device.duration(StepLoad(inputs=len(ordered[:inputs]), length=ordered[0]))
            del ordered[:inputs]
        return seconds(took)

    async def tokenize(self, texts: Sequence[str], *, prompt: str | None = None) -> list[list[int]]:
        await self.check()
        return [list(text.encode()) for text in texts]

    def batch_bytes(self, token_counts: Sequence[int]) -> int:
        padded = len(token_counts) * max(token_counts, default=0)
        return min(padded, self._batch_tokens) * self._bytes_per_token

    async def embed(
        self, request: Request, inputs: Sequence[Sequence[int]], *, deadline: Instant | None
    ) -> Vectors:
        self._device.require_up()
        # Longest first, so that what shares a batch is of like length; taken from the end.
        lengths = sorted(len(ids) for ids in inputs)
        call = _Call(lengths, len(lengths), asyncio.get_running_loop().create_future())
        rank = float("inf") if deadline is None else float(deadline)
        self._calls[call] = None
        heappush(self._queue, (rank, next(self._serial), call))
        self._device.wake()
        try:
            await call.done
        finally:
            call.lengths.clear()
            del self._calls[call]
        return np.full((len(inputs), self.dimension), self.dimension**-0.5, dtype=np.float32)

    def plan(self, load: StepLoad) -> bool:
        longest, budget = 0, self._tokens_now()
        limit = None if self.batch_limit is None else self.batch_limit()
        self._batch = []
        while self._queue:
            call = self._queue[0][2]
            while call.lengths:
                wider = max(longest, call.lengths[-1])
                if self._batch and not self._fits(load, len(self._batch) + 1, wider, budget, limit):
                    break
                longest = wider
                self._batch.append((call, call.lengths.pop()))
            if call.lengths:
                break
            heappop(self._queue)
        load.inputs, load.length = len(self._batch), longest
        self._padded = longest * len(self._batch)
        return bool(self._batch)

    def _tokens_now(self) -> int:
        return min(self._batch_tokens, self.budget_bytes // self._bytes_per_token)

    def _fits(self, beside: StepLoad, inputs: int, length: int, budget: int, limit: Duration | None) -> bool:
        """`limit` is what the batch may add to the step beside it."""
        if inputs * length > budget or limit is None:
            return inputs * length <= budget
        alone = self._device.duration(beside) if beside.has_llm else 0.0
        together = self._device.duration(replace(beside, inputs=inputs, length=length))
        return together - alone <= to_seconds(limit)

    def complete(self, duration: float) -> None:
        if self.on_pass is not None:
            tokens = sum(length for _, length in self._batch)
            self.on_pass(EmbeddingPass(len(self._batch), tokens, self._padded, seconds(duration)))
        for call, _ in self._batch:
            call.left -= 1
            if not call.left and not call.done.done():
                call.done.set_result(None)

    def fail(self, reason: str) -> None:
        self._queue.clear()
        for call in self._calls:
            if not call.done.done():
                call.done.set_exception(BackendDown(f"simulated device: {reason}"))
