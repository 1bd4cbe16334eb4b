"""Tracks embedding batches in flight; splits and retries a batch that ran out of memory or lost its worker.

One batch per lane is computed, and one more waits at the worker if it is worth a pass already: a batch sent
early cannot be extended. Rows are written into their call, which completes with its last row.

A failed batch is halved until the input at fault is found; only that input's call fails. An out-of-memory
error also lowers the budget; a single input that ran out of memory is retried once with nothing else in
flight. Batches of a worker that died are sent first to the next one. A call fails if the second worker dies
with it too, unless the worker reported which batch broke it. A worker killed by SIGKILL may have exceeded
the system's memory, so its batches are sent in halves.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, count

from backends.embedding.batcher import Batch, BatchQueue, Item, QueuedCall
from backends.embedding.budget import PassBudget
from backends.embedding.deadline_order import ServiceRate, time_left
from backends.embedding.ipc import Ids, PassResult, Rows
from backends.embedding.memory_model import MemoryPoint
from backends.embedding.time_model import ObservedTime, TimePoint
from controlplane.core.clock import Duration, Instant, after, between, seconds, to_seconds
from controlplane.core.errors import BackendDown, BackendFailed, NoMemory, WorkerDied
from controlplane.core.ports import EmbeddingPass, PauseCost
from controlplane.policy.sharing.pass_size import LongestPass, PendingWork, call_values, inputs_to_compute

_log = logging.getLogger(__name__)

# The batcher groups inputs by length within a window of this many passes of the most urgent inputs.
_WINDOW_PASSES = 4
_NEVER = Instant(0)
_STARVED_FACTOR, _STARVED_SECONDS = 4.0, 0.05


@dataclass(eq=False, slots=True)
class PendingCall:
    """One call, of `request_id`, that waits for its `rows`.

    `rows_missing` counts the rows not computed yet and `tokens` their tokens. `on_done` is called exactly
    once, with None or the error.
    """

    inputs: list[Ids]
    rows: Rows
    on_done: Callable[[Exception | None], None]
    request_id: str = ""
    rows_missing: int = field(init=False)
    tokens: int = field(init=False)
    was_retried: bool = False
    is_done: bool = False

    def __post_init__(self) -> None:
        self.rows_missing, self.tokens = len(self.inputs), sum(map(len, self.inputs))


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A batch sent to the worker `at` this time, `is_ahead` while every lane was busy.

    A `is_solo_retry` repeats alone an input that ran out of memory, or inputs of one call that were in flight
    when the worker died. `priced` is that of `EmbeddingPass`.
    """

    batch: Batch[PendingCall]
    bytes: int
    at: Instant
    is_ahead: bool = False
    is_solo_retry: bool = False
    priced: Duration | None = None


