"""How does the server get vectors? It queues inputs, keeps the worker fed, and outlives it.

Rule: two batches are under way at most: one computing, one already with the worker. A worker that dies
is replaced at once; what it had is given to the next worker once, and fails with BackendDown if that
one dies too. A batch that fails is halved until the single input at fault is found, and only that
input's call fails. Neither torch nor sentence-transformers is imported here.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from tokenizers import Tokenizer

from backends.embedding.batcher import Batch, BatchQueue, Call
from backends.embedding.bundled import resolve
from backends.embedding.contract import EncoderFacts, EncoderOptions
from backends.embedding.framing import Frame, FrameKind, Ids, Rows, pack_inputs, unpack_rows
from backends.embedding.link import WorkerLink
from controlplane.core.clock import Instant, seconds
from controlplane.core.ports import BackendDown, BackendFailed, EmbeddingPass, Refused, Vectors
from controlplane.core.request import Request

_log = logging.getLogger(__name__)

_UNDER_WAY = 2
# Below these a thread costs more than it saves: about a millisecond of work.
_CHARACTERS_INLINE = 4_000
_TOKENS_INLINE = 16_000
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0


@dataclass(eq=False, slots=True)
class _Caller:
    """Who waits for rows. `missing` counts those not yet there."""

    inputs: list[Ids]
    rows: Rows
    missing: int
    answer: "asyncio.Future[Vectors]"
    was_retried: bool = False


@dataclass(eq=False, slots=True)
class _UnderWay:
    batch: Batch[_Caller]
    sent: float


@dataclass(eq=False, slots=True)
class _Answers:
    """Wakes whoever waits for a sign of life; remembers when the last one came (loop time)."""

    event: asyncio.Event = field(default_factory=asyncio.Event)
    last: float = 0.0

    def saw_one(self) -> None:
        self.last = asyncio.get_running_loop().time()
        self.event.set()
        self.event = asyncio.Event()


class WorkerEmbedder:
    """The `Embedder` port on sentence-transformers in a process of its own.

    `model` is a folder, a hub name or `tandem/minilm`; `batch_tokens` the largest pass in padded
    tokens; `dimensions` the shorter lengths that the model was trained for (Matryoshka);
    `check_seconds` how long a busy worker may stay silent before `check` calls it down.
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
        trust_remote_code: bool = False,
        check_seconds: float = 30.0,
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
            trust_remote_code=trust_remote_code,
        )
        self._shorter = tuple(sorted(set(dimensions)))
        self._check_seconds = check_seconds
        self._queue: BatchQueue[_Caller] = BatchQueue(batch_tokens)
        self._under_way: dict[int, _UnderWay] = {}
        self._numbers = count(1)
        self._answers = _Answers()
        self._facts: EncoderFacts | None = None
        self._tokenizer: Tokenizer | None = None
        self._link: WorkerLink | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._down = f"embedding model {self.model!r} is not started"
        self.ready = asyncio.Event()
        self.restarts = 0
        self.on_pass: Callable[[EmbeddingPass], None] | None = None

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
        self._give_up()

    async def check(self) -> None:
        """Any frame is a sign of life; the worker is asked for one in case it is idle."""
        link = self._up()
        answered = self._answers.event
        link.send(Frame(FrameKind.PING, 0, b""))
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
    def workspace_bytes(self) -> int:
        return self.facts.memory.workspace_bytes(
            budget_tokens=self._options.batch_tokens, max_input_tokens=self.max_input_tokens
        )

    @property
    def worker_pid(self) -> int | None:
        return self._link.pid if self._link is not None and self.ready.is_set() else None

    def batch_bytes(self, token_counts: Sequence[int]) -> int:
        return self.facts.memory.batch_bytes(token_counts, budget_tokens=self._options.batch_tokens)

    async def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise BackendDown(self._down)
        if sum(map(len, texts)) <= _CHARACTERS_INLINE:
            return _token_ids(tokenizer, texts)
        return await asyncio.to_thread(_token_ids, tokenizer, texts)

    async def embed(
        self, request: Request, inputs: Sequence[Sequence[int]], *, deadline: Instant | None
    ) -> Vectors:
        """Raises Refused for ids that the model does not have and inputs it cannot hold."""
        self._up()
        facts = self.facts
        if sum(map(len, inputs)) <= _TOKENS_INLINE:
            checked = _checked(inputs, facts)
        else:
            checked = await asyncio.to_thread(_checked, inputs, facts)
            self._up()
        answer: asyncio.Future[Vectors] = asyncio.get_running_loop().create_future()
        rows = np.empty((len(checked), facts.dimension), dtype=np.float32)
        caller = _Caller(checked, rows, len(checked), answer)
        call = self._queue.put(caller, [len(ids) for ids in checked], deadline=deadline)
        self._feed()
        try:
            return await answer
        finally:
            self._queue.discard(call)

    def _up(self) -> WorkerLink:
        if self._link is None or not self.ready.is_set():
            raise BackendDown(self._down)
        return self._link

    async def _launch(self) -> WorkerLink:
        link = await WorkerLink.open(self._options)
        try:
            first = await link.receive()
            if first is not None and first.kind is FrameKind.READY:
                await self._welcome(link, EncoderFacts.from_json(first.payload))
                return link
        except BaseException:
            await link.close()
            raise
        status = await link.close()
        told = f"exit status {status}" if first is None else first.payload.decode()
        self._down = f"embedding model {self.model!r} does not load: {told}"
        raise BackendDown(self._down)

    async def _welcome(self, link: WorkerLink, facts: EncoderFacts) -> None:
        if self._tokenizer is None:
            tokenizer = await asyncio.to_thread(Tokenizer.from_str, facts.tokenizer)
            tokenizer.no_truncation()
            tokenizer.no_padding()
            self._tokenizer = tokenizer
        self._facts = facts
        self._queue.pass_tokens = facts.pass_tokens
        self._link = link
        self.ready.set()
        self._feed()

    async def _keep(self, link: WorkerLink) -> None:
        """Listens to one worker after another, until cancelled."""
        while True:
            while (frame := await link.receive()) is not None:
                self._take(frame)
            self.ready.clear()
            self._down = f"embedding worker {link.pid} died; another is starting"
            self._answers.saw_one()
            _log.error("%s (exit status %d)", self._down, await link.close())
            self._requeue()
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
                self._give_up()
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _keeper_ended(self, keeper: asyncio.Task[None]) -> None:
        """Only a defect of ours ends the keeper uncalled; then nothing waits on for ever."""
        if not keeper.cancelled() and (error := keeper.exception()) is not None:
            self.ready.clear()
            self._down = f"embedding model {self.model!r} is no longer kept up: {error!r}"
            _log.critical(self._down, exc_info=error)
            self._give_up()

    def _feed(self) -> None:
        while self._link is not None and self.ready.is_set() and len(self._under_way) < _UNDER_WAY:
            batch = self._queue.next_batch()
            if batch is None:
                return
            number = next(self._numbers)
            self._under_way[number] = _UnderWay(batch, asyncio.get_running_loop().time())
            inputs = [item.call.caller.inputs[item.position] for item in batch.items]
            self._link.send(Frame(FrameKind.BATCH, number, pack_inputs(inputs)))

    def _take(self, frame: Frame) -> None:
        free_since = self._answers.last
        self._answers.saw_one()
        found = self._under_way.pop(frame.batch, None)
        if found is None:
            return
        batch = found.batch
        if frame.kind is FrameKind.VECTORS:
            self._report(batch, self._answers.last - max(found.sent, free_since))
            _deliver(batch, unpack_rows(frame.payload, self.dimension))
        elif halves := batch.halves():
            _log.warning(
                "a batch of %d inputs failed, halving it: %s", len(batch.items), frame.payload.decode()
            )
            self._queue.put_back(halves)
        else:
            item = batch.items[0]
            self._fail(item.call, BackendFailed(f"input {item.position}: {frame.payload.decode()}"))
        self._feed()

    def _report(self, batch: Batch[_Caller], elapsed: float) -> None:
        """`elapsed` begins when the worker was free for the pass."""
        if self.on_pass is not None:
            tokens = sum(item.tokens for item in batch.items)
            self.on_pass(EmbeddingPass(len(batch.items), tokens, batch.padded_tokens, seconds(elapsed)))

    def _requeue(self) -> None:
        """What the dead worker had goes first to the next one, unless it has died of it twice."""
        batches = [found.batch for found in self._under_way.values()]
        self._under_way.clear()
        for call in {id(item.call): item.call for b in batches for item in b.items}.values():
            if call.caller.was_retried:
                self._fail(call, BackendDown(self._down))
            call.caller.was_retried = True
        self._queue.put_back(batches)

    def _give_up(self) -> None:
        under_way = [i.call for found in self._under_way.values() for i in found.batch.items]
        self._under_way.clear()
        for call in (*self._queue.drain(), *under_way):
            self._fail(call, BackendDown(self._down))

    def _fail(self, call: Call[_Caller], error: Exception) -> None:
        self._queue.discard(call)
        if not call.caller.answer.done():
            call.caller.answer.set_exception(error)


