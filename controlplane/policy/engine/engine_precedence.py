"""Estimates at the gate in which order an engine starts requests, and how long the largest wait (`srmt`).

The engine starts a request above its size cutoff only into free memory. Smaller requests that have not
arrived yet go before it, so the work that waits now says nothing about its wait. While the overload lasts,
the only bound is the engine's own: after its patience, the work of the requests of this kind before it, on
their share of the memory. As in the engine, a request whose predicted length is its limit is exempt.

The gate computes the cutoff from all arrivals, those that it rejects included: the engine's own follows the
requests that reach it, and would vanish as soon as the gate rejects the others.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from controlplane.core.clock import Duration, Instant
from controlplane.core.memory_ledger import LeaseTable
from controlplane.core.pool_view import Waiting
from controlplane.policy.engine.size_cutoff import SizeCutoff
from controlplane.policy.gate.ordering import Rank

# Stands for no share at all.
_LEAST_SHARE = 1e-6


class EngineCutoff:
    """The size cutoff of an engine over the requests that arrive at the gate; memory in bytes."""

    def __init__(self, *, window: int, share: float, patience: Duration, aged_share: float) -> None:
        self._cutoff = SizeCutoff(window=window, share=share)
        self._patience = patience
        self._aged_share = max(_LEAST_SHARE, aged_share)

    def arrived(self, waiting: Waiting) -> None:
        """Records a new request; call once for each."""
        request, peak = waiting.request, waiting.footprint.peak
        if not _is_guess(waiting):
            self._cutoff.arrived(request.arrival, waiting.work, peak, request.service_class.weight)

    def stepped(self, now: Instant, memory: int, held: int, step: Duration) -> None:
        """Updates the cutoff after an engine step; `held` of the `memory` is in use."""
        self._cutoff.update(now, memory, step, held / max(1, memory))

    def work_ahead(
        self, waiting: Waiting, others: Iterable[Waiting], memory: int, held: int, step: Duration
    ) -> float:
        """Byte-steps that precede a request above the cutoff; 0 below it. `others` wait in the engine."""
        free = memory - held - waiting.footprint.base
        largest = self._cutoff.largest(free / max(1, memory))
        if not held or step <= 0 or size_of(waiting) <= largest or _is_guess(waiting):
            return 0.0
        above = sum(other.work for other in others if size_of(other) > largest)
        return memory * self._patience / step + above / self._aged_share


def _is_guess(waiting: Waiting) -> bool:
    return waiting.footprint.steps >= waiting.request.max_output_tokens


@dataclass(frozen=True, slots=True)
class EnginePrecedence:
    """The order in which an engine starts waiting requests: the smaller `key` goes first.

    `cutoff` is None if the engine has no size cutoff. An engine preempts running requests of more than
    `preempt_ratio` times the size of an urgent one; None: those of a lower priority.
    """

    key: Callable[[Waiting], tuple[Any, ...]]
    cutoff: EngineCutoff | None = None
    preempt_ratio: float | None = None

    def kept(self, leases: LeaseTable, weights: Sequence[float], waiting: Waiting) -> LeaseTable:
        """The leases that the engine would not preempt for the request; `weights` of their classes."""
        if self.preempt_ratio is None:
            return leases.at_least(waiting.request.service_class.priority)
        sizes = (leases.base + leases.per_step * leases.steps / 2) * leases.steps / np.array(weights)
        return leases.only(np.flatnonzero(sizes <= self.preempt_ratio * size_of(waiting)).tolist())

    def before(self, waiting: Waiting, others: Iterable[Waiting]) -> list[Waiting]:
        """Those of `others` that the engine starts before the request."""
        key, own = self.key, self.key(waiting)
        return [other for other in others if key(other) < own]


def by_rank(waiting: Waiting) -> Rank:
    """The key of an engine that has the gate's order."""
    return waiting.rank


def by_size(waiting: Waiting) -> tuple[float, Rank]:
    """The key of an engine that starts the least memory-time over weight first."""
    return (size_of(waiting), waiting.rank)


def size_of(waiting: Waiting) -> float:
    """Memory-time over the weight of the class."""
    return waiting.work / waiting.request.service_class.weight