@dataclass(slots=True)
class BatchDispatcher:
    """Queue, batches in flight and retries of one model; `budget` is None before the first worker."""

    budget: PassBudget | None = None
    out_of_memory: int = 0
    """Number of passes that ran out of memory."""
    restart_seconds: float | None = None
    """Predicted seconds until a replaced worker is ready; None if unknown."""
    longest_pass: LongestPass = field(default_factory=LongestPass)
    """Knows the objectives of recent calls."""
    _queue: BatchQueue[PendingCall] = field(default_factory=lambda: BatchQueue(1))
    _in_flight: dict[int, _InFlight] = field(default_factory=dict)
    _solo_retries: deque[Batch[PendingCall]] = field(default_factory=deque)
    _rate: ServiceRate = field(default_factory=ServiceRate)
    _numbers: "count[int]" = field(default_factory=lambda: count(1))
    _last_end: Instant = _NEVER

    @property
    def has_batches_in_flight(self) -> bool:
        """Whether a batch was sent and has no result yet."""
        return bool(self._in_flight)

    @property
    def has_withheld_calls(self) -> bool:
        """Whether inputs are queued although a lane is free."""
        return self.budget is not None and self._queue.has_calls and len(self._in_flight) < self.budget.lanes

    def latest_start(self, now: Instant) -> Instant | None:
        """Time from which embedding work needs the CPU at full priority; it may have passed.

        The earliest of two kinds of time: when half of what is left to a deadline is the predicted time of
        the calls due until then, and when a batch in flight starves, that is, has taken 50 ms more than four
        times its predicted time, earlier batches included. None without deadlines and batches in flight.
        """
        if self.budget is None:
            return None
        time, found, ahead = self.budget.time.model, [], 0.0
        for sent in self._in_flight.values():
            took = time.seconds(len(sent.batch.items), sent.batch.items[0].tokens)
            ahead += took
            found.append(after(sent.at, seconds(_STARVED_FACTOR * ahead + _STARVED_SECONDS)))
            found += _latest_starts([item.call for item in sent.batch.items], ahead, now)
        for call in self._queue.calls:
            ahead += time.seconds(len(call.pending), call.lengths[call.pending[0]])
            found += _latest_starts([call], ahead, now)
        return min(found, default=None)

    @property
    def expected_seconds_in_flight(self) -> float:
        """Predicted duration of all batches in flight, one after the other."""
        budget = self.budget
        if budget is None:
            return 0.0
        batches = [sent.batch.items for sent in self._in_flight.values()]
        return sum(budget.time.seconds(len(items), items[0].tokens) for items in batches)

    def worker_started(self, budget: PassBudget) -> None:
        """Adopts the limits profiled by a new worker, and the limits learned with the previous one."""
        if self.budget is not None:
            budget.inherit(self.budget)
        self.budget = budget
        self._queue.window_tokens = _WINDOW_PASSES * budget.full_tokens
        self._queue.start_tokens = budget.time.model.start_tokens
        self._queue.lanes = budget.lanes

    def put(
        self, pending: PendingCall, *, deadline: Instant | None, weight: float = 1.0
    ) -> QueuedCall[PendingCall]:
        """Queues a call of a service class of this weight."""
        lengths = [len(ids) for ids in pending.inputs]
        return self._queue.put(pending, lengths, deadline=deadline, weight=weight)

    def cancel(self, call: QueuedCall[PendingCall]) -> None:
        """Drops the inputs of a call that are not in flight. Idempotent."""
        self._queue.discard(call)

    def next_batch(
        self, cost: PauseCost | None, now: Instant, *, starts_small: bool = True
    ) -> tuple[int, list[Ids]] | None:
        """Returns (number, inputs) of a batch to send, or None if none should be sent now.

        Args:
            cost: what the pass costs the running generations; None: nothing. With a cost, no batch is sent
                ahead, because it changes with every engine step.
            now: current time, to find calls that must be late.
            starts_small: whether a free lane may take a batch that is not worth a pass on its own.
        """
        budget = self.budget
        if budget is None or len(self._in_flight) > budget.lanes:
            return None
        while self._solo_retries and self._solo_retries[0].items[0].call.is_discarded:
            self._solo_retries.popleft()
        if self._solo_retries:
            if self._in_flight:
                return None
            return self._mark_sent(_InFlight(self._solo_retries.popleft(), 0, now, is_solo_retry=True))
        if any(sent.is_solo_retry for sent in self._in_flight.values()):
            return None
        may_be_small = starts_small and len(self._in_flight) < budget.lanes
        if cost is not None:
            if len(self._in_flight) >= budget.lanes:
                return None
        elif not may_be_small and not self._queue.is_worth_a_pass(budget.tokens):
            return None
        choose_size = partial(self._size, budget.time, cost, now)
        batch = self._queue.next_batch(budget.max_inputs, now, self._rate.ns_per_token, choose_size)
        if batch is None:
            return None
        pass_bytes = budget.memory.pass_bytes(len(batch.items), batch.items[0].tokens)
        if not budget.fits_with([sent.bytes for sent in self._in_flight.values()], pass_bytes):
            self._queue.requeue([batch])
            return None
        is_ahead = len(self._in_flight) >= budget.lanes
        took = budget.time.seconds(len(batch.items), batch.items[0].tokens)
        priced = None if cost is None else seconds(took)
        return self._mark_sent(_InFlight(batch, pass_bytes, now, is_ahead, priced=priced))

    def _size(
        self,
        time: ObservedTime,
        cost: PauseCost | None,
        now: Instant,
        calls: Sequence[QueuedCall[PendingCall]],
        items: Sequence[Item[PendingCall]],
    ) -> int:
        """How many of `items`, the most urgent first, the next pass takes."""
        longest = list(accumulate((item.tokens for item in items), max))

        def took(inputs: int) -> Duration:
            return seconds(time.seconds(inputs, longest[inputs - 1]))

        items = items[: self.longest_pass.inputs(len(items), took, seconds(time.seconds(0, 0)))]
        if cost is None:
            return len(items)
        works = [
            time.caution * time.seconds(len(call.pending), call.lengths[call.pending[0]]) for call in calls
        ]
        pending = [
            PendingWork(call.weight, time_left(call.key, now), seconds(work))
            for call, work in zip(calls, works, strict=True)
        ]
        value_of = {id(call): value for call, value in zip(calls, call_values(pending), strict=True)}
        return inputs_to_compute(
            [value_of[id(item.call)] * item.tokens / item.call.tokens for item in items],
            took,
            cost,
            Duration(0) if self._in_flight else between(self._last_end, now),
        )

    def _mark_sent(self, sent: _InFlight) -> tuple[int, list[Ids]]:
        self._rate.pass_started(sent.at)
        number = next(self._numbers)
        self._in_flight[number] = sent
        return number, [item.call.payload.inputs[item.position] for item in sent.batch.items]

    def pass_finished(self, number: int, result: PassResult, now: Instant) -> EmbeddingPass | None:
        """Writes the rows and updates the models; None if the batch is not in flight any more."""
        if (sent := self._in_flight.pop(number, None)) is None:
            return None
        assert self.budget is not None
        batch, budget = sent.batch, self.budget
        inputs, longest = len(batch.items), batch.items[0].tokens
        point = TimePoint(inputs, longest, result.elapsed_ns / 1e9)
        if not sent.is_ahead:
            budget.time.observe_wait(point, to_seconds(between(sent.at, now)))
        budget.time.observe(point)
        budget.memory = budget.memory.raised_to_cover(MemoryPoint(inputs, longest, result.peak_bytes))
        budget.record_success(batch.padded_tokens)
        for item, row in zip(batch.items, result.rows, strict=True):
            pending = item.call.payload
            pending.rows[item.position] = row
            pending.rows_missing -= 1
            pending.tokens -= item.tokens
            if pending.rows_missing == 0:
                self._finish(item.call, None)
        # Lanes share the device, so each concurrent pass accounts for its part of the elapsed time.
        concurrent = min(budget.lanes, len(self._in_flight) + 1)
        tokens = sum(item.tokens for item in batch.items)
        self._rate.pass_finished(now, tokens)
        self._last_end = now
        if not self._in_flight:
            self._rate.idle()
        handover = Duration(0 if sent.is_ahead else max(0, between(sent.at, now) - result.elapsed_ns))
        elapsed = seconds(result.elapsed_ns / 1e9 / concurrent)
        requests = {item.call.payload.request_id for item in batch.items}
        return EmbeddingPass(inputs, tokens, batch.padded_tokens, elapsed, handover, requests, sent.priced)

    def pass_failed(self, number: int, message: str, *, is_out_of_memory: bool) -> None:
        """Retries a failed batch in halves, or fails the call of its single input."""
        if (sent := self._in_flight.pop(number, None)) is None:
            return
        assert self.budget is not None
        batch = sent.batch
        if not self._in_flight:
            self._rate.idle()
        if is_out_of_memory:
            self._record_out_of_memory(batch.padded_tokens)
        if halves := batch.halves():
            _log.warning("a batch of %d inputs failed; retrying it in halves: %s", len(batch.items), message)
            self._queue.requeue(halves)
        elif is_out_of_memory and not sent.is_solo_retry:
            self._solo_retries.append(batch)
        else:
            item = batch.items[0]
            failure = NoMemory if is_out_of_memory else BackendFailed
            self._finish(item.call, failure(f"input {item.position}: {message}", position=item.position))

    def worker_died(self, reason: str, *, was_killed: bool = False, failure_reported: bool = False) -> None:
        """Requeues the batches in flight, each call alone, so that only one that ends workers fails.

        Args:
            reason: message for calls that fail.
            was_killed: the worker was killed by SIGKILL, possibly by the OOM killer.
            failure_reported: the worker reported the batch that broke it, so its other calls keep their
                retry.
        """
        batches = [sent.batch for sent in self._in_flight.values()]
        self._in_flight.clear()
        self._rate.idle()
        calls = _calls_of([] if failure_reported else batches)
        for call in calls:
            if call.payload.was_retried:
                self._finish(call, WorkerDied(reason, retry_after=self.restart_seconds))
            call.payload.was_retried = True
        if was_killed and batches:
            self._record_out_of_memory(max(batch.padded_tokens for batch in batches))
            batches = [part for batch in batches for part in batch.halves() or (batch,)]
        if len(calls) > 1:
            self._solo_retries.extend(part for batch in batches for part in batch.by_call())
        else:
            self._queue.requeue(batches)

    def fail_all(self, reason: str, *, retry_after: float | None = None) -> None:
        """Fails all calls with BackendDown."""
        batches = [*self._solo_retries, *(sent.batch for sent in self._in_flight.values())]
        self._solo_retries.clear()
        self._in_flight.clear()
        self._rate.idle()
        for call in (*self._queue.drain(), *_calls_of(batches)):
            self._finish(call, BackendDown(reason, retry_after=retry_after))

    def _record_out_of_memory(self, padded_tokens: int) -> None:
        assert self.budget is not None
        self.out_of_memory += 1
        self.budget.record_out_of_memory(padded_tokens)

    def _finish(self, call: QueuedCall[PendingCall], error: Exception | None) -> None:
        self._queue.discard(call)
        if not call.payload.is_done:
            call.payload.is_done = True
            call.payload.on_done(error)


def _latest_starts(calls: Sequence[QueuedCall[PendingCall]], work: float, now: Instant) -> list[Instant]:
    """Latest starts of calls that can still meet their deadline with `work` seconds before it."""
    deadlines = {call.key.deadline for call in calls if not call.key.has_no_deadline}
    return [Instant(due - seconds(2 * work)) for due in deadlines if due - now >= seconds(work)]


def _calls_of(batches: Sequence[Batch[PendingCall]]) -> list[QueuedCall[PendingCall]]:
    return list({id(item.call): item.call for batch in batches for item in batch.items}.values())