def _token_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    return [found.ids for found in tokenizer.encode_batch_fast(list(texts))]


def _checked(inputs: Sequence[Sequence[int]], facts: EncoderFacts) -> list[Ids]:
    if not inputs:
        raise Refused("input is empty: give at least one text or token array", param="input")
    return [_checked_input(position, ids, facts) for position, ids in enumerate(inputs)]


def _checked_input(position: int, ids: Sequence[int], facts: EncoderFacts) -> Ids:
    found = np.asarray(ids, dtype=np.int64)
    if not 1 <= len(found) <= facts.max_input_tokens:
        raise Refused(
            f"input {position} has {len(found)} tokens: the model takes 1 to {facts.max_input_tokens}; "
            "split the text",
            param="input",
            code="context_length_exceeded" if len(found) else None,
        )
    if found.min() < 0 or found.max() >= facts.vocabulary:
        raise Refused(
            f"input {position} has token id {found.min() if found.min() < 0 else found.max()}: the model's "
            f"ids run from 0 to {facts.vocabulary - 1}; tokenise with its own tokenizer",
            param="input",
        )
    return found.astype(np.uint32)


def _deliver(batch: Batch[_Caller], rows: Rows) -> None:
    for item, row in zip(batch.items, rows, strict=True):
        caller = item.call.caller
        caller.rows[item.position] = row
        caller.missing -= 1
        if caller.missing == 0 and not caller.answer.done():
            caller.answer.set_result(caller.rows)
