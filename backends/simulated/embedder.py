"""Simulated embedding model on a simulated device: one batch per step, in deadline order.

Calls are ordered by `on_time_first`. A batch is padded to its longest input and bounded by the budget in
bytes and by the time limit; a single input is never split. Nothing is computed: all vectors are equal.
"""

import asyncio
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import inf

import numpy as np

from backends.cost_models.step_time import StepLoad
from backends.embedding.deadline_order import (
    DeadlineKey,
    ServiceRate,
    by_key,
    deadline_key,
    on_time_first,
    time_left,
)
from backends.embedding.pair_template import PairTemplate
from backends.embedding.truncation import Truncation
from backends.simulated.shared_device import SimulatedDevice
from controlplane.core.clock import Duration, Instant, between, seconds
from controlplane.core.engine_reports import DeviceSharing
from controlplane.core.errors import BackendDown
from controlplane.core.ports import EmbeddingPass, PauseCost, TruncationSide, Vectors
from controlplane.core.request import Request
from controlplane.policy.sharing.pass_size import LongestPass, PendingWork, call_values, inputs_to_compute

_RETRY_SECONDS = {DeviceSharing.TURNS: 0.001, DeviceSharing.BESIDE: 0.005, DeviceSharing.IDLE: 0.005}
"""After so long a pass that was not worth its cost is decided again, beside the LLM as by `PassSender`."""


@dataclass(eq=False, slots=True)
class _Call:
    """A call; `lengths` are its inputs in no batch yet.

    `inputs_left` and `tokens` count the inputs that are not computed yet.
    """

    lengths: list[int]
    inputs_left: int
    tokens: int
    key: DeadlineKey
    weight: float
    done: asyncio.Future[None]


