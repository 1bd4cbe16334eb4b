"""Embeds any number of texts: batches by tokens, adapts the number of open calls, yields batches in order.

No I/O: a client sends the calls that `due` returns and reports each outcome to `settle`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import groupby, islice

import numpy as np
import numpy.typing as npt

from controlplane.api.protocol.requests import MAX_INPUTS, Usage
from controlplane.sdk.api_calls import HttpCall, embed_call
from controlplane.sdk.call_options import Options
from controlplane.sdk.deadline import current_deadline
from controlplane.sdk.errors import ApiError, BadRequest, ConnectionLost, RateLimited
from controlplane.sdk.replies import Embeddings
from controlplane.sdk.retries import Retries, spaced

BATCH_TOKENS = 8192
MAX_CONCURRENCY = 16
MAX_HELD_BYTES = 2**28
"""Vectors that wait for an earlier batch, in bytes; above it no new batch is sent."""
_OUT_OF_MEMORY, _WORKER_DIED = "out_of_memory", "worker_died"


@dataclass(frozen=True, slots=True)
class EmbeddedBatch:
    """Consecutive texts with their vectors: float32 [texts, dimensions].

    The first text is number `start` of the given ones. To resume after this batch, pass its `stop` as
    `start`.
    """

    start: int
    texts: list[str]
    vectors: npt.NDArray[np.float32]
    usage: Usage

    @property
    def stop(self) -> int:
        """The number of the first text after this batch."""
        return self.start + len(self.texts)


class AdaptiveConcurrency:
    """Number of calls to keep open: additive increase, multiplicative decrease (Chiu and Jain 1989).

    Until the first refusal each success adds one call, afterwards a window of successes does. A refusal
    multiplies the number by 7/8, as in DECbit (Ramakrishnan and Jain 1990), because a server without a free
    place in its queue is still busy. Refusals of calls that were sent before the last decrease change
    nothing: they report the same overload.
    """

    DECREASE = 7 / 8
    FIRST = 4.0

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._size = min(self.FIRST, largest)
        self._lowered_at = float("-inf")

    @property
    def size(self) -> int:
        """Calls to keep open, at least 1."""
        return int(self._size)

    def succeeded(self) -> None:
        """Adds a call, before the first refusal for each success, then for each window of successes."""
        has_refused = self._lowered_at > float("-inf")
        self._size = min(self._largest, self._size + (1 / self._size if has_refused else 1))

    def refused(self, sent_at: float, now: float) -> None:
        """Lowers the number of calls, once for all calls that were open at that time."""
        if sent_at >= self._lowered_at:
            self._size, self._lowered_at = max(1.0, self._size * self.DECREASE), now


class TokenEstimate:
    """Tokens of a text, estimated from its UTF-8 bytes by the ratio that the responses so far had."""

    # Four bytes of English text are about one token.
    FIRST = 0.25

    def __init__(self) -> None:
        self._tokens = 0
        self._bytes = 0

    def of(self, text: str) -> float:
        """Estimated tokens of a text."""
        return len(text.encode()) * (self._tokens / self._bytes if self._tokens else self.FIRST)

    def learn(self, texts: Iterable[str], tokens: int) -> None:
        """Adds the tokens that the server counted for some texts."""
        self._tokens += tokens
        self._bytes += sum(len(text.encode()) for text in texts)


@dataclass(slots=True)
class OpenBatch:
    """A batch that is not finished. Times are in seconds of the caller's monotonic clock."""

    start: int
    texts: list[str]
    sent_at: float = 0.0
    not_before: float = 0.0
    refusals: int = 0
    losses: int = 0


Outcome = Embeddings | BaseException
OnRefused = Callable[[int, ApiError], object]


