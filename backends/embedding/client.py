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
from backends.embedding.ipc import Computed, Frame, FrameKind, pack_inputs
from backends.embedding.time_model import ObservedTime
from backends.embedding.tokenization import PendingTokenizations, checked, prompt_text, token_ids
from backends.embedding.worker_link import Heartbeat, WorkerLink
from controlplane.core.clock import Duration, Instant, seconds, to_seconds
from controlplane.core.errors import BackendDown
from controlplane.core.ports import EmbeddingPass, TruncationSide, Vectors
from controlplane.core.request import Request

_log = logging.getLogger(__name__)

# Below these a thread costs more than it saves: about a millisecond of work.
_CHARACTERS_INLINE = 4_000
_TOKENS_INLINE = 16_000
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0
# Work that takes so many times what it should is not done any more: other work beside it, a kernel that is
# compiled or a file that is read for the first time do not explain it.
_PATIENCE = 10


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
        self._shorter = tuple(sorted(set(dimensions)))
        self._check_seconds = check_seconds
        self._stall_seconds = stall_seconds
        self._load_seconds: float | None = None
        self._returns_memory = returns_memory
        self.allocator_bytes = 0
        self._deliveries = BatchDispatcher()
        self._held: dict[str, PendingCall] = {}
        self._texts = PendingTokenizations()
        self._signs = Heartbeat()
        self._facts: EncoderFacts | None = None
        self._tokenizer: Tokenizer | None = None
        self._link: WorkerLink | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._feeding: asyncio.Handle | None = None
        self._down = f"embedding model {self.model!r} is not started"
        self.ready = asyncio.Event()
        self.restarts = 0
        self.stall_count = 0
        self.on_pass: Callable[[EmbeddingPass], None] | None = None
        self.batch_limit: Callable[[], Duration | None] | None = None

    async def start(self) -> None:
        """Raises BackendDown with the worker's own words when the model does not load."""
        link = await self._launch()
        self._keeper = asyncio.create_task(self._keep(link), name=f"embedding-worker-{self.model}")
        self._keeper.add_done_callback(self._keeper_ended)

    async def stop(self) -> None:
        keeper, self._keeper = self._keeper, None
        self._down = f"embedding model {self.model!r} is stopped"
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
        self.ready.clear()
        if self._link is not None:
            await self._link.close()
        self._lose(self._down)

    async def check(self) -> None:
        """Any frame is a sign of life; the worker is asked for one in case it is idle."""
        link = self._up()
        answered = self._signs.event
        self._ask(link, Frame(FrameKind.PING, 0, b""))
        try:
            await asyncio.wait_for(answered.wait(), self._check_seconds)
        except TimeoutError:
            raise BackendDown(
                f"embedding worker {link.pid} gave no sign of life for {self._check_seconds:g} s"
            ) from None
        self._up()

    @property
    def facts(self) -> EncoderFacts:
        """What the worker stated of its model. Raises BackendDown before the first start."""
        if self._facts is None:
            raise BackendDown(self._down)
        return self._facts

    @property
    def dimension(self) -> int:
        return self.facts.dimension

    @property
    def supported_dimensions(self) -> tuple[int, ...]:
        """Lengths that OpenAI's `dimensions` may ask for, the full one last."""
        return (*(d for d in self._shorter if d < self.dimension), self.dimension)

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
        return self._deliveries.are_under_way

    @property
    def out_of_memory(self) -> int:
        return self._deliveries.out_of_memory

    def tokens_left(self, request_id: str) -> int | None:
        caller = self._held.get(request_id)
        return None if caller is None else caller.tokens

    @property
    def workspace_bytes(self) -> int:
        facts = self.facts
        tokens = facts.time.full_speed_tokens(self._options.batch_tokens)
        return facts.lanes * facts.memory.workspace_bytes(
            budget_tokens=tokens, max_input_tokens=self.max_input_tokens
        )

    @property
    def budget_bytes(self) -> int:
        set_bytes = self._budget().bytes
        return self.workspace_bytes if set_bytes is None else set_bytes

    def set_budget_bytes(self, budget_bytes: int) -> None:
        if budget_bytes < 0:
            raise ValueError(f"budget_bytes={budget_bytes}: bytes are 0 or more")
        falls = budget_bytes < self.budget_bytes
        self._budget().bytes = budget_bytes
        if falls and self._returns_memory and self._link is not None and self.ready.is_set():
            # Behind the passes that were sent under the former budget.
            self._ask(self._link, Frame(FrameKind.RELEASE, 0, b""))
        self._feed_soon()

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
            raise BackendDown(self._down)
        if before := prompt_text(prompt, self.facts):
            texts = [before + text for text in texts]
        if sum(map(len, texts)) <= _CHARACTERS_INLINE:
            return token_ids(tokenizer, texts)
        if self.facts.yields_cpu:
            with contextlib.suppress(BackendDown):
                # There nobody who has more urgent work waits for the core.
                link = self._up()
                return await self._texts.tokenized(texts, lambda frame: self._ask(link, frame))
        return await asyncio.to_thread(token_ids, tokenizer, texts)

    async def embed(
        self, request: Request, inputs: Sequence[Sequence[int]], *, deadline: Instant | None
    ) -> Vectors:
        """Raises Refused for ids that the model does not have and inputs it cannot hold."""
        self._up()
        facts = self.facts
        if sum(map(len, inputs)) <= _TOKENS_INLINE:
            ids = checked(inputs, facts)
        else:
            ids = await asyncio.to_thread(checked, inputs, facts)
            self._up()
        answer: asyncio.Future[Vectors] = asyncio.get_running_loop().create_future()
        rows = np.empty((len(ids), facts.dimension), dtype=np.float32)

        def settle(error: Exception | None) -> None:
            if answer.done():
                return
            if error is None:
                answer.set_result(rows)
            else:
                answer.set_exception(error)

        caller = self._held[request.id] = PendingCall(ids, rows, settle)
        call = self._deliveries.put(caller, deadline=deadline)
        self._feed_soon()
        try:
            return await answer
        finally:
            self._deliveries.leave(call)
            self._held.pop(request.id, None)

    def _budget(self) -> PassBudget:
        """Raises BackendDown before the first start."""
        if self._deliveries.budget is None:
            raise BackendDown(self._down)
        return self._deliveries.budget

    def _up(self) -> WorkerLink:
        if self._link is None or not self.ready.is_set():
            raise BackendDown(self._down, retry_after=self._deliveries.back_in)
        return self._link

    def _ask(self, link: WorkerLink, frame: Frame) -> None:
        link.send(frame, within=_PATIENCE * self._deliveries.seconds_under_way)

    async def _launch(self) -> WorkerLink:
        """The first may take all the time it needs: a model may come from far away."""
        longest = math.inf if self._load_seconds is None else _PATIENCE * self._load_seconds
        link = await WorkerLink.open(self._options, stall_seconds=self._stall_seconds, load_seconds=longest)
        try:
            first = await link.receive()
            if first is not None and first.kind is FrameKind.READY:
                await self._welcome(link, EncoderFacts.from_json(first.payload))
                return link
        except BaseException:
            await link.close()
            raise
        status = await link.close()
        self.stall_count += link.is_stalled
        told = status if first is None else first.payload.decode()
        self._down = f"embedding model {self.model!r} does not load: {told}"
        raise BackendDown(self._down)

    async def _welcome(self, link: WorkerLink, facts: EncoderFacts) -> None:
        if self._shorter and self._shorter[-1] > facts.dimension:
            raise BackendDown(
                f"embedding model {self.model!r}: dimensions={self._shorter[-1]} is more than the "
                f"{facts.dimension} that it has; leave that out"
            )
        if self._tokenizer is None:
            self._tokenizer = await asyncio.to_thread(Tokenizer.from_str, facts.tokenizer)
        self._facts = facts
        tokens = facts.time.full_speed_tokens(self._options.batch_tokens)
        self._deliveries.begin(PassBudget(tokens, facts.lanes, facts.memory, ObservedTime(facts.time)))
        self._load_seconds = max(self._load_seconds or 0.0, link.waited_seconds)
        self._link, self.allocator_bytes = link, 0
        # A first start may have waited for a download.
        self._deliveries.back_in = min(link.age_seconds, _LONGEST_PAUSE_SECONDS)
        self.ready.set()
        self._feed_soon()

    async def _keep(self, link: WorkerLink) -> None:
        """Listens to one worker after another, until cancelled."""
        while True:
            while (frame := await link.receive()) is not None:
                self._take(frame)
            has_told = not self.ready.is_set()
            self.ready.clear()
            how = "stalled and was killed" if link.is_stalled else "died"
            self._down = f"embedding worker {link.pid} {how}; another is starting"
            self._signs.saw_one()
            self.stall_count += link.is_stalled
            _log.error("%s (%s)", self._down, await link.close())
            self._deliveries.worker_died(self._down, was_killed=link.was_killed, has_told=has_told)
            self._texts.lost(self._down)
            link = await self._replace()

    async def _replace(self) -> WorkerLink:
        """Tries for ever, ever more slowly. Calls wait for the first try only."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            self.restarts += 1
            try:
                return await self._launch()
            except (BackendDown, OSError) as error:
                self._down = str(error)
                _log.error("%s; trying again in %g s", error, pause)
                self._deliveries.give_up(self._down, retry_after=self._deliveries.back_in)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _lose(self, why: str) -> None:
        """Nobody will answer what waits here."""
        self._texts.lost(why)
        self._deliveries.give_up(why)

    def _keeper_ended(self, keeper: asyncio.Task[None]) -> None:
        """Only a defect of ours ends the keeper uncalled; then nothing waits on for ever."""
        if not keeper.cancelled() and (error := keeper.exception()) is not None:
            self.ready.clear()
            self._down = f"embedding model {self.model!r} is no longer kept up: {error!r}"
            _log.critical(self._down, exc_info=error)
            self._lose(self._down)

    def _feed_soon(self) -> None:
        if self._feeding is None:
            self._feeding = asyncio.get_running_loop().call_soon(self._feed_all)

    def _feed_all(self) -> None:
        self._feeding = None
        self._send(starts_small=True)

    def _send(self, *, starts_small: bool) -> None:
        while self._link is not None and self.ready.is_set():
            now = Instant(time.monotonic_ns())
            sent = self._deliveries.next(self._limit_seconds(), now, starts_small=starts_small)
            if sent is None:
                return
            number, inputs = sent
            self._ask(self._link, Frame(FrameKind.BATCH, number, pack_inputs(inputs)))

    def _limit_seconds(self) -> float | None:
        # A worker that yields the CPU is interrupted at any point: cutting its passes would only cost.
        if self.batch_limit is None or self.facts.yields_cpu:
            return None
        limit = self.batch_limit()
        return None if limit is None else to_seconds(limit)

    def _take(self, frame: Frame) -> None:
        self._signs.saw_one()
        if frame.kind is FrameKind.VECTORS:
            found = Computed.unpack(frame.payload, self.dimension)
            self.allocator_bytes = found.kept_bytes
            done = self._deliveries.computed(frame.batch, found, Instant(time.monotonic_ns()))
            if done is not None and self.on_pass is not None:
                self.on_pass(done)
        elif frame.kind in (FrameKind.FAILED, FrameKind.OUT_OF_MEMORY):
            told = frame.payload.decode()
            ran_out = frame.kind is FrameKind.OUT_OF_MEMORY
            self._deliveries.failed(frame.batch, told, is_out_of_memory=ran_out)
        elif frame.kind is FrameKind.TOKENS:
            self._texts.answered(frame)
        elif frame.kind is FrameKind.LEAVING:
            # What it is sent from now on it would never look at.
            self._down = "the embedding worker ends after a failure; another will start"
            self.ready.clear()
        self._send(starts_small=False)
        self._feed_soon()
