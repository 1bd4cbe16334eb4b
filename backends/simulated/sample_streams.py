"""Samples of the simulated LLM's requests, and the streams through which their tokens leave.

Resuming the coroutines that read a stream costs more than the rest of a step. A reader that only counts
tokens is therefore called with each delta, and its coroutines resume with the last one.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from backends.simulated.policy_scheduler import PolicySequence
from backends.simulated.prefix_cache import OUTPUT_TOKEN
from backends.vllm.plugin.request_metadata import Defaults, make_engine_request, metadata_of
from controlplane.core.clock import Instant
from controlplane.core.errors import BackendDown
from controlplane.core.generation import Delta, Handoff
from controlplane.core.request import Request

TakeDelta = Callable[[Delta], None]

_TEXT = "w "
_BETWEEN_STEPS_SECONDS = 1e-6
_DEFAULTS = Defaults()


@dataclass(eq=False, slots=True)
class Sample(PolicySequence):
    """One sequence of a generation; `is_capped` if max_tokens rather than an end of sequence stops it."""

    index: int = 0
    is_capped: bool = False
    generation: "SampleStream" = field(init=False)

    @property
    def sender_id(self) -> str:
        """Id of the generation's request."""
        return self.generation.request_id


@dataclass(eq=False, slots=True)
class SampleStream:
    """The samples of one request and the deltas not yet read by its stream.

    `take` is called with each delta but the last of each sample; None if the stream is read like any other.
    """

    request_id: str
    samples: Sequence[Sample]
    take: TakeDelta | None
    # Looking it up makes a system call, and every token is waited for.
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _deltas: deque[Delta] = field(default_factory=deque)
    _waiter: asyncio.Future[None] | None = None
    _down_reason: str | None = None
    _open: int = field(init=False)

    def __post_init__(self) -> None:
        self._open = len(self.samples)

    @property
    def is_awaited(self) -> bool:
        """Whether the reader has read all deltas and waits for the next one."""
        return self._waiter is not None and not self._waiter.done()

    def push(self, delta: Delta) -> None:
        """Adds a delta and wakes the stream."""
        self._deltas.append(delta)
        self._wake()

    def fail(self, reason: str) -> None:
        """Ends the stream with BackendDown after the deltas pushed so far."""
        self._down_reason = reason
        self._wake()

    async def next(self) -> Delta | None:
        """The next delta; None after the final one of each sample. Raises BackendDown on a failed device."""
        if not self._open:
            return None
        if not self._deltas and self._down_reason is None:
            self._waiter = self._loop.create_future()
            await self._waiter
        if not self._deltas:
            raise BackendDown(f"simulated device: {self._down_reason}")
        delta = self._deltas.popleft()
        self._open -= delta.finish_reason is not None
        return delta

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def open_stream(
    request_id: str,
    prompt: Sequence[int],
    *,
    left: int,
    max_tokens: int,
    samples: int,
    cached_by: int | None,
    take: TakeDelta | None,
) -> SampleStream:
    """A generation of `samples` samples that would end after `left` tokens, cut off at `max_tokens`.

    `cached_by` is the number of tokens of a block; None without a prefix cache.
    """
    output, is_capped = max(1, min(left, max_tokens)), left >= max_tokens
    drawn = [Sample(len(prompt), output, index=index, is_capped=is_capped) for index in range(samples)]
    generation = SampleStream(request_id, drawn, take)
    for sample in generation.samples:
        sample.generation = generation
        if cached_by is not None:
            sample.know_tokens(prompt, cached_by)
    return generation


def put_under_policy(
    generation: SampleStream, request: Request, handoff: Handoff, *, max_tokens: int, now: Instant
) -> None:
    """Gives each sample the engine policy's state, from the metadata that the gate sends to vLLM."""
    for sample in generation.samples:
        sample.state = make_engine_request(
            metadata_of(request, handoff),
            _DEFAULTS,
            request_id=f"{sample.index}_{request.id}" if len(generation.samples) > 1 else request.id,
            prompt_tokens=sample.prompt,
            max_tokens=max_tokens,
            now=now,
        )


class TokenDeltas:
    """The deltas of the simulated tokens, delivered some seconds after their step.

    One object per sample index is shared between requests, because creating a delta per token would cost
    more than the rest of a step.
    """

    def __init__(self, delay: float = 0.0, delay_per_token: float = 0.0) -> None:
        self._delay, self._delay_per_token = delay, delay_per_token
        self._by_index: dict[int, Delta] = {}
        self._delivered_at = 0.0

    def deliver(self, samples: Collection[Sample], loop: asyncio.AbstractEventLoop) -> None:
        """Gives the newest token of each sample to its reader; they run in this order on the loop."""
        tokens = [(sample.generation, self.next(sample)) for sample in samples]
        if delay := self._delay + self._delay_per_token * len(tokens):
            # Timers of one instant run in any order.
            self._delivered_at = max(loop.time() + delay, self._delivered_at + _BETWEEN_STEPS_SECONDS)
            loop.call_at(self._delivered_at, _hand_over, tokens, loop)
        else:
            _hand_over(tokens, loop)

    def next(self, sample: Sample) -> Delta:
        """The delta of the sample's newest token.

        It has the finish reason if the sample has ended; the first and the last have the cached tokens.
        """
        if sample.is_removed or (sample.found and sample.produced == 1):
            reason = ("length" if sample.is_capped else "stop") if sample.is_removed else None
            found = sample.found
            return Delta(sample.index, _TEXT, (OUTPUT_TOKEN,), finish_reason=reason, cached_tokens=found)
        if (delta := self._by_index.get(sample.index)) is None:
            delta = self._by_index[sample.index] = Delta(sample.index, _TEXT, (OUTPUT_TOKEN,))
        return delta


def _hand_over(tokens: Iterable[tuple[SampleStream, Delta]], loop: asyncio.AbstractEventLoop) -> None:
    calls: list[tuple[SampleStream, Delta]] = []
    for stream, delta in tokens:
        if delta.finish_reason is None and stream.take is not None and stream.is_awaited:
            calls.append((stream, delta))
            continue
        if calls:
            loop.call_soon(_take_all, calls)
            calls = []
        stream.push(delta)
    if calls:
        loop.call_soon(_take_all, calls)


def _take_all(calls: Iterable[tuple[SampleStream, Delta]]) -> None:
    for stream, delta in calls:
        try:
            if stream.take is not None:
                stream.take(delta)
        except Exception as error:
            # Nothing awaits this call, so the stream raises the error.
            stream.fail(repr(error))