@dataclass
class BulkEmbedding:
    """State of one `embed_many`.

    A refused batch is repeated until it is accepted, never before its Retry-After; meanwhile new batches are
    sent as others succeed. After another transient failure it is repeated as often as `retries` says. A batch
    with a text that is invalid or too large, or of which workers die, is divided until that text is alone;
    with `on_refused`, which is called with its number and its error, it is left out. Any other error, also
    of the iteration over the texts, and one after which the deadline leaves no time for the wait, is raised
    when all earlier batches have been yielded, so that those form a prefix to resume from.
    """

    texts: Iterable[str]
    model: str
    options: Options
    retries: Retries
    start: int = 0
    batch_tokens: int = BATCH_TOKENS
    max_concurrency: int = MAX_CONCURRENCY
    progress: Callable[[int], object] | None = None
    on_refused: OnRefused | None = None
    max_held_bytes: int = MAX_HELD_BYTES
    concurrency: AdaptiveConcurrency = field(init=False)

    def __post_init__(self) -> None:
        for name, least in (("start", 0), ("batch_tokens", 1), ("max_concurrency", 1)):
            if (value := getattr(self, name)) < least:
                raise ValueError(f"{name}={value}: should be at least {least}; change it")
        if isinstance(self.texts, str):
            raise TypeError("texts is one string, whose characters would be embedded; pass a list of texts")
        self.concurrency = AdaptiveConcurrency(self.max_concurrency)
        self._estimate = TokenEstimate()
        self._left = islice(self.texts, self.start, None)
        # A text that was read but did not fit the last batch.
        self._carried: list[str] = []
        self._next_start = self._next_yield = self.start
        self._is_exhausted = False
        # After a refusal no new batch is sent until a call succeeds; a waiting one is sent when it is due.
        self._is_refused = False
        self._sent: dict[int, OpenBatch] = {}
        self._waiting: dict[int, OpenBatch] = {}
        self._finished: dict[int, EmbeddedBatch] = {}
        self._held_bytes = 0
        self._left_out: set[int] = set()
        self._failures: dict[int, BaseException] = {}

    def due(self, now: float) -> Iterator[tuple[OpenBatch, HttpCall[Embeddings]]]:
        """The calls to send now."""
        while len(self._sent) < self.concurrency.size and (batch := self._next(now)) is not None:
            batch.sent_at = now
            self._sent[batch.start] = batch
            yield batch, embed_call(self.model, batch.texts, self.options)

    def _next(self, now: float) -> OpenBatch | None:
        for start in sorted(self._waiting):
            if self._waiting[start].not_before <= now:
                return self._waiting.pop(start)
        # One refused batch may hold up all later ones for as long as its Retry-After.
        is_ahead = self._held_bytes >= self.max_held_bytes
        return None if self._is_refused or is_ahead or self._failures else self._new_batch()

    def _new_batch(self) -> OpenBatch | None:
        texts, self._carried = self._carried, []
        tokens = sum(map(self._estimate.of, texts))
        start = self._next_start
        while len(texts) < MAX_INPUTS and (text := self._next_text(start + len(texts))) is not None:
            tokens += self._estimate.of(text)
            if texts and tokens > self.batch_tokens:
                self._carried = [text]
                break
            texts.append(text)
        if not texts:
            return None
        batch = OpenBatch(start, texts)
        self._next_start += len(texts)
        return batch

    def _next_text(self, number: int) -> str | None:
        """The text of this number; None after the last one.

        What the iteration raises is the failure of this text, and none after it is read.
        """
        if self._is_exhausted:
            return None
        try:
            text: object = next(self._left)
            if isinstance(text, str):
                # Raises for half of a surrogate pair, which no request can have.
                text.encode()
                return text
            raise TypeError(f"text {number} is of type {type(text).__name__}; pass strings alone")
        except StopIteration:
            pass
        except Exception as error:
            error.add_note(f"embed_many: text {number}")
            self._failures[number] = error
        self._is_exhausted = True
        return None

    def wait_s(self, now: float) -> float | None:
        """Seconds until a waiting batch may be sent; None if no batch waits for a place that is free."""
        if not self._waiting or len(self._sent) >= self.concurrency.size:
            return None
        return max(0.0, min(batch.not_before for batch in self._waiting.values()) - now)

    def settle(self, batch: OpenBatch, outcome: Outcome, now: float) -> None:
        """Records the result or the error of a call."""
        del self._sent[batch.start]
        if isinstance(outcome, Embeddings):
            self.concurrency.succeeded()
            self._is_refused = False
            self._estimate.learn(batch.texts, outcome.usage.prompt_tokens)
            found = EmbeddedBatch(batch.start, batch.texts, outcome.vectors, outcome.usage)
            self._finished[batch.start] = found
            self._held_bytes += found.vectors.nbytes
            if self.progress is not None:
                self.progress(len(batch.texts))
        elif (wait_s := self._wait_after(batch, outcome)) is not None and _is_in_time(wait_s):
            self.concurrency.refused(batch.sent_at, now)
            self._is_refused = True
            batch.not_before = now + wait_s
            self._waiting[batch.start] = batch
        elif isinstance(outcome, ApiError) and _is_about_a_text(outcome):
            self._is_refused = False
            self._divide(batch, outcome)
        else:
            outcome.add_note(f"embed_many: texts {batch.start} to {batch.start + len(batch.texts) - 1}")
            self._failures[batch.start] = outcome

    def _divide(self, batch: OpenBatch, error: ApiError) -> None:
        """Replaces a batch that has a refused text by parts of it; a single text is that text."""
        if len(batch.texts) > 1:
            start = batch.start
            for texts in _parts(batch.texts):
                self._waiting[start] = OpenBatch(start, texts)
                start += len(texts)
        elif self.on_refused is not None:
            self._left_out.add(batch.start)
            self.on_refused(batch.start, error)
        else:
            error.add_note(f"embed_many: text {batch.start}, {batch.texts[0]!r:.80}")
            self._failures[batch.start] = error

    def _wait_after(self, batch: OpenBatch, error: BaseException) -> float | None:
        """Seconds before the batch is repeated; None for an error that is raised."""
        # The server has repeated a request alone before it says that workers die of it.
        if isinstance(error, ApiError) and (not error.is_retryable or error.code == _WORKER_DIED):
            return None
        if isinstance(error, ApiError) and error.code == _OUT_OF_MEMORY:
            # One text does not fit into the device's memory, and the others of its batch do not wait for it.
            if len(batch.texts) > 1 or batch.losses >= self.retries.most:
                return None
            batch.losses += 1
        if isinstance(error, ApiError) and error.retry_after:
            # A time of 0, or one in the past, states nothing.
            return spaced(error.retry_after)
        if isinstance(error, RateLimited):
            batch.refusals += 1
            return self.retries.backoff_s(batch.refusals - 1)
        if isinstance(error, ConnectionLost | ApiError) and batch.losses < self.retries.most:
            batch.losses += 1
            return self.retries.backoff_s(batch.losses - 1)
        return None

    def finished(self) -> Iterator[EmbeddedBatch]:
        """The next batches in order. Raises the error of the batch whose turn it is."""
        while True:
            if (batch := self._finished.pop(self._next_yield, None)) is not None:
                self._next_yield = batch.stop
                self._held_bytes -= batch.vectors.nbytes
                yield batch
            elif self._next_yield in self._left_out:
                self._left_out.remove(self._next_yield)
                self._next_yield += 1
            else:
                break
        if self._next_yield in self._failures:
            raise self._failures[self._next_yield]

    @property
    def is_complete(self) -> bool:
        """Whether every text has been yielded or left out."""
        return self._is_exhausted and not self._carried and self._next_yield == self._next_start


def _is_about_a_text(error: ApiError) -> bool:
    """Whether a batch without one of the texts may be served."""
    if error.code in (_OUT_OF_MEMORY, _WORKER_DIED):
        return True
    # A body that is too large is refused before its fields are read.
    is_too_large = error.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    return isinstance(error, BadRequest) and (error.param == "input" or is_too_large)


def _parts(texts: list[str]) -> list[list[str]]:
    """Runs of empty and of other texts, because servers refuse the empty text; without both, two halves."""
    runs = [list(run) for _, run in groupby(texts, bool)]
    half = len(texts) // 2
    return runs if len(runs) > 1 else [texts[:half], texts[half:]]


def _is_in_time(wait_s: float) -> bool:
    """Whether time remains for a call after the wait, within the deadline of the caller's block."""
    deadline = current_deadline()
    return deadline is None or wait_s < deadline.remaining_s()
