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

    def enqueue(self, state: RequestState, now: Instant) -> None:
        index = bisect_left(self._keys, _key(state))
        self._keys.insert(index, _key(state))
        self._waiting.insert(index, state)
        self._columns.put(index, (_since(state), state.tokens, _lost_after(state)))

    def dequeue(self, state: RequestState) -> None:
        index = bisect_left(self._keys, _key(state))
        del self._keys[index], self._waiting[index]
        self._columns.drop(index)

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
            index = int(values.argmax())
            need = int(needs[index])
            if need > free or values[index] == -inf:
                break
            plan.offer.append(self._waiting[index])
            values[index] = -inf
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
        for state, blocks in zip(running.at(places), full[places].tolist(), strict=True):
            value = self._value(state, view) if blocks < 0 else _LEAST_SECONDS / (blocks + 1)
            if value <= most:
                found.append((-value, _key(state), state))
        return [state for *_, state in sorted(found)]

    def _value(self, state: RequestState, view: EngineView) -> float:
        """Seconds per block, as far as they count."""
        weight = self._decay if state.cannot_meet_slo(view.now, _NO_WORK) else 1.0
        return ((view.now - _since(state)) / 1e9 * weight + _LEAST_SECONDS) / view.need(state)


def _key(state: RequestState) -> tuple[Instant, str]:
    return (state.request.arrival, state.request.id)


def _since(state: RequestState) -> Instant:
    return state.request.arrival if state.last_token is None else state.last_token


def _lost_after(state: RequestState) -> Instant:
    """The instant after which its promise is broken, while it waits."""
    if state.cannot_meet_slo(_EARLIEST, _NO_WORK):
        return _EARLIEST
    deadline = state.deadline()
    return deadline if deadline is not None and state.cannot_meet_slo(_LATEST, _NO_WORK) else _LATEST
