"""How does the server get vectors? It queues inputs, keeps the worker fed, and outlives it.

Rule: a worker that dies is replaced at once, and ever more slowly while it does not come up. One that owes
an answer for too long is taken for dead and killed. Until it is up again, new calls are refused, so that
their callers can go elsewhere; those it had wait for the first replacement.

A lane that is free takes a small pass too, but not before the event loop has been through all that arrived
together. Neither torch nor sentence-transformers is imported here.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from tokenizers import Tokenizer

from backends.bundled_models import resolve
from backends.embedding.batch_dispatch import BatchDispatcher, PendingCall
from backends.embedding.budget import PassBudget
from backends.embedding.handshake import EncoderFacts, EncoderOptions
from backends.embedding.ipc import Frame, FrameKind, PassResult, pack_inputs
from backends.embedding.time_model import ObservedTime
from backends.embedding.tokenization import PendingTokenizations, prompt_text, token_ids, validate_inputs
from backends.embedding.worker_link import Heartbeat, WorkerLink
from controlplane.core.clock import Duration, Instant, seconds, to_seconds
from controlplane.core.errors import BackendDown
from controlplane.core.ports import EmbeddingPass, TruncationSide, Vectors
from controlplane.core.request import Request

_log = logging.getLogger(__name__)

# Below these a thread costs more than it saves: about a millisecond of work.
_CHARACTERS_INLINE = 4_000
_TOKENS_INLINE = 16_000
_FIRST_BACKOFF_SECONDS = 0.5
_MAX_BACKOFF_SECONDS = 30.0
# Work that takes so many times what it should is not done any more: other work beside it, a kernel that is
# compiled or a file that is read for the first time do not explain it.
_STALL_FACTOR = 10


class WorkerEmbedder:
    """The `Embedder` port on sentence-transformers in a process of its own.

    `model` is a folder, a hub name or `tandem/minilm`; `batch_tokens` the largest pass in padded
    tokens; `dimensions` the shorter lengths that the model was trained for (Matryoshka);
    `check_seconds` how long a busy worker may stay silent before `check` calls it down. `stall_seconds`, or
    ten times what its work should take if that is more, is how long it may owe an answer before it is
    killed. One that `returns_memory` keeps none for later passes when its budget falls.
    """

    def __init__(
        self,
        model: str,
        *,
        served_name: str | None = None,
        batch_tokens: int = 16_384,
        max_running: int = 256,
        device: str | None = None,
        dtype: str | None = None,
        normalize: bool | None = None,
        max_input_tokens: int | None = None,
        dimensions: Sequence[int] = (),
        threads: int | None = None,
        yields_cpu: bool = False,
        trust_remote_code: bool = False,
        check_seconds: float = 30.0,
        stall_seconds: float = 60.0,
        returns_memory: bool = False,
    ) -> None:
        self.model = served_name or model
        self.max_running = max_running
        self._options = EncoderOptions(
            model=resolve(model),
            batch_tokens=batch_tokens,
            device=device,
            dtype=dtype,
            normalize=normalize,
            max_input_tokens=max_input_tokens,
            threads=threads,
            yields_cpu=yields_cpu,
            trust_remote_code=trust_remote_code,
        )
        self._short_dimensions = tuple(sorted(set(dimensions)))
        self._check_seconds = check_seconds
        self._stall_seconds = stall_seconds
        self._load_seconds: float | None = None
        self._returns_memory = returns_memory
        self.allocator_bytes = 0
        self._dispatcher = BatchDispatcher()
        self._calls: dict[str, PendingCall] = {}
        self._tokenizations = PendingTokenizations()
        self._heartbeat = Heartbeat()
        self._facts: EncoderFacts | None = None
        self._tokenizer: Tokenizer | None = None
        self._link: WorkerLink | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._send_handle: asyncio.Handle | None = None
        self._down_reason = f"embedding model {self.model!r} is not started"
        self.ready = asyncio.Event()
        self.restarts = 0
        self.stall_count = 0
        self.on_pass: Callable[[EmbeddingPass], None] | None = None
        self.batch_limit: Callable[[], Duration | None] | None = None

    async def start(self) -> None:
        """Raises BackendDown with the worker's own words when the model does not load."""
        link = await self._launch()
        self._supervisor = asyncio.create_task(self._supervise(link), name=f"embedding-worker-{self.model}")
        self._supervisor.add_done_callback(self._supervisor_ended)

    async def stop(self) -> None:
        keeper, self._supervisor = self._supervisor, None
        self._down_reason = f"embedding model {self.model!r} is stopped"
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
        self.ready.clear()
        if self._link is not None:
            await self._link.close()
        self._fail_pending(self._down_reason)

    async def check(self) -> None:
        """Any frame is a sign of life; the worker is asked for one in case it is idle."""
        link = self._require_up()
        next_frame = self._heartbeat.event
        self._send_frame(link, Frame(FrameKind.PING, 0, b""))
        try:
            await asyncio.wait_for(next_frame.wait(), self._check_seconds)
        except TimeoutError:
            raise BackendDown(
                f"embedding worker {link.pid} gave no sign of life for {self._check_seconds:g} s"
            ) from None
        self._require_up()

    @property
    def facts(self) -> EncoderFacts:
        """What the worker stated of its model. Raises BackendDown before the first start."""
        if self._facts is None:
            raise BackendDown(self._down_reason)
        return self._facts

    @property
    def dimension(self) -> int:
        return self.facts.dimension

    @property
    def supported_dimensions(self) -> tuple[int, ...]:
        """Lengths that OpenAI's `dimensions` may ask for, the full one last."""
        return (*(d for d in self._short_dimensions if d < self.dimension), self.dimension)

    @property
    def max_input_tokens(self) -> int:
        return self.facts.max_input_tokens

    @property
    def vocabulary(self) -> int:
        return self.facts.vocabulary

    @property
    def prompts(self) -> Mapping[str, str]:
        return self.facts.prompts

    @property
    def is_computing(self) -> bool:
        return self._dispatcher.has_batches_in_flight

    @property
    def out_of_memory(self) -> int:
        return self._dispatcher.out_of_memory

    def tokens_left(self, request_id: str) -> int | None:
        pending = self._calls.get(request_id)
        return None if pending is None else pending.tokens

    @property
    def workspace_bytes(self) -> int:
        facts = self.facts
        tokens = facts.time.full_speed_tokens(self._options.batch_tokens)
        return facts.lanes * facts.memory.workspace_bytes(
            budget_tokens=tokens, max_input_tokens=self.max_input_tokens
        )

    @property
    def budget_bytes(self) -> int:
        configured = self._budget().bytes
        return self.workspace_bytes if configured is None else configured

    def set_budget_bytes(self, budget_bytes: int) -> None:
        if budget_bytes < 0:
            raise ValueError(f"budget_bytes={budget_bytes}: bytes are 0 or more")
        is_reduced = budget_bytes < self.budget_bytes
        self._budget().bytes = budget_bytes
        if is_reduced and self._returns_memory and self._link is not None and self.ready.is_set():
            # Behind the passes that were sent under the former budget.
            self._send_frame(self._link, Frame(FrameKind.RELEASE, 0, b""))
        self._schedule_send()

    def truncate(
        self, token_ids: Sequence[int], limit: int, side: TruncationSide | None = None
    ) -> Sequence[int]:
        return self.facts.truncation.truncate(token_ids, limit, side)

    def batch_time(self, token_counts: Sequence[int]) -> Duration:
        return seconds(self._budget().seconds(token_counts))

    @property
    def worker_pid(self) -> int | None:
        return self._link.pid if self._link is not None and self.ready.is_set() else None

    def batch_bytes(self, token_counts: Sequence[int]) -> int:
        return self._budget().batch_bytes(token_counts)

    async def tokenize(self, texts: Sequence[str], *, prompt: str | None = None) -> list[list[int]]:
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise BackendDown(self._down_reason)
        if prefix := prompt_text(prompt, self.facts):
            texts = [prefix + text for text in texts]
        if sum(map(len, texts)) <= _CHARACTERS_INLINE:
            return token_ids(tokenizer, texts)
        if self.facts.yields_cpu:
            with contextlib.suppress(BackendDown):
                # There nobody who has more urgent work waits for the core.
                link = self._require_up()
                return await self._tokenizations.tokenize(texts, lambda frame: self._send_frame(link, frame))
        return await asyncio.to_thread(token_ids, tokenizer, texts)

    async def embed(
        self, request: Request, inputs: Sequence[Sequence[int]], *, deadline: Instant | None
    ) -> Vectors:
        """Raises Refused for ids that the model does not have and inputs it cannot hold."""
        self._require_up()
        facts = self.facts
        if sum(map(len, inputs)) <= _TOKENS_INLINE:
            ids = validate_inputs(inputs, facts)
        else:
            ids = await asyncio.to_thread(validate_inputs, inputs, facts)
            self._require_up()
        answer: asyncio.Future[Vectors] = asyncio.get_running_loop().create_future()
        rows = np.empty((len(ids), facts.dimension), dtype=np.float32)

        def finish(error: Exception | None) -> None:
            if answer.done():
                return
            if error is None:
                answer.set_result(rows)
            else:
                answer.set_exception(error)

        pending = self._calls[request.id] = PendingCall(ids, rows, finish)
        call = self._dispatcher.put(pending, deadline=deadline)
        self._schedule_send()
        try:
            return await answer
        finally:
            self._dispatcher.cancel(call)
            self._calls.pop(request.id, None)

    def _budget(self) -> PassBudget:
        """Raises BackendDown before the first start."""
        if self._dispatcher.budget is None:
            raise BackendDown(self._down_reason)
        return self._dispatcher.budget

    def _require_up(self) -> WorkerLink:
        if self._link is None or not self.ready.is_set():
            raise BackendDown(self._down_reason, retry_after=self._dispatcher.restart_seconds)
        return self._link

    def _send_frame(self, link: WorkerLink, frame: Frame) -> None:
        link.send(frame, timeout_seconds=_STALL_FACTOR * self._dispatcher.expected_seconds_in_flight)

    async def _launch(self) -> WorkerLink:
        """The first may take all the time it needs: a model may come from far away."""
        load_limit = math.inf if self._load_seconds is None else _STALL_FACTOR * self._load_seconds
        link = await WorkerLink.open(
            self._options, stall_seconds=self._stall_seconds, load_seconds=load_limit
        )
        try:
            first = await link.receive()
            if first is not None and first.kind is FrameKind.READY:
                await self._worker_ready(link, EncoderFacts.from_json(first.payload))
                return link
        except BaseException:
            await link.close()
            raise
        status = await link.close()
        self.stall_count += link.is_stalled
        reason = status if first is None else first.payload.decode()
        self._down_reason = f"embedding model {self.model!r} does not load: {reason}"
        raise BackendDown(self._down_reason)

    async def _worker_ready(self, link: WorkerLink, facts: EncoderFacts) -> None:
        if self._short_dimensions and self._short_dimensions[-1] > facts.dimension:
            raise BackendDown(
                f"embedding model {self.model!r}: dimensions={self._short_dimensions[-1]} exceeds the "
                f"{facts.dimension} dimensions of the model; remove it"
            )
        if self._tokenizer is None:
            self._tokenizer = await asyncio.to_thread(Tokenizer.from_str, facts.tokenizer)
        self._facts = facts
        tokens = facts.time.full_speed_tokens(self._options.batch_tokens)
        self._dispatcher.worker_started(
            PassBudget(tokens, facts.lanes, facts.memory, ObservedTime(facts.time))
        )
        self._load_seconds = max(self._load_seconds or 0.0, link.pending_seconds)
        self._link, self.allocator_bytes = link, 0
        # A first start may have waited for a download.
        self._dispatcher.restart_seconds = min(link.age_seconds, _MAX_BACKOFF_SECONDS)
        self.ready.set()
        self._schedule_send()

    async def _supervise(self, link: WorkerLink) -> None:
        """Listens to one worker after another, until cancelled."""
        while True:
            while (frame := await link.receive()) is not None:
                self._handle_frame(frame)
            failure_reported = not self.ready.is_set()
            self.ready.clear()
            cause = "stalled and was killed" if link.is_stalled else "died"
            self._down_reason = f"embedding worker {link.pid} {cause}; another is starting"
            self._heartbeat.notify()
            self.stall_count += link.is_stalled
            _log.error("%s (%s)", self._down_reason, await link.close())
            self._dispatcher.worker_died(
                self._down_reason, was_killed=link.was_killed, failure_reported=failure_reported
            )
            self._tokenizations.fail_all(self._down_reason)
            link = await self._restart()

    async def _restart(self) -> WorkerLink:
        """Tries for ever, ever more slowly. Calls wait for the first try only."""
        backoff = _FIRST_BACKOFF_SECONDS
        while True:
            self.restarts += 1
            try:
                return await self._launch()
            except (BackendDown, OSError) as error:
                self._down_reason = str(error)
                _log.error("%s; trying again in %g s", error, backoff)
                self._dispatcher.fail_all(self._down_reason, retry_after=self._dispatcher.restart_seconds)
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, _MAX_BACKOFF_SECONDS)

    def _fail_pending(self, reason: str) -> None:
        """Nobody will answer what waits here."""
        self._tokenizations.fail_all(reason)
        self._dispatcher.fail_all(reason)

    def _supervisor_ended(self, keeper: asyncio.Task[None]) -> None:
        """Only a defect of ours ends the keeper uncalled; then nothing waits on for ever."""
        if not keeper.cancelled() and (error := keeper.exception()) is not None:
            self.ready.clear()
            self._down_reason = f"embedding model {self.model!r} is no longer kept up: {error!r}"
            _log.critical(self._down_reason, exc_info=error)
            self._fail_pending(self._down_reason)

    def _schedule_send(self) -> None:
        if self._send_handle is None:
            self._send_handle = asyncio.get_running_loop().call_soon(self._run_scheduled_send)

    def _run_scheduled_send(self) -> None:
        self._send_handle = None
        self._send_batches(starts_small=True)

    def _send_batches(self, *, starts_small: bool) -> None:
        while self._link is not None and self.ready.is_set():
            now = Instant(time.monotonic_ns())
            batch = self._dispatcher.next_batch(self._limit_seconds(), now, starts_small=starts_small)
            if batch is None:
                return
            number, inputs = batch
            self._send_frame(self._link, Frame(FrameKind.BATCH, number, pack_inputs(inputs)))

    def _limit_seconds(self) -> float | None:
        # A worker that yields the CPU is interrupted at any point: cutting its passes would only cost.
        if self.batch_limit is None or self.facts.yields_cpu:
            return None
        limit = self.batch_limit()
        return None if limit is None else to_seconds(limit)

    def _handle_frame(self, frame: Frame) -> None:
        self._heartbeat.notify()
        if frame.kind is FrameKind.VECTORS:
            result = PassResult.unpack(frame.payload, self.dimension)
            self.allocator_bytes = result.reserved_bytes
            finished = self._dispatcher.pass_finished(frame.batch, result, Instant(time.monotonic_ns()))
            if finished is not None and self.on_pass is not None:
                self.on_pass(finished)
        elif frame.kind in (FrameKind.FAILED, FrameKind.OUT_OF_MEMORY):
            message = frame.payload.decode()
            is_out_of_memory = frame.kind is FrameKind.OUT_OF_MEMORY
            self._dispatcher.pass_failed(frame.batch, message, is_out_of_memory=is_out_of_memory)
        elif frame.kind is FrameKind.TOKENS:
            self._tokenizations.resolve(frame)
        elif frame.kind is FrameKind.LEAVING:
            # What it is sent from now on it would never look at.
            self._down_reason = "the embedding worker ends after a failure; another will start"
            self.ready.clear()
        self._send_batches(starts_small=False)
        self._schedule_send()
