"""Which batch goes to the worker, and what does its answer mean? No socket, no clock, no waiting.

Rule: one batch a lane is computed, one more lies ready if it is worth a pass as it is: what goes out early
gets no more company. Rows go to their call; a call is settled with its last row. A batch that fails is
halved until the single input at fault is found, and only that input's call fails. One that found no memory
lowers the budget besides; if it was a single input, it is tried once more with nothing beside it. What a
dead worker had goes first to the next one, once; a call whose second worker dies too fails. One that somebody
killed may have been too large for the system's memory: its batches go out in halves. One that ends because of
a batch that failed ends nobody else's tries.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from backends.embedding.batcher import Batch, BatchQueue, QueuedCall
from backends.embedding.budget import PassBudget
from backends.embedding.deadline_order import ServiceRate
from backends.embedding.ipc import Ids, PassResult, Rows
from backends.embedding.memory_model import MemoryPoint
from backends.embedding.time_model import TimePoint
from controlplane.core.clock import Instant, seconds
from controlplane.core.errors import BackendDown, BackendFailed, NoMemory
from controlplane.core.ports import EmbeddingPass

_log = logging.getLogger(__name__)

# Inputs of like length are sought among this many passes' worth of the most urgent ones.
_WINDOW_PASSES = 4


@dataclass(eq=False, slots=True)
class PendingCall:
    """Who waits for `rows`. `rows_missing` counts those not yet there, `tokens` their tokens; `on_done` is called
    once."""

    inputs: list[Ids]
    rows: Rows
    on_done: Callable[[Exception | None], None]
    rows_missing: int = field(init=False)
    tokens: int = field(init=False)
    was_retried: bool = False
    is_done: bool = False

    def __post_init__(self) -> None:
        self.rows_missing, self.tokens = len(self.inputs), sum(map(len, self.inputs))


@dataclass(frozen=True, slots=True)
class _InFlight:
    """`is_solo_retry` of an input that found no memory before: nothing is sent beside it."""

    batch: Batch[PendingCall]
    bytes: int
    is_solo_retry: bool = False


@dataclass(slots=True)
class BatchDispatcher:
    budget: PassBudget | None = None
    out_of_memory: int = 0
    """How often a pass found none."""
    restart_seconds: float | None = None
    """Seconds that replacing a worker takes, where that is known."""
    _queue: BatchQueue[PendingCall] = field(default_factory=lambda: BatchQueue(1))
    _in_flight: dict[int, _InFlight] = field(default_factory=dict)
    _solo_retries: deque[Batch[PendingCall]] = field(default_factory=deque)
    _rate: ServiceRate = field(default_factory=ServiceRate)
    _numbers: "count[int]" = field(default_factory=lambda: count(1))

    @property
    def has_batches_in_flight(self) -> bool:
        return bool(self._in_flight)

    @property
    def expected_seconds_in_flight(self) -> float:
        """What the batches that were sent should take, one after the other."""
        budget = self.budget
        if budget is None:
            return 0.0
        batches = [sent.batch.items for sent in self._in_flight.values()]
        return sum(budget.time.seconds(len(items), items[0].tokens) for items in batches)

    def worker_started(self, budget: PassBudget) -> None:
        """A worker is there. What it was measured to be holds from now on."""
        if self.budget is not None:
            budget.inherit(self.budget)
        self.budget = budget
        self._queue.budget_tokens = _WINDOW_PASSES * budget.full_tokens
        self._queue.pass_tokens = budget.time.model.start_tokens
        self._queue.lanes = budget.lanes

    def put(self, caller: PendingCall, *, deadline: Instant | None) -> QueuedCall[PendingCall]:
        return self._queue.put(caller, [len(ids) for ids in caller.inputs], deadline=deadline)

    def cancel(self, call: QueuedCall[PendingCall]) -> None:
        """What has not gone out never will. Twice is as good as once."""
        self._queue.discard(call)

    def next_batch(
        self, limit_seconds: float | None, now: Instant, *, starts_small: bool = True
    ) -> tuple[int, list[Ids]] | None:
        """(number, inputs) of a batch to send `now`, which says who is late. `limit_seconds` bounds its time,
        one input at least. Without `starts_small` what is not worth a pass waits even if a lane is free."""
        budget = self.budget
        if budget is None or len(self._in_flight) > budget.lanes:
            return None
        while self._solo_retries and self._solo_retries[0].items[0].call.is_discarded:
            self._solo_retries.popleft()
        if self._solo_retries:
            if self._in_flight:
                return None
            return self._mark_sent(_InFlight(self._solo_retries.popleft(), 0, is_solo_retry=True), now)
        if any(sent.is_solo_retry for sent in self._in_flight.values()):
            return None
        may_be_small = starts_small and len(self._in_flight) < budget.lanes
        if not may_be_small and limit_seconds is None and not self._queue.is_worth_a_pass(budget.tokens):
            return None
        batch = self._queue.next_batch(
            lambda longest: budget.max_inputs(longest, limit_seconds), now, self._rate.ns_per_token
        )
        if batch is None:
            return None
        pass_bytes = budget.memory.pass_bytes(len(batch.items), batch.items[0].tokens)
        if not budget.fits_with([sent.bytes for sent in self._in_flight.values()], pass_bytes):
            self._queue.requeue([batch])
            return None
        return self._mark_sent(_InFlight(batch, pass_bytes), now)

    def _mark_sent(self, sent: _InFlight, now: Instant) -> tuple[int, list[Ids]]:
        self._rate.pass_started(now)
        number = next(self._numbers)
        self._in_flight[number] = sent
        return number, [item.call.caller.inputs[item.position] for item in sent.batch.items]

    def pass_finished(self, number: int, result: PassResult, now: Instant) -> EmbeddingPass | None:
        """None for a batch that nobody waits for any more."""
        if (sent := self._in_flight.pop(number, None)) is None:
            return None
        assert self.budget is not None
        batch, budget = sent.batch, self.budget
        inputs, longest = len(batch.items), batch.items[0].tokens
        budget.time.observe(TimePoint(inputs, longest, result.elapsed_ns / 1e9))
        budget.memory = budget.memory.raised_to_cover(MemoryPoint(inputs, longest, result.peak_bytes))
        budget.record_success(batch.padded_tokens)
        for item, row in zip(batch.items, result.rows, strict=True):
            caller = item.call.caller
            caller.rows[item.position] = row
            caller.rows_missing -= 1
            caller.tokens -= item.tokens
            if caller.rows_missing == 0:
                self._finish(item.call, None)
        # Lanes share the device: what ran beside this pass had its part of the time.
        concurrent = min(budget.lanes, len(self._in_flight) + 1)
        tokens = sum(item.tokens for item in batch.items)
        self._rate.pass_finished(now, tokens)
        if not self._in_flight and not self._queue.has_calls:
            self._rate.idle()
        return EmbeddingPass(
            inputs, tokens, batch.padded_tokens, seconds(result.elapsed_ns / 1e9 / concurrent)
        )

    def pass_failed(self, number: int, message: str, *, is_out_of_memory: bool) -> None:
        if (sent := self._in_flight.pop(number, None)) is None:
            return
        assert self.budget is not None
        batch = sent.batch
        if is_out_of_memory:
            self._record_out_of_memory(batch.padded_tokens)
        if halves := batch.halves():
            _log.warning("a batch of %d inputs failed, halving it: %s", len(batch.items), message)
            self._queue.requeue(halves)
        elif is_out_of_memory and not sent.is_solo_retry:
            self._solo_retries.append(batch)
        else:
            item = batch.items[0]
            failure = NoMemory if is_out_of_memory else BackendFailed
            self._finish(item.call, failure(f"input {item.position}: {message}", position=item.position))

    def worker_died(self, reason: str, *, was_killed: bool = False, failure_reported: bool = False) -> None:
        """`failure_reported`: which batch has broken it is known, and was told by `pass_failed`."""
        batches = [sent.batch for sent in self._in_flight.values()]
        self._in_flight.clear()
        self._rate.idle()
        for call in _calls_of([] if failure_reported else batches):
            if call.caller.was_retried:
                self._finish(call, BackendDown(reason, retry_after=self.restart_seconds))
            call.caller.was_retried = True
        if was_killed and batches:
            self._record_out_of_memory(max(batch.padded_tokens for batch in batches))
            batches = [part for batch in batches for part in batch.halves() or (batch,)]
        self._queue.requeue(batches)

    def fail_all(self, reason: str, *, retry_after: float | None = None) -> None:
        """Nobody will compute what is here."""
        batches = [*self._solo_retries, *(sent.batch for sent in self._in_flight.values())]
        self._solo_retries.clear()
        self._in_flight.clear()
        for call in (*self._queue.drain(), *_calls_of(batches)):
            self._finish(call, BackendDown(reason, retry_after=retry_after))

    def _record_out_of_memory(self, padded_tokens: int) -> None:
        assert self.budget is not None
        self.out_of_memory += 1
        self.budget.record_out_of_memory(padded_tokens)

    def _finish(self, call: QueuedCall[PendingCall], error: Exception | None) -> None:
        self._queue.discard(call)
        if not call.caller.is_done:
            call.caller.is_done = True
            call.caller.on_done(error)


def _calls_of(batches: Sequence[Batch[PendingCall]]) -> list[QueuedCall[PendingCall]]:
    return list({id(item.call): item.call for batch in batches for item in batch.items}.values())
