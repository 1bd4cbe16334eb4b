"""MC-SF and the other published schedulers of the round model: an order plus a memory rule.

`LookaheadPolicy` (mc-sf, mc-benchmark, edf, least-slack) starts the longest prefix of its order that fits at
every predicted completion. `SkippingLookaheadPolicy` (mc-sf-skip) continues after a request that does not
fit. `CurrentUsePolicy` (alpha-protection, alpha-beta, fcfs) tests only the use after this batch, and
`PeakReservationPolicy` (fcfs-reserve) the sum of the final sizes. A request that exceeds the budget runs
exclusively.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

import numpy as np

from benchmark_control_plane.round_model.policies.clearing_policy import ClearingPolicy, HorizonPolicy
from benchmark_control_plane.round_model.policies.overflow import OverflowClearing
from benchmark_control_plane.round_model.policies.step_policy import Candidate, StepOptions
from controlplane.policy.engine.column_store import ColumnStore, Ints

Key = tuple[float, ...]
SortKey = Callable[[Candidate, StepOptions], Key]


def by_length(candidate: Candidate, options: StepOptions) -> Key:
    """Keys: predicted length, arrival, id."""
    return (candidate.predicted, candidate.arrival, candidate.id)


def by_arrival(candidate: Candidate, options: StepOptions) -> Key:
    """Keys: arrival, id."""
    return (candidate.arrival, candidate.id)


def by_deadline(candidate: Candidate, options: StepOptions) -> Key:
    """Keys: deadline (the arrival if there is none), arrival, id."""
    return (_due(candidate), candidate.arrival, candidate.id)


def by_slack(candidate: Candidate, options: StepOptions) -> Key:
    """Keys: latest start that still meets the deadline, arrival, id."""
    latest = _due(candidate) - candidate.predicted * options.step_time
    return (latest, candidate.arrival, candidate.id)


def _due(candidate: Candidate) -> float:
    return candidate.arrival if candidate.due is None else candidate.due


class LookaheadPolicy(HorizonPolicy):
    """Starts the longest prefix of the order that fits at every predicted completion.

    A blocked head stores the earliest step at which it could fit, so most steps skip the check.
    """

    def __init__(self, options: StepOptions, order: SortKey, overflow: OverflowClearing) -> None:
        super().__init__(options, overflow)
        self._order = order
        self._waiting: list[tuple[Key, Candidate]] = []
        self._head: Candidate | None = None
        self._not_before = 0
        self._releases = 0

    def _wait(self, candidate: Candidate) -> None:
        heappush(self._waiting, (self._order(candidate, self._options), candidate))

    def start(self, step: int) -> Sequence[Candidate]:
        self._horizon.advance(step)
        started: list[Candidate] = []
        while self._waiting:
            head = self._waiting[0][1]
            is_known = head is self._head and self._releases == self._horizon.releases
            if is_known and step < self._not_before:
                break
            delay = self._horizon.delay(head, step)
            is_exclusive = delay > 0 and len(self._horizon) == 0
            if delay and not is_exclusive:
                self._head = head
                self._not_before = step + delay
                self._releases = self._horizon.releases
                break
            heappop(self._waiting)
            self._horizon.add(head, step, exclusive=is_exclusive)
            self._overflow.joined(head, step)
            started.append(head)
        return started


class _CandidateQueue:
    """Waiting candidates sorted by key, with prompts and stays in columns so that one operation tests all."""

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self._candidates: list[Candidate] = []
        self._columns = ColumnStore(2, np.int64)

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def prompts(self) -> Ints:
        return self._columns.column(0)

    @property
    def stays(self) -> Ints:
        return self._columns.column(1)

    def insert(self, key: Key, candidate: Candidate, stay: int) -> None:
        at = bisect_left(self._keys, key)
        self._keys.insert(at, key)
        self._candidates.insert(at, candidate)
        self._columns.put(at, (candidate.prompt, stay))

    def pop(self, at: int) -> Candidate:
        del self._keys[at]
        self._columns.drop(at)
        return self._candidates.pop(at)


class SkippingLookaheadPolicy(HorizonPolicy):
    """Starts every waiting request that fits, in order.

    All are tested at once: a request fits if its prompt is within the headroom for its steps in the batch.
    """

    def __init__(self, options: StepOptions, order: SortKey, overflow: OverflowClearing) -> None:
        super().__init__(options, overflow)
        self._order = order
        self._queue = _CandidateQueue()

    def _wait(self, candidate: Candidate) -> None:
        stay = self._horizon.stay_steps(candidate)
        self._queue.insert(self._order(candidate, self._options), candidate, stay)

    def start(self, step: int) -> Sequence[Candidate]:
        self._horizon.advance(step)
        started: list[Candidate] = []
        at = 0
        while at < len(self._queue):
            stays = self._queue.stays[at:]
            room = self._horizon.headroom(step, int(stays.max()))
            fits = room[stays - 1] >= self._queue.prompts[at:]
            first = int(fits.argmax())
            if not fits[first]:
                break
            at += first
            self._begin(at, step, started)
        if not started and len(self._horizon) == 0 and len(self._queue):
            self._begin(0, step, started, exclusive=True)
        return started

    def _begin(self, at: int, step: int, started: list[Candidate], *, exclusive: bool = False) -> None:
        candidate = self._queue.pop(at)
        self._horizon.add(candidate, step, exclusive=exclusive)
        self._overflow.joined(candidate, step)
        started.append(candidate)


class CurrentUsePolicy(ClearingPolicy):
    """First come, first served while the use after this batch stays within the budget.

    With `rests_after_clear` no request starts in a step that cleared one, as in vLLM: otherwise the request
    just preempted would start again at once.
    """

    def __init__(self, options: StepOptions, overflow: OverflowClearing, *, rests_after_clear: bool) -> None:
        super().__init__(options, overflow)
        self._rests_after_clear = rests_after_clear
        self._waiting: list[tuple[Key, Candidate]] = []
        self._cleared_in: int | None = None

    def _wait(self, candidate: Candidate) -> None:
        heappush(self._waiting, (by_arrival(candidate, self._options), candidate))

    def _release(self, candidate: Candidate, step: int) -> None:
        pass

    def evict(self, step: int, excess: int) -> Sequence[Candidate]:
        self._cleared_in = step
        return super().evict(step, excess)

    def start(self, step: int) -> Sequence[Candidate]:
        started: list[Candidate] = []
        if self._rests_after_clear and self._cleared_in == step:
            return started
        use = self._overflow.cells_after(step)
        while self._waiting:
            head = self._waiting[0][1]
            use += head.prompt + 1
            if use > self._options.budget and len(self._overflow):
                break
            heappop(self._waiting)
            self._overflow.joined(head, step)
            started.append(head)
        return started


class PeakReservationPolicy(ClearingPolicy):
    """First come, first served while the sum of the predicted final sizes stays within the budget."""

    def __init__(self, options: StepOptions, overflow: OverflowClearing) -> None:
        super().__init__(options, overflow)
        self._waiting: list[tuple[Key, Candidate]] = []
        self._sizes: dict[int, int] = {}
        self._reserved = 0
        self._predicted_end: dict[int, int] = {}

    def _wait(self, candidate: Candidate) -> None:
        heappush(self._waiting, (by_arrival(candidate, self._options), candidate))

    def _release(self, candidate: Candidate, step: int) -> None:
        self._reserved -= self._sizes.pop(candidate.id)
        self._predicted_end.pop(candidate.id, None)

    def _grow(self, step: int) -> None:
        """Adds one cell per step for each request that is longer than predicted."""
        for request_id, at in self._predicted_end.items():
            if step >= at:
                self._reserved += 1
                self._sizes[request_id] += 1

    def start(self, step: int) -> Sequence[Candidate]:
        self._grow(step)
        started: list[Candidate] = []
        while self._waiting:
            head = self._waiting[0][1]
            size = head.prompt + head.predicted
            if self._reserved + size > self._options.budget and len(self._overflow):
                break
            heappop(self._waiting)
            self._reserved += size
            self._sizes[head.id] = size
            self._predicted_end[head.id] = step + head.predicted
            self._overflow.joined(head, step)
            started.append(head)
        return started
