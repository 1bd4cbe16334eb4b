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
_RETRY_STEPS = 4


@dataclass(slots=True)
class _Queued:
    rank: Rank
    state: RequestState
    waiting: Waiting


@dataclass(frozen=True, slots=True)
class _Blocked:
    head: str
    leases: int
    quota: int
    retry_at: int


class StaticPriorityPolicy:
    """`ahead` decides by predicted completions, `at_once` by the present use; both look ahead alike."""

    def __init__(
        self, ordering: Ordering, ahead: Admission, at_once: Admission, *, look_ahead: LookAheadFor
    ) -> None:
        self._ordering = ordering
        self.ahead = ahead
        self._at_once = at_once
        self._look_ahead = look_ahead
        self._waiting: list[_Queued] = []
        self._ranks: dict[str, Rank] = {}
        self._new: list[RequestState] = []
        self._blocked: _Blocked | None = None
        self._steps = 0

    def enqueue(self, state: RequestState, now: Instant) -> None:
        self._new.append(state)

    def dequeue(self, state: RequestState) -> None:
        rank = self._ranks.pop(state.request.id, None)
        if rank is None:
            self._new.remove(state)
        else:
            del self._waiting[bisect_left(self._waiting, rank, key=_rank)]

    def waiting(self) -> int:
        return len(self._waiting) + len(self._new)

    def order(self) -> list[RequestState]:
        """All that were seated by the last plan, first to start first."""
        return [queued.state for queued in self._waiting]

    def rank_of(self, state: RequestState) -> Rank:
        """Of one that was seated."""
        return self._ranks[state.request.id]

    def plan(self, view: EngineView) -> StepPlan:
        self._steps += 1
        self._rank_new(view)
        plan = StepPlan()
        short = -view.free
        if short > 0:
            self._preempt_for_shortage(view, short, plan)
        if self._waiting and (plan.preempt or not self._is_known_blocked(view)):
            self._start(view, plan)
        return plan

    def _rank_new(self, view: EngineView) -> None:
        for state in self._new:
            footprint = footprint_of(state, view.block_tokens)
            rank = self._ordering.rank(state.request, footprint, view.pace)
            self._ranks[state.request.id] = rank
            insort(self._waiting, _Queued(rank, state, waiting_of(state, footprint, rank)), key=_rank)
        self._new.clear()

    def _preempt_for_shortage(self, view: EngineView, short: int, plan: StepPlan) -> None:
        plan.ranked = eviction_order(view, self.ahead.eviction)
        while short > 0 and plan.ranked:
            victim = plan.ranked.pop()
            plan.preempt.append(victim)
            short -= victim.held

    def _is_known_blocked(self, view: EngineView) -> bool:
        blocked, head = self._blocked, self._waiting[0].state.request.id
        return (
            blocked is not None
            and (blocked.head, blocked.leases, blocked.quota) == (head, len(view.running), view.quota)
            and self._steps < blocked.retry_at
        )

    def _start(self, view: EngineView, plan: StepPlan) -> None:
        """Steps 1 to 3 of the module's rule."""
        share: Share | None = None
        look: LookAhead | None = None
        self._blocked = None
        left = view.without(plan.preempt)
        for queued in self._waiting:
            state, waiting = queued.state, queued.waiting
            if view.need(state) > view.quota:
                continue
            has_slot = view.free_slots + len(plan.preempt) > len(plan.offer)
            # Else there is nothing to weigh, and the shares of memory take time to draw up.
            may_start = has_slot and (share is not None or _has_room(waiting, left))
            if not may_start and not _may_preempt(state, view):
                self._remember_blocked(queued, view)
                return
            share = share or share_of(left)
            look = look or self.ahead.lookahead(share)
            verdict = self._admission(state, view).try_in_time(share, look, waiting, view.now)
            if not isinstance(verdict, Admit) and not share.leases.ids and not plan.offer:
                # The line bounds its blocks from above; alone it starts if the blocks are there.
                verdict = Admit(waiting.footprint)
            if not isinstance(verdict, Admit):
                forced = self.ahead.try_preempt(share, look, waiting, view.now)
                if forced is None:
                    self._remember_blocked(queued, view)
                    return
                by_id = {other.request.id: other for other in view.running}
                victims = [
                    by_id[victim.request_id] for victim in forced.victims if victim.request_id in by_id
                ]
                plan.preempt += victims
                plan.ranked = [other for other in plan.ranked if other not in victims]
                share = share.without([victim.request_id for victim in forced.victims])
            plan.offer.append(state)
            share, look = share.with_lease(waiting), None

    def _admission(self, state: RequestState, view: EngineView) -> Admission:
        if self._look_ahead == "all":
            return self.ahead
        if self._look_ahead == "nobody" or not _is_background(state, view.now):
            return self._at_once
        return self.ahead

    def _remember_blocked(self, queued: _Queued, view: EngineView) -> None:
        if self._waiting[0] is queued and not _may_preempt(queued.state, view):
            self._blocked = _Blocked(
                queued.state.request.id, len(view.running), view.quota, self._steps + _RETRY_STEPS
            )


def eviction_order(view: EngineView, options: PreemptionOptions) -> list[RequestState]:
    """The running, the first to give way last. Those about to finish stay longest."""

    def keep(state: RequestState) -> tuple[bool, int, float, str]:
        held = max(1, state.held)
        running = state.as_running(view.now, held * view.block_tokens, view.pace)
        cost = victim_cost(running, options) / running.freed_bytes
        is_ending = running.remaining_steps <= options.almost_done_steps
        return (is_ending, running.priority, cost, running.request_id)

    return sorted(view.running, key=keep, reverse=True)


def _has_room(waiting: Waiting, view: EngineView) -> bool:
    """Whether what is held now would let it start; alone it may whatever it needs."""
    free = view.quota - min(view.used + view.growth, view.quota)
    return not view.running or waiting.footprint.base <= free * view.block_tokens


def _is_background(state: RequestState, now: Instant) -> bool:
    return state.deadline() is None or state.cannot_meet_slo(now, Duration(0))


def _may_preempt(state: RequestState, view: EngineView) -> bool:
    if state.first_due is None or state.first_due < view.now:
        return False
    return bool((view.running.priority < state.priority).any())


def _rank(queued: _Queued) -> Rank:
    return queued.rank
