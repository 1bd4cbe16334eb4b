"""The `Embedder` port: queues inputs, keeps the worker process supplied with batches, and restarts it.

A worker that dies is replaced at once, then with exponential backoff; one that misses a deadline is killed.
Until the next worker is ready, new calls are rejected with `Retry-After`, and accepted calls wait for the
first replacement. A free lane also takes a small pass, but only after the event loop has processed all
requests that arrived together. This module imports neither torch nor sentence-transformers.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from tokenizers import Tokenizer

from backends.bundled_models import resolve
from backends.embedding import tokenization
from backends.embedding.batch_dispatcher import BatchDispatcher, PendingCall
from backends.embedding.budget import PassBudget
from backends.embedding.handshake import EncoderFacts, EncoderOptions, ModelProperties
from backends.embedding.ipc import Frame, FrameKind, PassResult
from backends.embedding.pass_sender import PassSender
from backends.embedding.time_model import ObservedTime
from backends.embedding.tokenization import PendingTokenizations, prompt_text, token_ids, validate_inputs
from backends.embedding.worker_link import Heartbeat, WorkerLink
from controlplane.core.clock import Duration, Instant, between, seconds
from controlplane.core.engine_reports import DeviceSharing
from controlplane.core.errors import BackendDown
from controlplane.core.ports import EmbeddingPass, PauseCost, Vectors
from controlplane.core.request import Request
from controlplane.core.text_limits import LONG_TEXT_CHARACTERS

_log = logging.getLogger(__name__)

# Smaller work, about a millisecond, runs on the event loop: a thread would cost more than it saves.
_TOKENS_INLINE = 16_000
_FIRST_BACKOFF_SECONDS = 0.5
_MAX_BACKOFF_SECONDS = 30.0
# Work counts as stalled after this multiple of its predicted duration. Contention, kernel compilation and
# first reads of a file stay below it.
_STALL_FACTOR = 10


class WorkerEmbedder(ModelProperties):
    """The `Embedder` port on sentence-transformers in a process of its own.

    `model` is a folder, a Hugging Face name or `tandem/minilm`; `batch_tokens` the largest pass in padded
    tokens; `dimensions` the shorter vector lengths that the model was trained for (Matryoshka). `check`
    allows a busy worker `check_seconds` of silence. A response is due within `stall_seconds`, or ten times
    the predicted duration of the batches in flight if that is longer. `returns_memory` releases the
    allocator's cache when the budget is lowered. `EncoderOptions` describes the other arguments.
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
        idle_cpu_priority: bool = False,
        environment: Mapping[str, str] | None = None,
        trust_remote_code: bool = False,
        scores_pairs: bool = False,
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
            idle_cpu_priority=idle_cpu_priority,
            environment=environment or {},
            trust_remote_code=trust_remote_code,
            scores_pairs=scores_pairs,
        )
        self._short_dimensions = tuple(sorted(set(dimensions)))
        self._check_seconds = check_seconds
        self._stall_seconds = stall_seconds
        self._load_seconds: float | None = None
        self._returns_memory = returns_memory
        self._dispatcher = BatchDispatcher()
        self._sender = PassSender(self._dispatcher, self)
        self._calls: dict[str, PendingCall] = {}
        self._tokenizations = PendingTokenizations()
        self._heartbeat = Heartbeat()
        self._facts: EncoderFacts | None = None
        self._tokenizer: Tokenizer | None = None
        self._link: WorkerLink | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._down_reason = f"embedding model {self.model!r} is not started"
        self.ready = asyncio.Event()
        self.allocator_bytes = self.restarts = self.stall_count = 0
        self.on_pass: Callable[[EmbeddingPass], None] | None = None
        self.on_computing: Callable[[bool], None] | None = None
        self.pause_cost: Callable[[], PauseCost | None] | None = None

    async def start(self) -> None:
        """Starts the worker. Raises BackendDown with the worker's message if the model does not load."""
        link = await self._launch()
        self._supervisor = asyncio.create_task(self._supervise(link), name=f"embedding-worker-{self.model}")
        self._supervisor.add_done_callback(self._supervisor_ended)

    async def stop(self) -> None:
        """Ends the worker and fails pending calls with BackendDown."""
        supervisor, self._supervisor = self._supervisor, None
        self._down_reason = f"embedding model {self.model!r} is stopped"
        if supervisor is not None:
            supervisor.cancel()
            await asyncio.gather(supervisor, return_exceptions=True)
        self._worker_gone()
        if self._link is not None:
            await self._link.close()
        self._fail_pending()

    async def check(self) -> None:
        """Raises BackendDown unless the worker sends a frame (a result or a PONG) within `check_seconds`."""
        link = self._require_up()
        next_frame = self._heartbeat.event
        self._send_frame(link, Frame(FrameKind.PING, 0, b""))
        try:
            await asyncio.wait_for(next_frame.wait(), self._check_seconds)
        except TimeoutError:
            silent = f"embedding worker {link.pid}: no frame for {self._check_seconds:g} s"
            raise BackendDown(silent) from None
        self._require_up()

    @property
    def facts(self) -> EncoderFacts:
        """Properties of the model, reported by the worker. Raises BackendDown before the first start."""
        if self._facts is None:
            raise BackendDown(self._down_reason)
        return self._facts

    @property
    def supported_dimensions(self) -> tuple[int, ...]:
        """Vector lengths that OpenAI's `dimensions` may request, the full one last."""
        return (*(d for d in self._short_dimensions if d < self.dimension), self.dimension)

    @property
    def down(self) -> str | None:
        """Why no worker computes now; None while one does."""
        return None if self.ready.is_set() else self._down_reason

    @property
    def sharing(self) -> DeviceSharing:
        """Whether its passes are in the idle class while a generation runs."""
        return self._sender.sharing

    @property
    def is_computing(self) -> bool:
        """Whether a batch is in flight."""
        return self._dispatcher.has_batches_in_flight

    @property
    def out_of_memory(self) -> int:
        """Number of passes that ran out of memory."""
        return self._dispatcher.out_of_memory

    def tokens_left(self, request_id: str) -> int | None:
        """Tokens of the request that are not computed yet; None for an unknown request."""
        pending = self._calls.get(request_id)
        return None if pending is None else pending.tokens

    @property
    def pass_tokens(self) -> int:
        """Most padded tokens of one pass."""
        return self._options.batch_tokens

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the largest passes on all lanes."""
        return self.facts.workspace_bytes(self._options.batch_tokens)

    @property
    def budget_bytes(self) -> int:
        """Bytes that batches in flight may take now."""
        configured = self._budget().bytes
        return self.workspace_bytes if configured is None else configured

    def set_budget_bytes(self, budget_bytes: int) -> None:
        """Sets the bytes that batches in flight may take. Raises ValueError if negative."""
        if budget_bytes < 0:
            raise ValueError(f"budget_bytes={budget_bytes}: must be at least 0")
        is_reduced = budget_bytes < self.budget_bytes
        self._budget().bytes = budget_bytes
        if is_reduced and self._returns_memory and self._link is not None and self.ready.is_set():
            # The worker handles RELEASE after the passes already sent under the previous budget.
            self._send_frame(self._link, Frame(FrameKind.RELEASE, 0, b""))
        self._sender.schedule()

    def batch_time(self, token_counts: Sequence[int]) -> Duration:
        """Predicted time of these inputs on an otherwise idle device."""
        return seconds(self._budget().seconds(token_counts))

    @property
    def worker_pid(self) -> int | None:
        """Process id of the worker; None while none is ready."""
        return self._link.pid if self._link is not None and self.ready.is_set() else None

    def batch_bytes(self, token_counts: Sequence[int]) -> int:
        """Largest number of bytes that these inputs take while they are computed."""
        return self._budget().batch_bytes(token_counts)

    async def tokenize(self, texts: Sequence[str], *, prompt: str | None = None) -> list[Sequence[int]]:
        """Token ids of `texts`, each after the prompt, never truncated. Raises Refused or BackendDown."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise BackendDown(self._down_reason)
        if prefix := prompt_text(prompt, self.facts):
            texts = [prefix + text for text in texts]
        if sum(map(len, texts)) <= LONG_TEXT_CHARACTERS:
            return token_ids(tokenizer, texts)
        if self.facts.idle_cpu_priority:
            with contextlib.suppress(BackendDown):
                # The worker tokenizes at idle priority, so it delays no urgent work on this core.
                link = self._require_up()
                return await self._tokenizations.tokenize(texts, lambda frame: self._send_frame(link, frame))
        return await asyncio.to_thread(token_ids, tokenizer, texts)

    async def embed(
        self, request: Request, inputs: Sequence[Sequence[int]], *, deadline: Instant | None
    ) -> Vectors:
        """Vectors, float32 [inputs, dimension]; row i belongs to input i.

        Raises Refused for an input that is empty, too long or outside the vocabulary, BackendFailed if the
        model fails on an input, BackendDown if no worker is ready, WorkerDied if two died with the call.
        """
        self._require_up()
        if sum(map(len, inputs)) <= _TOKENS_INLINE:
            ids = validate_inputs(inputs, self.facts)
        else:
            ids = await asyncio.to_thread(validate_inputs, inputs, self.facts)
            self._require_up()
        answer: asyncio.Future[Vectors] = asyncio.get_running_loop().create_future()
        rows = np.empty((len(ids), self.facts.dimension), dtype=np.float32)

        def finish(error: Exception | None) -> None:
            if answer.done():
                return
            if error is None:
                answer.set_result(rows)
            else:
                answer.set_exception(error)

        pending = self._calls[request.id] = PendingCall(ids, rows, finish, request.id)
        self._dispatcher.longest_pass.record(None if deadline is None else between(request.arrival, deadline))
        call = self._dispatcher.put(pending, deadline=deadline, weight=request.service_class.weight)
        self._sender.schedule()
        try:
            return await answer
        finally:
            self._dispatcher.cancel(call)
            self._calls.pop(request.id, None)

    def _budget(self) -> PassBudget:
        """Bounds of the next pass. Raises BackendDown before the first start."""
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
        """Starts a worker and loads its model; the first load has no deadline, as it may download."""
        limit = math.inf if self._load_seconds is None else _STALL_FACTOR * self._load_seconds
        link = await WorkerLink.open(self._options, stall_seconds=self._stall_seconds, load_seconds=limit)
        try:
            first = await link.started()
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
                f"{facts.dimension} dimensions of the model; remove it from `dimensions`"
            )
        if self._tokenizer is None:
            self._tokenizer = await asyncio.to_thread(Tokenizer.from_str, facts.tokenizer)
            self.max_token_characters = tokenization.token_characters(self._tokenizer)
        self._facts = facts
        tokens = facts.time.full_speed_tokens(self._options.batch_tokens)
        self._dispatcher.worker_started(
            PassBudget(tokens, facts.lanes, facts.memory, ObservedTime(facts.time))
        )
        self._load_seconds = max(self._load_seconds or 0.0, link.pending_seconds)
        self._link, self.allocator_bytes = link, 0
        # Bounded because the first start may include a download.
        self._dispatcher.restart_seconds = min(link.age_seconds, _MAX_BACKOFF_SECONDS)
        self.ready.set()
        self._sender.worker_ready(link.pid, partial(self._send_frame, link), may_idle=facts.idle_cpu_priority)

    async def _supervise(self, link: WorkerLink) -> None:
        """Processes the frames of one worker after another until cancelled."""
        while True:
            while (frame := await link.receive()) is not None:
                self._handle_frame(frame)
            # A LEAVING frame has cleared `ready` already.
            failure_reported = not self.ready.is_set()
            self._worker_gone()
            cause = "stalled and was killed" if link.is_stalled else "died"
            self._down_reason = f"embedding worker {link.pid} {cause}; another is starting"
            self._heartbeat.notify()
            self.stall_count += link.is_stalled
            _log.error("%s (%s)", self._down_reason, await link.close())
            self._dispatcher.worker_died(
                self._down_reason, was_killed=link.was_killed, failure_reported=failure_reported
            )
            self._sender.announce()
            self._tokenizations.fail_all(self._down_reason)
            link = await self._restart()

    async def _restart(self) -> WorkerLink:
        """Retries with backoff, forever, whatever has failed; pending calls wait for one attempt only."""
        backoff = _FIRST_BACKOFF_SECONDS
        while True:
            self.restarts += 1
            try:
                return await self._launch()
            except Exception as error:
                self._down_reason = str(error) or repr(error)
                _log.error("%s; retrying in %g s", self._down_reason, backoff)
                self._dispatcher.fail_all(self._down_reason, retry_after=self._dispatcher.restart_seconds)
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, _MAX_BACKOFF_SECONDS)

    def _worker_gone(self) -> None:
        self.ready.clear()
        self._sender.worker_gone()

    def _fail_pending(self) -> None:
        """Fails all pending calls and tokenizations with BackendDown."""
        self._tokenizations.fail_all(self._down_reason)
        self._dispatcher.fail_all(self._down_reason)
        self._sender.announce()

    def _supervisor_ended(self, task: asyncio.Task[None]) -> None:
        """Fails pending calls if the supervising task raised, which only a defect in this module causes."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._worker_gone()
            self._down_reason = f"embedding model {self.model!r} is not supervised any more: {error!r}"
            _log.critical(self._down_reason, exc_info=error)
            self._fail_pending()

    def _handle_frame(self, frame: Frame) -> None:
        self._heartbeat.notify()
        if frame.kind is FrameKind.VECTORS:
            result = PassResult.unpack(frame.payload, self.dimension)
            self.allocator_bytes = result.reserved_bytes
            finished = self._dispatcher.pass_finished(frame.number, result, Instant(time.monotonic_ns()))
            if finished is not None and self.on_pass is not None:
                self.on_pass(finished)
        elif frame.kind in (FrameKind.FAILED, FrameKind.OUT_OF_MEMORY):
            message = frame.payload.decode()
            is_out_of_memory = frame.kind is FrameKind.OUT_OF_MEMORY
            self._dispatcher.pass_failed(frame.number, message, is_out_of_memory=is_out_of_memory)
        elif frame.kind is FrameKind.PONG:
            self.allocator_bytes = int(frame.payload)
        elif frame.kind is FrameKind.TOKENS:
            self._tokenizations.resolve(frame)
        elif frame.kind is FrameKind.LEAVING:
            # The worker reads no further frames.
            self._down_reason = "embedding worker exits after a failed batch; another is starting"
            self._worker_gone()
        self._sender.send(starts_small=False)
        self._sender.schedule()
