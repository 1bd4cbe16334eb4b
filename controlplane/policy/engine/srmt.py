"""Preemptive shortest remaining memory-time (SRMT): serves the requests that need the memory least.

With more work than memory, serving a request to its end costs its remaining memory-time and meets one SLO, so
the smallest are served first and the largest miss theirs. A prefill adds to the cost, because the full memory
waits while the uncached part of the prompt is read (`EngineView.prefill_cost`), and a preemption repeats it.
Every cost is divided by the weight of the request's class. That serves the greatest sum of weights; of two
requests, the one of the higher class goes first unless it is larger by more than the ratio of the weights.
There are three lanes:

- *Timely* requests within the size cutoff start in order of their cost; while they have time, only where no
  preemption is expected in the next `settle_steps`. Once the part `urgency` of the time to the first token
  has passed, such a request may preempt running requests that still need `preempt_ratio` times as much, or
  any request of the two other lanes. Unless the victim is lost, `recompute_weight` times the cost of
  computing its tokens again is subtracted from what it needs: with long prompts it exceeds the gain. Where
  slots are short instead of memory, three quarters of the time must have passed, and only requests of
  classes with a smaller weight are preempted.
- *Timely* requests beyond the cutoff start up to the cutoff times one plus the free share of the memory, or
  in an idle engine. Otherwise the memory is needed again before they end and their work is lost.
- *Lost* requests (the SLO is missed; without an objective left to miss, the wait took `starvation_ms`): the
  smallest start if the look-ahead predicts that they stay and all of them fit into the memory that arrivals
  leave free (`SizeCutoff.spare`). In an idle engine the oldest starts. After `starvation_ms` they are served
  in order of arrival, at any load, on a share of the memory of their own (`aged_share`).

Preempted requests whose next token is not yet due resume first.

Keys of the order: remaining memory-time plus prefill cost over the weight, arrival, request id.
"""

from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush
from itertools import islice
from math import inf

import numpy as np

from controlplane.core.clock import Duration, Instant, after, milliseconds, scaled
from controlplane.policy.engine.aged_share import AgedShare
from controlplane.policy.engine.column_store import Ints
from controlplane.policy.engine.interface import EngineView, StepPlan
from controlplane.policy.engine.options import EngineOptions
from controlplane.policy.engine.plan_builder import LOST_LANE, OVERSIZED_LANE, PlanBuilder, Ranking
from controlplane.policy.engine.request_state import RequestState, memory_time
from controlplane.policy.engine.size_cutoff import SizeCutoff
from controlplane.policy.engine.waiting_index import NEVER, WaitingIndex

_START_LOST_EVERY = 4
_LOST_AT_ONCE = 4
_RESUME_MARGIN_STEPS = 3

Age = tuple[int, str]
Key = tuple[float, int, str]
"""Size (remaining memory-time plus prefill cost, over the class's weight), arrival, request id."""

# Checks of requests that do not wait any more are dropped once there are more of them.
_MOST_CHECKS = 65_536
# Most slots are free in time without a preemption, which costs the victim's prefill (decision 0067).
_SLOT_URGENCY = 0.75
# The prefill cost changes with every step. If the order followed, equal requests would not go by arrival.
_PRICE_CHANGE = 1.25


