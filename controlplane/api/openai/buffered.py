"""Buffered responses: collects all choices, then sends one JSON object. Merges several prompts.

The prompts of one HTTP request run concurrently, each as a request with its own lease; if one fails, the
others are aborted. Choice `i` of prompt `p` has the index `p * n + i`.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import orjson
from starlette.types import Send

from controlplane.api.errors import Problem
from controlplane.api.post_endpoint import send_json, ticket_headers
from controlplane.core.generation import Delta
from controlplane.service.gate.gate import Gate
from controlplane.service.gate.token_stream import TokenStream
from controlplane.service.request_jobs import GenerateJob
from controlplane.service.ticket import Ticket

Opened = tuple[list[Ticket], AsyncIterator[Delta]]

_LOOK_SECONDS = 1.0
_MOST_SECONDS = 60.0
_MOST_MERGED = 1_024


@asynccontextmanager
async def opened_answers(gate: Gate, jobs: Sequence[GenerateJob]) -> AsyncGenerator[Opened]:
    """Starts all jobs and yields their tickets and one merged stream of deltas, once all are admitted.

    Leaving the context aborts the jobs that still run.
    """
    if len(jobs) > 1:
        async with _merged(gate, jobs) as merged:
            yield merged
        return
    answer = await gate.generate(jobs[0])
    async with aclosing(answer), ReadAhead(answer).started() as deltas:
        yield [answer.ticket], deltas


@asynccontextmanager
async def _merged(gate: Gate, jobs: Sequence[GenerateJob]) -> AsyncGenerator[Opened]:
    deltas = UnreadDeltas(len(jobs))
    tickets: dict[int, Ticket] = {}
    all_admitted = asyncio.Event()

    async def follow(at: int, job: GenerateJob) -> None:
        answer = await gate.generate(job)
        async with aclosing(answer):
            tickets[at] = answer.ticket
            if len(tickets) == len(jobs):
                all_admitted.set()
            async for delta in answer:
                deltas.put(replace(delta, index=at * job.sampling.n + delta.index))
        deltas.job_ended()

    try:
        async with asyncio.TaskGroup() as group:
            followers = []
            try:
                for at, job in enumerate(jobs):
                    followers.append(group.create_task(follow(at, job)))
                    # Each enters the gate, whose cycle takes longer with each that waits.
                    await asyncio.sleep(0)
                await all_admitted.wait()
                yield [tickets[at] for at in range(len(jobs))], aiter(deltas)
            finally:
                # Also out of this frame, to which their exceptions refer.
                while followers:
                    followers.pop().cancel()
    except BaseExceptionGroup as group_error:
        first, *others = group_error.exceptions
        for error in others:
            # Tickets are remembered with their error, and its traceback would keep the request.
            error.__traceback__ = None
        raise first from None


class UnreadDeltas:
    """The deltas of several jobs that their reader has not taken yet.

    Those of a choice are merged while they are of one kind (reasoning, text or tool calls), up to 1,024
    tokens: a full queue would delay finished jobs in releasing memory, and one without merging would have an
    object for each token that a slow client does not read.
    """

    def __init__(self, jobs: int) -> None:
        self._running = jobs
        self._pending: dict[int, deque[Delta]] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return sum(map(len, self._pending.values()))

    def put(self, delta: Delta) -> None:
        """Adds a delta."""
        unread = self._pending.setdefault(delta.index, deque())
        if unread and _may_merge(unread[-1], delta):
            unread[-1] = unread[-1].followed_by(delta)
        else:
            unread.append(delta)
        self._changed.set()

    def job_ended(self) -> None:
        """Notes that one of the jobs puts no further delta."""
        self._running -= 1
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Takes the deltas, the choice that has waited longest first, until all jobs have ended."""
        while self._running or self._pending:
            if not self._pending:
                self._changed.clear()
                await self._changed.wait()
                continue
            unread = self._pending.pop(index := next(iter(self._pending)))
            delta = unread.popleft()
            if unread:
                self._pending[index] = unread
            yield delta


def _may_merge(earlier: Delta, later: Delta) -> bool:
    def kind(delta: Delta) -> tuple[bool, bool]:
        return bool(delta.reasoning), bool(delta.tool_calls)

    return len(earlier.token_ids) < _MOST_MERGED and kind(earlier) == kind(later)


