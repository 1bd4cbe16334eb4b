"""The gate's rules inside the engine: order by a rank that never changes, admit by look-ahead, preempt late.

Before every step, from the head of the waiting in order of rank:

1. who fits by the admission's rule starts; the look-ahead asks all, only the *background* (who has no
   deadline left to keep), or nobody;
2. the first that does not fit may preempt strictly lower priority if waiting would make it late, and it is
   not yet;
3. then nobody else starts: a large request is not starved by small ones.

A request that the quota cannot hold stands aside and holds nobody up. Who gives way when blocks run
short: lower priority first, then the least cost per token freed (`eviction.victim_cost`).
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Literal

from controlplane.core.clock import Duration, Instant
from controlplane.core.decision import Admit
from controlplane.core.view import Share, Waiting
from controlplane.policy.engine.gate_adapter import footprint_of, share_of, waiting_of
from controlplane.policy.engine.interface import EngineView, StepPlan
from controlplane.policy.engine.request_state import RequestState
from controlplane.policy.gate.admission import Admission
from controlplane.policy.gate.memory_lookahead import LookAhead
from controlplane.policy.gate.ordering import Ordering, Rank
from controlplane.policy.gate.preemption import PreemptionOptions, victim_cost

LookAheadFor = Literal["all", "background", "nobody"]

# Without a release a blocked head fits at most a little sooner than the last look said.
_ASK_AGAIN_STEPS = 4


@dataclass(slots=True)
class _Place:
    rank: Rank
    progress: RequestState
    waiting: Waiting


@dataclass(frozen=True, slots=True)
class _Blocked:
    head: str
    leases: int
    quota: int
    again: int


class StaticPriorityPolicy:
    """`ahead` decides by predicted completions, `at_once` by the present use; both look ahead alike."""

    def __init__(
        self, ordering: Ordering, ahead: Admission, at_once: Admission, *, look_ahead: LookAheadFor
    ) -> None:
        self._ordering = ordering
        self.ahead = ahead
        self._at_once = at_once
        self._look_ahead = look_ahead
        self._line: list[_Place] = []
        self._ranks: dict[str, Rank] = {}
        self._new: list[RequestState] = []
        self._blocked: _Blocked | None = None
        self._steps = 0

    def enqueue(self, progress: RequestState, now: Instant) -> None:
        self._new.append(progress)

    def dequeue(self, progress: RequestState) -> None:
        rank = self._ranks.pop(progress.request.id, None)
        if rank is None:
            self._new.remove(progress)
        else:
            del self._line[bisect_left(self._line, rank, key=_rank)]

    def waiting(self) -> int:
        return len(self._line) + len(self._new)

    def order(self) -> list[RequestState]:
        """All that were seated by the last plan, first to start first."""
        return [place.progress for place in self._line]

    def rank_of(self, progress: RequestState) -> Rank:
        """Of one that was seated."""
        return self._ranks[progress.request.id]

    def plan(self, view: EngineView) -> StepPlan:
        self._steps += 1
        self._seat(view)
        plan = StepPlan()
        short = -view.free
        if short > 0:
            self._relieve(view, short, plan)
        if self._line and (plan.preempt or not self._is_known_blocked(view)):
            self._start(view, plan)
        return plan

    def _seat(self, view: EngineView) -> None:
        for progress in self._new:
            footprint = footprint_of(progress, view.block_tokens)
            rank = self._ordering.rank(progress.request, footprint, view.pace)
            self._ranks[progress.request.id] = rank
            insort(self._line, _Place(rank, progress, waiting_of(progress, footprint, rank)), key=_rank)
        self._new.clear()

    def _relieve(self, view: EngineView, short: int, plan: StepPlan) -> None:
        plan.ranked = eviction_order(view, self.ahead.eviction)
        while short > 0 and plan.ranked:
            victim = plan.ranked.pop()
            plan.preempt.append(victim)
            short -= victim.held

    def _is_known_blocked(self, view: EngineView) -> bool:
        blocked, head = self._blocked, self._line[0].progress.request.id
        return (
            blocked is not None
            and (blocked.head, blocked.leases, blocked.quota) == (head, len(view.running), view.quota)
            and self._steps < blocked.again
        )

    def _start(self, view: EngineView, plan: StepPlan) -> None:
        """Steps 1 to 3 of the module's rule."""
        share: Share | None = None
        look: LookAhead | None = None
        self._blocked = None
        left = view.without(plan.preempt)
        for place in self._line:
            progress, waiting = place.progress, place.waiting
            if view.need(progress) > view.quota:
                continue
            has_slot = view.free_slots + len(plan.preempt) > len(plan.offer)
            # Else there is nothing to weigh, and the shares of memory take time to draw up.
            may_start = has_slot and (share is not None or _has_room(waiting, left))
            if not may_start and not _may_preempt(progress, view):
                self._note_blocked(place, view)
                return
            share = share or share_of(left)
            look = look or self.ahead.lookahead(share)
            verdict = self._admission(progress, view).try_in_time(share, look, waiting, view.now)
            if not isinstance(verdict, Admit) and not share.leases.ids and not plan.offer:
                # The line bounds its blocks from above; alone it starts if the blocks are there.
                verdict = Admit(waiting.footprint)
            if not isinstance(verdict, Admit):
                forced = self.ahead.try_preempt(share, look, waiting, view.now)
                if forced is None:
                    self._note_blocked(place, view)
                    return
                by_id = {p.request.id: p for p in view.running}
                victims = [by_id[v.request_id] for v in forced.victims if v.request_id in by_id]
                plan.preempt += victims
                plan.ranked = [p for p in plan.ranked if p not in victims]
                share = share.without([v.request_id for v in forced.victims])
            plan.offer.append(progress)
            share, look = share.with_lease(waiting), None

    def _admission(self, progress: RequestState, view: EngineView) -> Admission:
        if self._look_ahead == "all":
            return self.ahead
        if self._look_ahead == "nobody" or not _is_background(progress, view.now):
            return self._at_once
        return self.ahead

    def _note_blocked(self, place: _Place, view: EngineView) -> None:
        if self._line[0] is place and not _may_preempt(place.progress, view):
            self._blocked = _Blocked(
                place.progress.request.id, len(view.running), view.quota, self._steps + _ASK_AGAIN_STEPS
            )


def eviction_order(view: EngineView, options: PreemptionOptions) -> list[RequestState]:
    """The running, the first to give way last. Those about to finish stay longest."""

    def keep(progress: RequestState) -> tuple[bool, int, float, str]:
        held = max(1, progress.held)
        running = progress.as_running(view.now, held * view.block_tokens, view.pace)
        cost = victim_cost(running, options) / running.freed_bytes
        is_ending = running.remaining_steps <= options.almost_done_steps
        return (is_ending, running.priority, cost, running.request_id)

    return sorted(view.running, key=keep, reverse=True)


def _has_room(waiting: Waiting, view: EngineView) -> bool:
    """Whether what is held now would let it start; alone it may whatever it needs."""
    free = view.quota - min(view.used + view.growth, view.quota)
    return not view.running or waiting.footprint.base <= free * view.block_tokens


def _is_background(progress: RequestState, now: Instant) -> bool:
    return progress.deadline() is None or progress.cannot_meet_slo(now, Duration(0))


def _may_preempt(progress: RequestState, view: EngineView) -> bool:
    if progress.first_due is None or progress.first_due < view.now:
        return False
    return bool((view.running.priority < progress.priority).any())


def _rank(place: _Place) -> Rank:
    return place.rank
