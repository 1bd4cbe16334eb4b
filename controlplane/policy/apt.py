"""Apt-Serve's order of an engine's steps, without its hidden cache: pending time per block of memory.

The value of a request is how long it has been pending, since arrival or since its last token; of one
that has missed its promise only `decay` of it counts. Who waits starts by value per block, the
greedy's order; who runs and is worth least per block gives way first (Apt-Serve, sections 4 and 5).
"""

from controlplane.core.clock import Duration, Instant, between, to_seconds
from controlplane.policy.engine_step import EngineView, StepPlan
from controlplane.policy.progress import Progress

_NO_WORK = Duration(0)
# Two that are both given up still differ by their size.
_LEAST_SECONDS = 1e-9


class AptKv:
    def __init__(self, decay: float) -> None:
        if not 0 <= decay <= 1:
            raise ValueError(f"decay={decay}: the part of a missed request's value that counts is 0 to 1")
        self._decay = decay
        self._waiting: dict[str, Progress] = {}

    def joined(self, progress: Progress, now: Instant) -> None:
        self._waiting[progress.request.id] = progress

    def left(self, progress: Progress) -> None:
        del self._waiting[progress.request.id]

    def waiting(self) -> int:
        return len(self._waiting)

    def plan(self, view: EngineView) -> StepPlan:
        free, slots = view.free, view.free_slots
        plan = StepPlan(ranked=sorted(view.running, key=lambda p: self._key(p, view)) if free < 0 else [])
        while free < 0 and plan.ranked:
            victim = plan.ranked.pop()
            plan.preempt.append(victim)
            free += view.held[victim.request.id]
        for progress in sorted(self._waiting.values(), key=lambda p: self._key(p, view)):
            need = view.blocks(progress.tokens + 1)
            if need > view.quota:
                continue
            if need > free or slots <= 0:
                break
            plan.offer.append(progress)
            free, slots = free - need, slots - 1
        return plan

    def _key(self, progress: Progress, view: EngineView) -> tuple[float, int, str]:
        """Smallest first: most value per block."""
        request = progress.request
        since = request.arrival if progress.last_token is None else progress.last_token
        pending = to_seconds(between(since, view.now))
        if progress.is_hopeless(view.now, _NO_WORK):
            pending *= self._decay
        value = (pending + _LEAST_SECONDS) / view.blocks(progress.tokens + 1)
        return (-value, request.arrival, request.id)
