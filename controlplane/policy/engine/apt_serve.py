"""Apt-Serve's order of engine steps without its hidden cache: pending time per block of memory.

The value of a request is its pending time, since arrival or since its last token, times the weight of its
class; for a request that missed its SLO only the share `decay` of the time counts. Waiting requests start by
value per block, as in the paper's greedy; the running request of least value per block is preempted first
(Apt-Serve, sections 4 and 5).

Keys of the order: value per block, arrival, request id.

While a request waits, only the time changes. Waiting requests are kept in columns sorted by arrival and id,
so that one vector operation values them all.
"""

from bisect import bisect_left
from math import inf

import numpy as np

from controlplane.core.clock import NO_TIME, Instant
from controlplane.policy.engine.column_store import ColumnStore
from controlplane.policy.engine.interface import RANKED, EngineView, StepPlan
from controlplane.policy.engine.request_state import RequestState

# With decay 0, requests that missed their SLO still differ by size.
_LEAST_SECONDS = 1e-9
_EARLIEST, _LATEST = Instant(-(1 << 62)), Instant(1 << 62)
_SINCE, _TOKENS, _LOST_AFTER = range(3)


class AptServe:
    """Orders by pending time per block (Apt-Serve); `decay` weighs requests that missed their SLO."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._keys: list[tuple[Instant, str]] = []
        self._waiting: list[RequestState] = []
        self._columns = ColumnStore(3, np.int64)
        self._weights = ColumnStore(1, np.float64)

    def enqueue(self, state: RequestState) -> None:
        """Inserts the request by arrival and id."""
        index = bisect_left(self._keys, _key(state))
        self._keys.insert(index, _key(state))
        self._waiting.insert(index, state)
        self._columns.put(index, (state.pending_since, state.tokens, _lost_after(state)))
        self._weights.put(index, (state.weight,))

    def dequeue(self, state: RequestState) -> None:
        """Removes the request."""
        index = bisect_left(self._keys, _key(state))
        del self._keys[index], self._waiting[index]
        self._columns.drop(index)
        self._weights.drop(index)

    def waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._keys)

    def plan(self, view: EngineView) -> StepPlan:
        """Preempts the least value per block while memory is short, then offers the greatest."""
        free, slots = view.free, view.free_slots
        # Every victim frees at least one block.
        plan = StepPlan(ranked=self._last(view, RANKED - free) if free < 0 else [])
        while free < 0 and plan.ranked:
            victim = plan.ranked.pop()
            plan.preempt.append(victim)
            free += victim.held
        if slots <= 0 or free <= 0 or not self._keys:
            return plan
        columns = self._columns.filled
        is_plain = not view.has_packed and not view.has_shared
        if is_plain and columns[_TOKENS].min() >= free * view.block_tokens:
            # Not even the smallest request fits.
            return plan
        needs = view.needs(columns[_TOKENS], self._waiting)
        counted = np.where(columns[_LOST_AFTER] < view.now, self._decay, 1.0)
        pending = (view.now - columns[_SINCE]) / 1e9 * counted + _LEAST_SECONDS
        values = pending * self._weights.column(0) / needs
        values[needs > view.quota] = -inf
        # Few requests start in one step, so no sort; among equals argmax finds the oldest.
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
        """The `count` running requests of least value per block, the least last; more if values tie."""
        running = view.running
        # Right after a token the pending time is 0: the largest holders have the least value.
        needs = view.needs(running.tokens, running)
        values = np.where(running.has_token_of(view.now), _LEAST_SECONDS * running.weight / needs, inf)
        most = float(np.sort(values)[count - 1]) if count <= len(values) else inf
        found: list[tuple[float, tuple[Instant, str], RequestState]] = []
        places = np.flatnonzero((values == inf) | (values <= most)).tolist()
        for state, known in zip(running.at(places), values[places].tolist(), strict=True):
            value = self._value(state, view) if known == inf else known
            if value <= most:
                found.append((-value, _key(state), state))
        return [state for *_, state in sorted(found)]

    def _value(self, state: RequestState, view: EngineView) -> float:
        """Weighted pending seconds per block; the time counts by `decay` if the SLO is missed."""
        counted = self._decay if state.cannot_meet_slo(view.now, NO_TIME, view.pace.step) else 1.0
        pending = (view.now - state.pending_since) / 1e9 * counted + _LEAST_SECONDS
        return pending * state.weight / view.need(state)


def _key(state: RequestState) -> tuple[Instant, str]:
    return (state.request.arrival, state.request.id)


def _lost_after(state: RequestState) -> Instant:
    """The instant after which a waiting request misses its SLO."""
    if state.is_missed:
        return _EARLIEST
    return _LATEST if (chance := state.last_chance()) is None else chance