class ShortestRemainingMemoryTime:
    """Engine policy that starts and preempts by remaining memory-time."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._patience = milliseconds(options.starvation_ms)
        self._cutoff = (
            SizeCutoff(window=options.size_cutoff_window, share=options.size_cutoff_share)
            if options.size_cutoff_share
            else None
        )
        self._unstarted = WaitingIndex[Key]()
        self._paused = WaitingIndex[tuple[int, str]]()
        self._prefill_price = 0.0
        self._lost: list[tuple[Age, RequestState]] = []
        self._lost_by_size = WaitingIndex[Key]()
        # Time and id of each timely request's next check for lateness, a heap.
        self._checks: list[tuple[int, str]] = []
        # Of all waiting requests: whether they are in the lost lane.
        self._is_lost_by_id: dict[str, bool] = {}
        self._aged = AgedShare(options.aged_share)
        self._new: list[RequestState] = []
        self._steps = 0

    def enqueue(self, state: RequestState) -> None:
        """Adds the request; the next plan puts it into its lane."""
        self._new.append(state)
        self._is_lost_by_id[state.request.id] = False

    def dequeue(self, state: RequestState) -> None:
        """Removes the request."""
        request_id = state.request.id
        is_lost = self._is_lost_by_id.pop(request_id)
        if state in self._new:
            self._new.remove(state)
        elif is_lost:
            del self._lost[bisect_left(self._lost, _age(state), key=_first)]
            self._lost_by_size.drop(request_id)
        else:
            self._index_of(state).drop(request_id)

    def waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._is_lost_by_id)

    def _index_of(self, state: RequestState) -> WaitingIndex[Key] | WaitingIndex[tuple[int, str]]:
        """The index that holds a waiting timely request."""
        return self._unstarted if state.first_token is None else self._paused

    def _cost(self, state: RequestState, left: int) -> float:
        """Token-steps that serving the request takes from the memory."""
        return memory_time(state.tokens, left) + self._prefill_price * (state.tokens - state.cached)

    def _key(self, state: RequestState, left: int) -> Key:
        return (self._cost(state, left) / state.weight, state.request.arrival, state.request.id)

    def _update_prefill_price(self, view: EngineView) -> None:
        """Updates the prefill cost per token; sorts the unstarted requests again if it changed clearly."""
        price = self._options.prefill_weight * view.prefill_cost
        low, high = sorted((price, self._prefill_price))
        if high <= _PRICE_CHANGE * low:
            return
        self._prefill_price = price
        for index in (self._unstarted, self._lost_by_size):
            index.resort(lambda state: self._key(state, state.remaining()))

    def _sort_new(self, view: EngineView) -> None:
        """Puts each new request into its lane."""
        for state in self._new:
            left = state.remaining()
            key = self._key(state, left)
            is_new = state.first_token is None and not state.preemptions
            if self._cutoff is not None and is_new and not state.has_arrived and not state.is_guess:
                state.has_arrived = True
                cost = self._cost(state, left)
                self._cutoff.arrived(state.request.arrival, cost, state.tokens + left, state.weight)
            work, step = state.prefill(view.pace), view.pace.step
            if state.cannot_meet_slo(view.now, work, step):
                self._mark_lost(state)
                continue
            if state.first_token is None:
                self._unstarted.add(state, key, left, _passed(state, self._options.urgency))
            else:
                self._paused.add(state, (state.last_token or 0, state.request.id), left, state.deadline(step))
            self._check_at_last_chance(state, view)
        self._new.clear()

    def _move_late(self, view: EngineView) -> None:
        """Moves the timely requests whose last chance has passed to the lost lane."""
        while self._checks and self._checks[0][0] < view.now:
            _, request_id = heappop(self._checks)
            if self._is_lost_by_id.get(request_id, True):
                continue
            found = self._unstarted.find(request_id) or self._paused.find(request_id)
            if found is None:
                continue
            if self._is_late(found, view):
                self._index_of(found).drop(request_id)
                self._mark_lost(found)
            else:
                # More of its prompt is cached than when it was sorted, or the engine has become faster.
                self._check_at_last_chance(found, view)
        if len(self._checks) > _MOST_CHECKS + 2 * len(self._is_lost_by_id):
            self._checks = [check for check in self._checks if self._is_lost_by_id.get(check[1]) is False]
            heapify(self._checks)

    def _check_at_last_chance(self, state: RequestState, view: EngineView) -> None:
        if (chance := state.last_chance(view.pace.step)) is not None:
            heappush(self._checks, (chance - state.prefill(view.pace), state.request.id))
        else:
            # Without an objective left to miss its wait would never end.
            heappush(self._checks, (state.pending_since + self._patience, state.request.id))

    def _is_late(self, state: RequestState, view: EngineView) -> bool:
        """Whether a request cannot meet its SLO, or has none left to meet and waited for `starvation_ms`."""
        if state.cannot_meet_slo(view.now, state.prefill(view.pace), view.pace.step):
            return True
        has_no_end = state.last_chance(view.pace.step) is None
        return has_no_end and state.pending_since + self._patience < view.now

    def _mark_lost(self, state: RequestState) -> None:
        self._is_lost_by_id[state.request.id] = True
        insort(self._lost, (_age(state), state), key=_first)
        left = state.remaining()
        self._lost_by_size.add(state, self._key(state, left), left, None)

    def plan(self, view: EngineView) -> StepPlan:
        """Preempts for a shortage, then starts aged, preempted, unstarted and lost requests in this order."""
        self._update_prefill_price(view)
        self._sort_new(view)
        self._move_late(view)
        self._aged.account(view)
        if self._cutoff is not None:
            memory, use = view.quota * view.block_tokens, view.used / max(1, view.quota)
            self._cutoff.update(view.now, memory, view.pace.step, use)
        if not self._is_lost_by_id and view.free >= 0:
            # None waits, and none must be preempted.
            self._steps += 1
            return StepPlan()
        builder = PlanBuilder(view, self._ranking, self._options.settle_steps)
        while builder.free < 0 and builder.preempt_last():
            pass
        self._start_aged(builder)
        self._resume(builder)
        self._start_unstarted(builder)
        self._start_in_slots(builder)
        self._steps += 1
        if builder.is_idle or self._steps % _START_LOST_EVERY == 0:
            self._start_lost(builder)
        return builder.plan()

    def _is_oversized(self, state: RequestState, size: float) -> bool:
        return self._cutoff is not None and size > self._cutoff.size and not state.is_guess

    def _ranking(self, view: EngineView) -> Ranking:
        running = view.running
        is_lost, weights = running.is_lost(view.now, view.pace.step), running.weight
        sizes = running.memory_time() / weights
        price = self._options.recompute_weight * self._prefill_price * view.block_tokens
        gains = np.where(is_lost, sizes, sizes - price * running.held / weights)
        if self._cutoff is not None:
            is_oversized = (sizes > self._cutoff.size) & ~(running.is_guess | is_lost)
            gains[is_oversized & (gains > 0)] += OVERSIZED_LANE
        gains[is_lost] += LOST_LANE
        return Ranking(running, gains, spared=self._aged.running)

    def _start_aged(self, builder: PlanBuilder) -> None:
        """Starts the oldest request past its patience, by preemption if needed, if the share has credit."""
        view = builder.view
        for (arrival, _), state in self._lost:
            if not self._aged.has_credit or arrival + self._patience > view.now:
                return
            if builder.view.need(state) > view.quota:
                continue
            while builder.free < builder.view.need(state) and builder.preempt_last(state):
                pass
            if builder.start(state):
                self._aged.running.add(state)
            return

    def _resume(self, builder: PlanBuilder) -> None:
        """Resumes preempted requests that fit for the horizon or whose next token is due soon."""
        waiting, view = self._paused, builder.view
        if builder.slots <= 0 or builder.free <= 0 or not len(waiting):
            return
        late_from = view.now + (1 + _RESUME_MARGIN_STEPS) * view.pace.step
        is_due_soon = waiting.due < late_from + view.pace.per_prompt_token * waiting.tokens
        may_start = waiting.may_start(builder, waiting.needs(view), is_due_soon)
        for index in may_start.nonzero()[0].tolist():
            _, state = waiting[index]
            if is_due_soon[index] or builder.fits_for_horizon(state):
                builder.start(state)

    def _start_unstarted(self, builder: PlanBuilder) -> None:
        if builder.slots <= 0 or not len(self._unstarted):
            return
        # A failed preemption for this many blocks fails for later requests too: they are larger, so fewer
        # running requests may be preempted for them.
        unobtainable, needs = int(NEVER), self._unstarted.needs(builder.view)
        candidates = self._startable(builder, needs, unobtainable)
        while len(candidates) and builder.slots > 0:
            index, candidates = int(candidates[0]), candidates[1:]
            before, former_unobtainable = len(builder.offer), unobtainable
            (size, _, _), state = self._unstarted[index]
            if self._is_oversized(state, size):
                self._start_oversized(builder, state, size)
            elif not (builder.fits_for_horizon(state) and builder.start(state)):
                unobtainable = self._start_urgent(builder, state, size, unobtainable)
            if len(builder.offer) != before:
                candidates = self._startable(builder, needs, unobtainable)
                candidates = candidates[candidates > index]
            elif unobtainable != former_unobtainable:
                candidate_needs = needs[candidates]
                candidates = candidates[(candidate_needs < unobtainable) | (candidate_needs <= builder.free)]

    def _start_in_slots(self, builder: PlanBuilder) -> None:
        """Starts urgent requests in slots of larger requests of smaller class weights, if all are taken."""
        waiting, now, running = self._unstarted, builder.view.now, builder.view.running
        if builder.slots > 0 or not len(waiting):
            return
        may_take = (waiting.due <= now) & (waiting.weight > running.weight.min(initial=inf))
        # A request of this class weight found no slot. Later ones are larger, smaller weights find fewer.
        unobtainable = 0.0
        for index in may_take.nonzero()[0].tolist():
            (size, _, _), state = waiting[index]
            if state.weight <= unobtainable or now < _passed(state, _SLOT_URGENCY):
                continue
            if self._is_oversized(state, size):
                return
            if not builder.start_in_slot(state, self._options.preempt_ratio * size):
                unobtainable = state.weight

    def _startable(self, builder: PlanBuilder, needs: Ints, unobtainable: int) -> Ints:
        """Positions of the unstarted requests that might start."""
        waiting = self._unstarted
        may = waiting.may_start(builder, needs, waiting.due <= builder.view.now, unobtainable)
        places: Ints = may.nonzero()[0]
        if len(places):
            too_large = waiting.place((self._max_size(builder), NEVER, ""))
            places = places[(places < too_large) | waiting.is_guess[places]]
        return places

    def _max_size(self, builder: PlanBuilder) -> float:
        """Size above which no request with a forecast can start."""
        if self._cutoff is None or builder.is_idle:
            return inf
        left = builder.free_at_horizon if builder.free > 0 else 0.0
        return self._cutoff.largest(left / builder.view.quota)

    def _start_urgent(self, builder: PlanBuilder, state: RequestState, size: float, unobtainable: int) -> int:
        """Starts an urgent request, by preemption if needed; one that fits may overtake.

        Returns the number of blocks from which on no request can obtain its blocks by preemption.
        """
        if not self._is_urgent(state, builder.view.now) or builder.start(state):
            return unobtainable
        return (
            NEVER
            if builder.start_by_preempting(state, self._options.preempt_ratio * size)
            else builder.view.need(state)
        )

    def _start_oversized(self, builder: PlanBuilder, state: RequestState, size: float) -> None:
        if builder.is_idle:
            builder.start_if_fits_to_end(state)
        elif self._cutoff is not None and builder.fits_for_horizon(state):
            left = builder.free_at_horizon - builder.view.need(state)
            if size <= self._cutoff.largest(left / builder.view.quota):
                builder.start(state)

    def _is_urgent(self, state: RequestState, now: Instant) -> bool:
        return _passed(state, self._options.urgency) <= now

    def _start_lost(self, builder: PlanBuilder) -> None:
        """Starts the oldest lost request in an idle engine, else the smallest that fit into spare memory."""
        if builder.slots <= 0:
            return
        for _, state in self._lost:
            if not builder.is_idle:
                break
            builder.start_if_fits_to_end(state)
        if not self._lost or (left := self._left_for_lost(builder.view)) <= 0:
            return
        for _, state in islice(self._lost_by_size, _LOST_AT_ONCE):
            need = builder.need_at_end(state)
            if need > left or not builder.start_if_fits_to_end(state):
                return
            left -= need

    def _left_for_lost(self, view: EngineView) -> float:
        """Blocks that arrivals leave free, less those that running lost requests hold."""
        if self._cutoff is None:
            return view.quota
        if (spare := self._cutoff.spare) <= 0:
            return 0.0
        is_lost = view.running.is_lost(view.now, view.pace.step)
        return spare * view.quota - int(view.running.held[is_lost].sum())


def _passed(state: RequestState, share: float) -> Instant:
    """When this share of the time to the first token has passed; never for a request without a deadline."""
    due, arrival = state.first_due, state.request.arrival
    return NEVER if due is None else after(arrival, scaled(Duration(due - arrival), share))


def _age(state: RequestState) -> Age:
    return (state.request.arrival, state.request.id)


def _first(entry: tuple[Age, RequestState]) -> Age:
    return entry[0]