class ReadAhead:
    """The deltas of one answer, read to its end also if their reader has stopped taking them.

    A request ends, and its lease is closed, when its last delta is read. If the reader has not taken the next
    delta for one to two seconds, because its client reads slowly, a task reads the others ahead. Once it has
    read all of them, the reader has 60 s for each, since they take memory that no limit counts.
    """

    def __init__(self, answer: TokenStream) -> None:
        self._answer = answer
        self._unread = UnreadDeltas(1)
        self._taken = self._taken_before = 0
        self._is_waiting = False
        self._reading: asyncio.Task[None] | None = None
        self._limit = asyncio.timeout(None)

    @asynccontextmanager
    async def started(self) -> AsyncGenerator[AsyncIterator[Delta]]:
        """Yields the deltas, which raise what the answer raises. Raises Problem if the client is too slow."""
        self._watch()
        try:
            async with self._limit:
                yield self._deltas()
        except TimeoutError:
            if not self._limit.expired():
                raise
            message = f"the client has not read the answer for {_MOST_SECONDS:g} s; read it faster"
            raise Problem(408, message, code="client_too_slow") from None
        finally:
            self._timer.cancel()
            if self._reading is not None:
                self._reading.cancel()
                await asyncio.gather(self._reading, return_exceptions=True)

    async def _deltas(self) -> AsyncIterator[Delta]:
        async for delta in self._answer:
            self._taken += 1
            self._is_waiting = True
            yield delta
            self._is_waiting = False
            if self._reading is not None:
                break
        if self._reading is not None:
            async for delta in self._unread:
                self._limit_next()
                yield delta
            self._limit.reschedule(None)
            await self._reading

    def _limit_next(self) -> None:
        self._limit.reschedule(asyncio.get_running_loop().time() + _MOST_SECONDS)

    def _watch(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)

    def _look(self) -> None:
        if self._is_waiting and self._taken == self._taken_before:
            self._reading = asyncio.create_task(self._read())
            return
        self._taken_before = self._taken
        self._watch()

    async def _read(self) -> None:
        try:
            async for delta in self._answer:
                self._unread.put(delta)
        finally:
            self._unread.job_ended()
            if self._unread:
                self._limit_next()


class UsageCounter:
    """Counts the tokens for `usage`.

    The `n` choices of one prompt share its cached tokens, which are counted once. Without `has_output` the
    client gets no output token, so none is counted. With `has_reasoning` the usage states its tokens.
    """

    def __init__(
        self, prompt_tokens: int, *, n: int, has_output: bool = True, has_reasoning: bool = False
    ) -> None:
        self._prompt_tokens = prompt_tokens
        self._n = n
        self._has_output = has_output
        self._has_reasoning = has_reasoning
        self._completion_tokens: Counter[int] = Counter()
        self._reasoning_tokens: dict[int, int] = {}
        self._cached: dict[int, int] = {}

    def count(self, delta: Delta) -> None:
        """Adds the tokens of `delta`."""
        if self._has_output:
            self._completion_tokens[delta.index] += len(delta.token_ids)
        if delta.reasoning:
            self._reasoning_tokens[delta.index] = self._completion_tokens[delta.index]
        if delta.cached_tokens:
            prompt = delta.index // self._n
            self._cached[prompt] = max(delta.cached_tokens, self._cached.get(prompt, 0))

    @property
    def counts(self) -> tuple[int, int, int]:
        """Tokens so far: of the prompt, of the part of it that was cached, and of the output."""
        return self._prompt_tokens, sum(self._cached.values()), self._completion_tokens.total()

    @property
    def reasoning_tokens(self) -> int:
        """Tokens so far up to the end of the reasoning of each choice."""
        return sum(self._reasoning_tokens.values())

    def usage(self) -> dict[str, object]:
        """The `usage` object so far."""
        prompt, cached, completion = self.counts
        used: dict[str, object] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        if cached:
            used["prompt_tokens_details"] = {"cached_tokens": cached}
        if self._has_reasoning:
            used["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return used


class Choice(ABC):
    """Collects the deltas of one choice."""

    def __init__(self, text: str = "") -> None:
        self.text = [text]
        self._finish_reason: str | None = None
        self._stop_reason: str | int | None = None

    def add(self, delta: Delta) -> None:
        """Appends `delta`."""
        self.text.append(delta.text)
        if delta.finish_reason is not None:
            self._finish_reason, self._stop_reason = delta.finish_reason, delta.stop_reason

    @abstractmethod
    def fields(self) -> dict[str, object]:
        """The endpoint's own fields of the choice."""

    def to_json(self, index: int) -> dict[str, object]:
        """The choice as JSON."""
        ending = {"finish_reason": self._finish_reason, "stop_reason": self._stop_reason}
        return {"index": index, **self.fields(), **ending}


async def collect(
    gate: Gate, jobs: Sequence[GenerateJob], counter: UsageCounter, add: Callable[[Delta], object]
) -> list[Ticket]:
    """Runs the jobs to their end, counts and adds each delta, and returns the tickets."""
    async with opened_answers(gate, jobs) as (tickets, deltas):
        async for delta in deltas:
            counter.count(delta)
            add(delta)
    return tickets


async def send_whole(
    send: Send,
    gate: Gate,
    jobs: Sequence[GenerateJob],
    *,
    head: Mapping[str, object],
    choices: Sequence[Choice],
    counter: UsageCounter,
) -> None:
    """Runs the jobs to their end and sends one JSON response.

    Args:
        send: ASGI send.
        gate: runs the jobs.
        jobs: one per prompt.
        head: fields before `choices`.
        choices: collectors, by choice index.
        counter: counts the usage.
    """
    tickets = await collect(gate, jobs, counter, lambda delta: choices[delta.index].add(delta))
    parts = [orjson.dumps(head)[:-1] + b',"choices":[']
    for index, choice in enumerate(choices):
        if index:
            parts.append(b",")
            # Choices with log probabilities are megabytes each, and several replies may end in one step.
            await asyncio.sleep(0)
        parts.append(orjson.dumps(choice.to_json(index)))
    parts.append(b'],"usage":' + orjson.dumps(counter.usage()) + b"}")
    await send_json(send, b"".join(parts), ticket_headers(tickets))