class SimulatedEmbedder:
    """`Embedder` on a `SimulatedDevice`; with `dimension=2` also a `Reranker`.

    No LLM is on its `device` if passes do not take turns (`sharing`); in the idle class they have no cost.
    `room` returns the bytes that the device really has for a batch. A batch that takes more runs out of
    memory: its step is lost and it is retried at half the size.
    """

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
        room: Callable[[], int] | None = None,
        sharing: DeviceSharing = DeviceSharing.TURNS,
    ) -> None:
        """Attaches the embedder to `device`; `room` simulates a shortage of memory.

        Raises ValueError if an input of `max_input_tokens` does not fit a batch.
        """
        if batch_tokens < max_input_tokens:
            raise ValueError(
                f"batch_tokens={batch_tokens}: a batch must fit an input of max_input_tokens="
                f"{max_input_tokens}; raise batch_tokens"
            )
        self.model = model
        self.dimension = dimension
        self.supported_dimensions: Sequence[int] = (dimension,)
        self.max_input_tokens = max_input_tokens
        self.max_token_characters = 1
        self.vocabulary = 2**32
        self.special_tokens: tuple[Sequence[int], Sequence[int]] = ((), ())
        self.max_running = max_running
        self.on_pass: Callable[[EmbeddingPass], None] | None = None
        self.on_computing: Callable[[bool], None] | None = None
        self.pause_cost: Callable[[], PauseCost | None] | None = None
        self.prompts: Mapping[str, str] = {}
        self.retry_at: float | None = None
        self.budget_bytes = batch_tokens * bytes_per_token
        self.allocator_bytes = self.stall_count = self.restarts = self.out_of_memory = 0
        self._device = device
        self._batch_tokens = batch_tokens
        self._bytes_per_token = bytes_per_token
        self._serial = count()
        self._queue: list[_Call] = []
        self._batch: list[tuple[_Call, int]] = []
        self._calls: dict[str, _Call] = {}
        self._rate = ServiceRate()
        self._longest_pass = LongestPass()
        self._last_end = Instant(0)
        self._priced: Duration | None = None
        self._padded = 0
        self._room = room
        self.sharing = sharing
        self._was_computing = False
        self._oom_limit_tokens = batch_tokens
        device.attach(self)

    @property
    def down(self) -> str | None:
        """Why the device computes nothing; None while it is up."""
        return self._device.down

    @property
    def is_computing(self) -> bool:
        """Whether the current step has an embedding batch."""
        return bool(self._batch)

    def tokens_left(self, request_id: str) -> int | None:
        """Tokens of the request that are not computed yet; None for an unknown request."""
        call = self._calls.get(request_id)
        return None if call is None else call.tokens

    @property
    def pass_tokens(self) -> int:
        """Most padded tokens of one pass."""
        return self._batch_tokens

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the largest batch."""
        return self._batch_tokens * self._bytes_per_token

    async def start(self) -> None:
        """Starts the device if it is stopped."""
        self._device.start()

    async def stop(self) -> None:
        """Stops the device if no other backend uses it."""
        await self._device.stop()

    async def check(self) -> None:
        """Raises BackendDown if the device is down."""
        self._device.require_up()

    def set_budget_bytes(self, budget_bytes: int) -> None:
        """Sets the bytes of a batch, from the next one on."""
        self.budget_bytes = budget_bytes
        self._device.wake()

    def batch_time(self, token_counts: Sequence[int]) -> Duration:
        """Time of these inputs, longest first, on an otherwise idle device."""
        ordered, took = sorted(token_counts, reverse=True), 0.0
        while ordered:
            inputs = max(1, self._batch_budget_tokens() // ordered[0])
            took += self._device.duration(StepLoad(inputs=len(ordered[:inputs]), length=ordered[0]))
            del ordered[:inputs]
        return seconds(took)

    async def tokenize(self, texts: Sequence[str], *, prompt: str | None = None) -> list[list[int]]:
        """One token per UTF-8 byte."""
        await self.check()
        return [list(text.encode()) for text in texts]

    def truncate(
        self, token_ids: Sequence[int], limit: int, side: TruncationSide | None = None
    ) -> Sequence[int]:
        """Cuts `token_ids` to `limit`."""
        return Truncation().truncate(token_ids, limit, side)

    def pair(
        self, query: Sequence[int], document: Sequence[int], limit: int, side: TruncationSide | None = None
    ) -> Sequence[int]:
        """Joins both without special tokens."""
        return PairTemplate((), (), (), 0).join(query, document, limit, side)

    def batch_bytes(self, token_counts: Sequence[int]) -> int:
        """Largest number of bytes that these inputs take while they are computed."""
        longest = max(token_counts, default=0)
        padded = len(token_counts) * longest
        return min(padded, max(longest, self._batch_budget_tokens())) * self._bytes_per_token

    async def embed(
        self, request: Request, inputs: Sequence[Sequence[int]], *, deadline: Instant | None
    ) -> Vectors:
        """Returns equal unit vectors once all inputs were in a batch."""
        self._device.require_up()
        # Sorted so that a batch holds inputs of similar length; taken from the end, longest first.
        lengths = sorted(len(ids) for ids in inputs)
        key, done = deadline_key(deadline, next(self._serial)), asyncio.get_running_loop().create_future()
        self._longest_pass.record(None if deadline is None else between(request.arrival, deadline))
        call = _Call(lengths, len(lengths), sum(lengths), key, request.service_class.weight, done)
        self._calls[request.id] = call
        insort(self._queue, call, key=by_key)
        self._device.wake()
        try:
            await call.done
        finally:
            if call in self._queue:
                self._queue.remove(call)
            self._calls.pop(request.id, None)
        return np.full((len(inputs), self.dimension), self.dimension**-0.5, dtype=np.float32)

    def plan(self, load: StepLoad) -> bool:
        """Adds the next batch to `load`."""
        now = self._device.now()
        self._batch = []
        longest = self._compose_batch(load, now) if self._queue else 0
        self._padded, attempted = longest * len(self._batch), len(self._batch)
        has_failed = self._room is not None and self.pass_bytes > self._room()
        if has_failed:
            self._requeue_batch()
        else:
            self._oom_limit_tokens = min(
                self._batch_tokens, self._oom_limit_tokens + self._oom_limit_tokens // 16 + 1
            )
        if self._batch:
            self._rate.pass_started(now)
        # Without LLM work a failed batch must still take a step, or the device would go idle and never retry.
        is_step = bool(self._batch) or (has_failed and attempted > 0 and not load.has_llm)
        load.inputs, load.length = (attempted, longest) if is_step else (0, 0)
        # What a pass costs changes with every step, and with time if the LLM makes none.
        retry_seconds = _RETRY_SECONDS[self.sharing]
        self.retry_at = now / 1e9 + retry_seconds if self._queue and not is_step else None
        self._announce()
        return is_step

    def _announce(self) -> None:
        """Calls `on_computing` if a pass has begun, or has ended."""
        if self.is_computing is not self._was_computing:
            self._was_computing = self.is_computing
            if self.on_computing is not None:
                self.on_computing(self.is_computing)

    def _compose_batch(self, load: StepLoad, now: Instant) -> int:
        """Moves inputs from the queue to the next batch; returns the length of the longest."""
        llm_seconds = self._device.duration(load) if load.has_llm else 0.0
        step = replace(load)

        def took(inputs: int, length: int) -> Duration:
            step.inputs, step.length = inputs, length
            return seconds(self._device.duration(step) - llm_seconds)

        def left(call: _Call) -> Duration | None:
            # A pass ends with the step that it is part of.
            found = time_left(call.key, now)
            return None if found is None else Duration(found - seconds(llm_seconds))

        calls = list(on_time_first(self._queue, now, self._rate.ns_per_token))
        values = call_values(
            (
                PendingWork(call.weight, left(call), took(len(call.lengths), call.lengths[-1]))
                for call in calls
            ),
            seconds(llm_seconds),
        )
        candidates: list[tuple[_Call, float]] = []
        budget, most_padding = self._batch_budget_tokens(), self._most_padding()
        longest: list[int] = []
        tokens, is_full = 0, False
        for call, value in zip(calls, values, strict=True):
            for length in reversed(call.lengths):
                padded, inputs = max(length, longest[-1] if longest else 0), len(candidates) + 1
                is_full = bool(candidates) and inputs * padded > budget
                if is_full or (candidates and inputs * padded - tokens - length > most_padding):
                    break
                candidates.append((call, value * length / call.tokens))
                longest.append(padded)
                tokens += length
            if is_full:
                break
        most = self._longest_pass.inputs(
            len(candidates), lambda inputs: took(inputs, longest[inputs - 1]), seconds(self._start_seconds())
        )
        del candidates[most:]
        cost = None if self.pause_cost is None or self.sharing is DeviceSharing.IDLE else self.pause_cost()
        size = inputs_to_compute(
            [value for _, value in candidates],
            lambda inputs: took(inputs, longest[inputs - 1]),
            cost,
            between(self._last_end, now),
        )
        self._priced = took(size, longest[size - 1]) if size and cost is not None else None
        for call, _ in candidates[:size]:
            self._batch.append((call, call.lengths.pop()))
            if not call.lengths:
                self._queue.remove(call)
        return longest[size - 1] if size else 0

    def _most_padding(self) -> float:
        """Padding in tokens up to which inputs share a pass.

        A worker beside the LLM starts another pass where padding would cost more than that
        (`backends.embedding.batcher`); in turns, another pass would delay a further step.
        """
        if self.sharing is DeviceSharing.TURNS:
            return inf
        per_token = self._device.duration(StepLoad(inputs=1, length=1)) - self._start_seconds()
        return self._start_seconds() / per_token if per_token > 0.0 else inf

    def _start_seconds(self) -> float:
        """Time of a pass that does not depend on its inputs."""
        one, two = (self._device.duration(StepLoad(inputs=inputs, length=1)) for inputs in (1, 2))
        return one - (two - one)

    @property
    def pass_bytes(self) -> int:
        """Bytes of the current batch."""
        return self._padded * self._bytes_per_token

    def _requeue_batch(self) -> None:
        """Handles out of memory: halves the bound and returns all inputs to their calls."""
        self.out_of_memory += 1
        self._oom_limit_tokens = max(1, self._padded // 2)
        for call, length in reversed(self._batch):
            if not call.lengths:
                insort(self._queue, call, key=by_key)
            call.lengths.append(length)
        self._batch, self._padded = [], 0

    def _batch_budget_tokens(self) -> int:
        return min(self._batch_tokens, self._oom_limit_tokens, self.budget_bytes // self._bytes_per_token)

    def complete(self, duration: float) -> None:
        """Completes the calls whose last input was in the batch."""
        for call, length in self._batch:
            call.inputs_left -= 1
            call.tokens -= length
            if not call.inputs_left and not call.done.done():
                call.done.set_result(None)
        tokens, self._last_end = sum(length for _, length in self._batch), self._device.now()
        self._rate.pass_finished(self._last_end, tokens)
        self._rate.idle()
        if self.on_pass is not None and self._batch:
            took = seconds(duration)
            self.on_pass(EmbeddingPass(len(self._batch), tokens, self._padded, took, priced=self._priced))
        self._batch = []
        self._announce()

    def fail(self, reason: str) -> None:
        """Fails all calls with BackendDown."""
        self._queue.clear()
        self._batch = []
        self._announce()
        for call in self._calls.values():
            if not call.done.done():
                call.done.set_exception(BackendDown(f"simulated device: {reason}"))
