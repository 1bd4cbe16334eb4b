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
from backends.embedding.deadline_order import Drain
from backends.embedding.ipc import Computed, Ids, Rows
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
    """Who waits for `rows`. `missing` counts those not yet there, `tokens` their tokens; `settle` is called
    once."""

    inputs: list[Ids]
    rows: Rows
    settle: Callable[[Exception | None], None]
    missing: int = field(init=False)
    tokens: int = field(init=False)
    was_retried: bool = False
    is_settled: bool = False

    def __post_init__(self) -> None:
        self.missing, self.tokens = len(self.inputs), sum(map(len, self.inputs))


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """`is_last_try` of an input that found no memory before: nothing is sent beside it."""

    batch: Batch[PendingCall]
    bytes: int
    is_last_try: bool = False


@dataclass(slots=True)
class BatchDispatcher:
    budget: PassBudget | None = None
    out_of_memory: int = 0
    """How often a pass found none."""
    back_in: float | None = None
    """Seconds that replacing a worker takes, where that is known."""
    _queue: BatchQueue[PendingCall] = field(default_factory=lambda: BatchQueue(1))
    _under_way: dict[int, _UnderWay] = field(default_factory=dict)
    _last_tries: deque[Batch[PendingCall]] = field(default_factory=deque)
    _drain: Drain = field(default_factory=Drain)
    _numbers: "count[int]" = field(default_factory=lambda: count(1))

    @property
    def are_under_way(self) -> bool:
        return bool(self._under_way)

    @property
    def seconds_under_way(self) -> float:
        """What the batches that were sent should take, one after the other."""
        budget = self.budget
        if budget is None:
            return 0.0
        batches = [sent.batch.items for sent in self._under_way.values()]
        return sum(budget.time.seconds(len(items), items[0].tokens) for items in batches)

    def begin(self, budget: PassBudget) -> None:
        """A worker is there. What it was measured to be holds from now on."""
        if self.budget is not None:
            budget.keep(self.budget)
        self.budget = budget
        self._queue.budget_tokens = _WINDOW_PASSES * budget.full_tokens
        self._queue.pass_tokens = budget.time.model.start_tokens
        self._queue.lanes = budget.lanes

    def put(self, caller: PendingCall, *, deadline: Instant | None) -> QueuedCall[PendingCall]:
        return self._queue.put(caller, [len(ids) for ids in caller.inputs], deadline=deadline)

    def leave(self, call: QueuedCall[PendingCall]) -> None:
        """What has not gone out never will. Twice is as good as once."""
        self._queue.discard(call)

    def next(
        self, limit_seconds: float | None, now: Instant, *, starts_small: bool = True
    ) -> tuple[int, list[Ids]] | None:
        """(number, inputs) of a batch to send `now`, which says who is late. `limit_seconds` bounds its time,
        one input at least. Without `starts_small` what is not worth a pass waits even if a lane is free."""
        budget = self.budget
        if budget is None or len(self._under_way) > budget.lanes:
            return None
        while self._last_tries and self._last_tries[0].items[0].call.is_gone:
            self._last_tries.popleft()
        if self._last_tries:
            if self._under_way:
                return None
            return self._sent(_UnderWay(self._last_tries.popleft(), 0, is_last_try=True), now)
        if any(sent.is_last_try for sent in self._under_way.values()):
            return None
        may_be_small = starts_small and len(self._under_way) < budget.lanes
        if not may_be_small and limit_seconds is None and not self._queue.has_a_pass(budget.tokens):
            return None
        batch = self._queue.next_batch(
            lambda longest: budget.most_inputs(longest, limit_seconds), now, self._drain.per_token
        )
        if batch is None:
            return None
        size = budget.memory.pass_bytes(len(batch.items), batch.items[0].tokens)
        if not budget.fits_beside([found.bytes for found in self._under_way.values()], size):
            self._queue.put_back([batch])
            return None
        return self._sent(_UnderWay(batch, size), now)

    def _sent(self, sent: _UnderWay, now: Instant) -> tuple[int, list[Ids]]:
        self._drain.begins(now)
        number = next(self._numbers)
        self._under_way[number] = sent
        return number, [item.call.caller.inputs[item.position] for item in sent.batch.items]

    def computed(self, number: int, found: Computed, now: Instant) -> EmbeddingPass | None:
        """None for a batch that nobody waits for any more."""
        if (sent := self._under_way.pop(number, None)) is None:
            return None
        assert self.budget is not None
        batch, budget = sent.batch, self.budget
        inputs, longest = len(batch.items), batch.items[0].tokens
        budget.time.observe(TimePoint(inputs, longest, found.elapsed_ns / 1e9))
        budget.memory = budget.memory.raised_to(MemoryPoint(inputs, longest, found.peak_bytes))
        budget.went_well(batch.padded_tokens)
        for item, row in zip(batch.items, found.rows, strict=True):
            caller = item.call.caller
            caller.rows[item.position] = row
            caller.missing -= 1
            caller.tokens -= item.tokens
            if caller.missing == 0:
                self._settle(item.call, None)
        # Lanes share the device: what ran beside this pass had its part of the time.
        beside = min(budget.lanes, len(self._under_way) + 1)
        tokens = sum(item.tokens for item in batch.items)
        self._drain.ends(now, tokens)
        if not self._under_way and not self._queue.has_calls:
            self._drain.rests()
        return EmbeddingPass(inputs, tokens, batch.padded_tokens, seconds(found.elapsed_ns / 1e9 / beside))

    def failed(self, number: int, told: str, *, is_out_of_memory: bool) -> None:
        if (sent := self._under_way.pop(number, None)) is None:
            return
        assert self.budget is not None
        batch = sent.batch
        if is_out_of_memory:
            self._ran_out(batch.padded_tokens)
        if halves := batch.halves():
            _log.warning("a batch of %d inputs failed, halving it: %s", len(batch.items), told)
            self._queue.put_back(halves)
        elif is_out_of_memory and not sent.is_last_try:
            self._last_tries.append(batch)
        else:
            item = batch.items[0]
            failure = NoMemory if is_out_of_memory else BackendFailed
            self._settle(item.call, failure(f"input {item.position}: {told}", position=item.position))

    def worker_died(self, why: str, *, was_killed: bool = False, has_told: bool = False) -> None:
        """`has_told`: which batch has broken it is known, and was told by `failed`."""
        batches = [sent.batch for sent in self._under_way.values()]
        self._under_way.clear()
        self._drain.rests()
        for call in _calls_of([] if has_told else batches):
            if call.caller.was_retried:
                self._settle(call, BackendDown(why, retry_after=self.back_in))
            call.caller.was_retried = True
        if was_killed and batches:
            self._ran_out(max(batch.padded_tokens for batch in batches))
            batches = [part for batch in batches for part in batch.halves() or (batch,)]
        self._queue.put_back(batches)

    def give_up(self, why: str, *, retry_after: float | None = None) -> None:
        """Nobody will compute what is here."""
        batches = [*self._last_tries, *(sent.batch for sent in self._under_way.values())]
        self._last_tries.clear()
        self._under_way.clear()
        for call in (*self._queue.drain(), *_calls_of(batches)):
            self._settle(call, BackendDown(why, retry_after=retry_after))

    def _ran_out(self, padded_tokens: int) -> None:
        assert self.budget is not None
        self.out_of_memory += 1
        self.budget.ran_out(padded_tokens)

    def _settle(self, call: QueuedCall[PendingCall], error: Exception | None) -> None:
        self._queue.discard(call)
        if not call.caller.is_settled:
            call.caller.is_settled = True
            call.caller.settle(error)


def _calls_of(batches: Sequence[Batch[PendingCall]]) -> list[QueuedCall[PendingCall]]:
    return list({id(item.call): item.call for batch in batches for item in batch.items}.values())
