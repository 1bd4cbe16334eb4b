"""Applies the gate's rules inside the engine: static rank, look-ahead admission, preemption before lateness.

Before every step, in order of rank:

1. A request that fits by the admission's rule starts. The look-ahead applies to all requests, only to
   *background* requests (those with no deadline left to meet), or to none.
2. The first request that does not fit may preempt strictly lower priority, if waiting would make it late and
   it is not late yet.
3. Then no further request starts, so that small requests do not starve a large one.

A request larger than the quota is skipped and blocks no other. If blocks run short, requests are preempted in
the same order as for an urgent request (`gate.preemption`), but of any priority.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Literal

from controlplane.core.clock import NO_TIME
from controlplane.core.decision import Admit
from controlplane.core.pool_view import Share, Waiting
from controlplane.policy.engine.gate_view_adapter import footprint_of, preemptible_of, share_of
from controlplane.policy.engine.interface import EngineView, StepPlan
from controlplane.policy.engine.request_state import RequestState
from controlplane.policy.gate.admission import Admission
from controlplane.policy.gate.memory_lookahead import LookAhead
from controlplane.policy.gate.ordering import Ordering, Rank
from controlplane.policy.gate.preemption import VictimRank, in_preemption_order

LookAheadFor = Literal["all", "background", "none"]

# Without a release, the time at which a blocked head fits changes little from step to step.
_RETRY_STEPS = 4

_by_rank = attrgetter("rank")


@dataclass(slots=True)
class _Queued:
    """A waiting request with its rank."""

    rank: Rank
    state: RequestState
    waiting: Waiting


@dataclass(frozen=True, slots=True)
class _Blocked:
    """A head that could not start: it is retried at step `retry_at`, or when one of the others changes."""

    head: str
    leases: int
    quota: int
    retry_at: int


class StaticPriorityPolicy:
    """Engine policy with a static rank per request.

    `ahead` admits by predicted completions, `at_once` by present use; `look_ahead` says which applies.
    """

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

    def enqueue(self, state: RequestState) -> None:
        """Adds the request; the next plan ranks it."""
        self._new.append(state)

    def dequeue(self, state: RequestState) -> None:
        """Removes the request."""
        rank = self._ranks.pop(state.request.id, None)
        if rank is None:
            self._new.remove(state)
        else:
            del self._waiting[bisect_left(self._waiting, rank, key=_by_rank)]

    def waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._waiting) + len(self._new)

    def plan(self, view: EngineView) -> StepPlan:
        """Preempts for a shortage, then starts requests in order of rank."""
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
            # Its wait has no bound, because it was accepted.
            waiting = Waiting(state.request, footprint, None, rank, footprint.area)
            insort(self._waiting, _Queued(rank, state, waiting), key=_by_rank)
        self._new.clear()

    def _preempt_for_shortage(self, view: EngineView, short: int, plan: StepPlan) -> None:
        plan.ranked = _victims_last(view, self.ahead.victims)
        while short > 0 and plan.ranked:
            victim = plan.ranked.pop()
            plan.preempt.append(victim)
            plan.beneficiaries.append(None)
            short -= victim.held

    def _is_known_blocked(self, view: EngineView) -> bool:
        blocked, head = self._blocked, self._waiting[0].state.request.id
        return (
            blocked is not None
            and (blocked.head, blocked.leases, blocked.quota) == (head, len(view.running), view.quota)
            and self._steps < blocked.retry_at
        )

    def _start(self, view: EngineView, plan: StepPlan) -> None:
        """Steps 1 to 3 of the module docstring."""
        share: Share | None = None
        look: LookAhead | None = None
        self._blocked = None
        left = view.without(plan.preempt)
        for queued in self._waiting:
            state, waiting = queued.state, queued.waiting
            if view.has_shared:
                # What it would share may have changed since it was ranked.
                waiting = replace(waiting, footprint=footprint_of(state, view.block_tokens))
            if view.need(state) > view.quota:
                continue
            has_slot = view.free_slots + len(plan.preempt) > len(plan.offer)
            # Building the share and the look-ahead is costly; skip it where nothing can start.
            may_start = has_slot and (share is not None or _has_room(waiting, left))
            if not may_start and not _may_preempt(state, view):
                self._remember_blocked(queued, view)
                return
            share = share or share_of(left)
            look = look or LookAhead(share.leases)
            verdict = self._admission(state, view).try_in_time(share, look, waiting, view.now)
            if not isinstance(verdict, Admit) and not share.leases.ids and not plan.offer:
                # The footprint bounds the blocks from above; alone it starts if the blocks are there.
                verdict = Admit(waiting.footprint)
            if not isinstance(verdict, Admit):
                forced = self.ahead.try_preempt(share, look, waiting, view.now)
                if forced is None:
                    self._remember_blocked(queued, view)
                    return
                by_id = {other.request.id: other for other in view.running}
                victims = [by_id[victim.request_id] for victim in forced.victims]
                plan.preempt += victims
                plan.beneficiaries += [state] * len(victims)
                plan.ranked = [other for other in plan.ranked if other not in victims]
                share = share.without([victim.request_id for victim in forced.victims])
            plan.offer.append(state)
            share, look = share.with_lease(waiting), None

    def _admission(self, state: RequestState, view: EngineView) -> Admission:
        if self._look_ahead == "all":
            return self.ahead
        if self._look_ahead == "none" or not _is_background(state, view):
            return self._at_once
        return self.ahead

    def _remember_blocked(self, queued: _Queued, view: EngineView) -> None:
        if self._waiting[0] is queued and not _may_preempt(queued.state, view):
            self._blocked = _Blocked(
                queued.state.request.id, len(view.running), view.quota, self._steps + _RETRY_STEPS
            )


def _victims_last(view: EngineView, rank: VictimRank) -> list[RequestState]:
    """The running requests in reverse order of preemption."""
    by_id = {state.request.id: state for state in view.running}
    ordered = in_preemption_order(preemptible_of(view), rank)
    return [by_id[victim.request_id] for victim in reversed(ordered)]


def _has_room(waiting: Waiting, view: EngineView) -> bool:
    """Whether present use lets the request start; alone it may start whatever it needs."""
    return not view.running or waiting.footprint.base <= max(0, view.free) * view.block_tokens


def _is_background(state: RequestState, view: EngineView) -> bool:
    return state.deadline() is None or state.cannot_meet_slo(view.now, NO_TIME, view.pace.step)


def _may_preempt(state: RequestState, view: EngineView) -> bool:
    if state.first_due is None or state.first_due < view.now:
        return False
    return bool((view.running.priority < state.priority).any())
