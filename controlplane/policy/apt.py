"""Apt-Serve's order of an engine's steps, without its hidden cache: pending time per block of memory.

The value of a request is how long it has been pending, since arrival or since its last token; of one
that has missed its promise only `decay` of it counts. Who waits starts by value per block, the
greedy's order; who runs and is worth least per block gives way first (Apt-Serve, sections 4 and 5).

Nothing about a waiting request changes but the time, so the waiting stand in columns, by arrival and id, and
one vector operation values them all.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from controlplane.core.clock import Duration, Instant
from controlplane.policy.engine_step import EngineView, StepPlan
from controlplane.policy.progress import Progress

_NO_WORK = Duration(0)
# Two that are both given up still differ by their size.
_LEAST_SECONDS = 1e-9
_EARLIEST, _LATEST = Instant(-(1 << 62)), Instant(1 << 62)
_SINCE, _TOKENS, _LOST_AFTER = range(3)


class AptKv:
    def __init__(self, decay: float) -> None:
        if not 0 <= decay <= 1:
            raise ValueError(f"decay={decay}: the part of a missed request's value that counts is 0 to 1")
        self._decay = decay
        self._keys: list[tuple[Instant, str]] = []
        self._waiting: list[Progress] = []
        self._columns = np.zeros((3, 64), np.int64)
        self._running: list[Progress] = []

    def joined(self, progress: Progress, now: Instant) -> None:
        count = len(self._keys)
        if count == self._columns.shape[1]:
            self._columns = np.concatenate((self._columns, np.zeros_like(self._columns)), axis=1)
        at = bisect_left(self._keys, _key(progress))
        self._keys.insert(at, _key(progress))
        self._waiting.insert(at, progress)
        self._columns[:, at + 1 : count + 1] = self._columns[:, at:count]
        self._columns[:, at] = (_since(progress), progress.tokens, _lost_after(progress))

    def left(self, progress: Progress) -> None:
        at, count = bisect_left(self._keys, _key(progress)), len(self._keys)
        del self._keys[at], self._waiting[at]
        self._columns[:, at : count - 1] = self._columns[:, at + 1 : count]

    def waiting(self) -> int:
        return len(self._keys)

    def plan(self, view: EngineView) -> StepPlan:
        free, slots = view.free, view.free_slots
        plan = StepPlan(ranked=self._ranked(view) if free < 0 else [])
        while free < 0 and plan.ranked:
            victim = plan.ranked.pop()
            plan.preempt.append(victim)
            free += view.held[victim.request.id]
        if slots <= 0 or free <= 0 or not self._keys:
            return plan
        columns = self._columns[:, : len(self._keys)]
        needs = _needs(columns[_TOKENS], self._waiting, view)
        if free < needs.min():
            return plan
        weight = np.where(columns[_LOST_AFTER] < view.now, self._decay, 1.0)
        values = ((view.now - columns[_SINCE]) / 1e9 * weight + _LEAST_SECONDS) / needs
        # Nobody starts after the first that does not fit, so only the better ones need sorting.
        blocking = values[(needs > free) & (needs <= view.quota)]
        better = np.flatnonzero(values >= blocking.max(initial=-np.inf))
        for at in better[np.argsort(-values[better], kind="stable")].tolist():
            need = int(needs[at])
            if need > view.quota:
                continue
            if need > free or slots <= 0:
                break
            plan.offer.append(self._waiting[at])
            free, slots = free - need, slots - 1
        return plan

    def _ranked(self, view: EngineView) -> list[Progress]:
        """The running ones, most value per block first."""
        running = self._by_age(view.running)
        # Written out: with the memory full it is asked in every step, of everybody.
        tokens = np.array([p.request.prompt_tokens + p.done for p in running], np.int64)
        pending = np.zeros(len(running))
        for at, progress in enumerate(running):
            # Nearly all got a token just now.
            if progress.last_token != view.now:
                weight = self._decay if progress.is_hopeless(view.now, _NO_WORK) else 1.0
                pending[at] = (view.now - _since(progress)) / 1e9 * weight
        values = (pending + _LEAST_SECONDS) / _needs(tokens, running, view)
        return [running[at] for at in np.argsort(-values, kind="stable").tolist()]

    def _by_age(self, running: Sequence[Progress]) -> list[Progress]:
        """Sorted by key. Nearly all ran before the last step too, and stand in order already."""
        new = set(running)
        kept = [p for p in self._running if p in new]
        new.difference_update(kept)
        for progress in new:
            insort(kept, progress, key=_key)
        self._running = kept
        return kept


def _needs(tokens: npt.NDArray[np.int64], of: Sequence[Progress], view: EngineView) -> npt.NDArray[np.int64]:
    """`view.need` of each."""
    if not view.has_packed:
        return (tokens + view.block_tokens) // view.block_tokens
    per_block = np.array([p.per_block or view.block_tokens for p in of], np.int64)
    return (tokens + per_block) // per_block


def _key(progress: Progress) -> tuple[Instant, str]:
    return (progress.request.arrival, progress.request.id)


def _since(progress: Progress) -> Instant:
    return progress.request.arrival if progress.last_token is None else progress.last_token


def _lost_after(progress: Progress) -> Instant:
    """The instant after which its promise is broken, while it waits."""
    if progress.is_hopeless(_EARLIEST, _NO_WORK):
        return _EARLIEST
    deadline = progress.deadline()
    return deadline if deadline is not None and progress.is_hopeless(_LATEST, _NO_WORK) else _LATEST
