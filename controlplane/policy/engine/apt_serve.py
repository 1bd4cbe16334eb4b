"""Apt-Serve's order of an engine's steps, without its hidden cache: pending time per block of memory.

The value of a request is how long it has been pending, since arrival or since its last token; of one
that has missed its promise only `decay` of it counts. Who waits starts by value per block, the
greedy's order; who runs and is worth least per block gives way first (Apt-Serve, sections 4 and 5).

Nothing about a waiting request changes but the time, so the waiting stand in columns, by arrival and id, and
one vector operation values them all.
"""

from bisect import bisect_left
from math import inf

import numpy as np

from controlplane.core.clock import Duration, Instant
from controlplane.policy.engine.column_store import ColumnStore
from controlplane.policy.engine.interface import RANKED, EngineView, StepPlan
from controlplane.policy.engine.request_state import RequestState

_NO_WORK = Duration(0)
# Two that are both given up still differ by their size.
_LEAST_SECONDS = 1e-9
_EARLIEST, _LATEST = Instant(-(1 << 62)), Instant(1 << 62)
_SINCE, _TOKENS, _LOST_AFTER = range(3)


class AptServe:
    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._keys: list[tuple[Instant, str]] = []
        self._waiting: list[RequestState] = []
        self._columns = ColumnStore(3, np.int64)

    def enqueue(self, progress: RequestState, now: Instant) -> None:
        at = bisect_left(self._keys, _key(progress))
        self._keys.insert(at, _key(progress))
        self._waiting.insert(at, progress)
        self._columns.put(at, (_since(progress), progress.tokens, _lost_after(progress)))

    def dequeue(self, progress: RequestState) -> None:
        at = bisect_left(self._keys, _key(progress))
        del self._keys[at], self._waiting[at]
        self._columns.drop(at)

    def waiting(self) -> int:
        return len(self._keys)

    def plan(self, view: EngineView) -> StepPlan:
        free, slots = view.free, view.free_slots
        # A victim gives back a block at least.
        plan = StepPlan(ranked=self._last(view, RANKED - free) if free < 0 else [])
        while free < 0 and plan.ranked:
            victim = plan.ranked.pop()
            plan.preempt.append(victim)
            free += victim.held
        if slots <= 0 or free <= 0 or not self._keys:
            return plan
        columns = self._columns.filled
        if not view.has_packed and columns[_TOKENS].min() >= free * view.block_tokens:
            # Not even the smallest: there is nothing to value.
            return plan
        needs = columns[_TOKENS] // view.per_block(self._waiting) + 1
        weight = np.where(columns[_LOST_AFTER] < view.now, self._decay, 1.0)
        values = ((view.now - columns[_SINCE]) / 1e9 * weight + _LEAST_SECONDS) / needs
        values[needs > view.quota] = -inf
        # Few start in a step, so nobody is sorted; of equals the oldest is found first.
        while slots > 0:
            at = int(values.argmax())
            need = int(needs[at])
            if need > free or values[at] == -inf:
                break
            plan.offer.append(self._waiting[at])
            values[at] = -inf
            free, slots = free - need, slots - 1
        return plan

    def _last(self, view: EngineView, count: int) -> list[RequestState]:
        """Those of the running ones that are worth least per block, the least last: `count`, and more where
        several are worth the same."""
        running = view.running
        # Who has just got a token is worth the less the more it holds: to find the last takes no values.
        full = np.where(running.has_token_of(view.now), running.tokens // view.per_block(running), -1)
        least = int(np.sort(full)[-count]) if count <= len(full) else -1
        most = _LEAST_SECONDS / (least + 1) if least >= 0 else inf
        found: list[tuple[float, tuple[Instant, str], RequestState]] = []
        places = np.flatnonzero((full < 0) | (full >= least)).tolist()
        for progress, blocks in zip(running.at(places), full[places].tolist(), strict=True):
            value = self._value(progress, view) if blocks < 0 else _LEAST_SECONDS / (blocks + 1)
            if value <= most:
                found.append((-value, _key(progress), progress))
        return [progress for *_, progress in sorted(found)]

    def _value(self, progress: RequestState, view: EngineView) -> float:
        """Seconds per block, as far as they count."""
        weight = self._decay if progress.cannot_meet_slo(view.now, _NO_WORK) else 1.0
        return ((view.now - _since(progress)) / 1e9 * weight + _LEAST_SECONDS) / view.need(progress)


def _key(progress: RequestState) -> tuple[Instant, str]:
    return (progress.request.arrival, progress.request.id)


def _since(progress: RequestState) -> Instant:
    return progress.request.arrival if progress.last_token is None else progress.last_token


def _lost_after(progress: RequestState) -> Instant:
    """The instant after which its promise is broken, while it waits."""
    if progress.cannot_meet_slo(_EARLIEST, _NO_WORK):
        return _EARLIEST
    deadline = progress.deadline()
    return deadline if deadline is not None and progress.cannot_meet_slo(_LATEST, _NO_WORK) else _LATEST
