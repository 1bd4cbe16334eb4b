"""Who should have the memory now, so that most promises are kept? Those that need it least.

Preemptive shortest remaining memory-time: with too much work for the memory, serving a request to its
end costs its remaining memory-time and earns one kept promise, so the smallest go first and the
largest pay. Who has still to be read costs more: the whole memory stands still for as long as its prompt
takes (`EngineView.prefill_cost`), and would again after a preemption. Three lanes:

- *hopeful* and within the size cut: start by what they cost, while they still have time only
  where nobody must give way in the next `settle` steps. Once half its time to the first token is gone,
  one may take the memory of running requests that still need `preempt_ratio` times as much, or of any
  of the two lanes below;
- *hopeful* beyond the cut: start where much memory is free, beyond by as much as the free share says, or
  in an idle engine. Otherwise the room is needed again before they end, and what they did is lost;
- *lost* (the promise is broken): the smallest start when the look-ahead says they stay, while all of them
  find room in what arrivals leave over of the memory (`SizeCutoff.spare`), or the oldest in an idle engine.
  However much work there is, after `patience` they are served in order of arrival on a share of the
  memory that is theirs (`aged_share`).

Paused requests whose next token is not yet due resume first.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from heapq import heappop, heappush, nsmallest
from math import inf

from controlplane.core.clock import Duration, Instant, after, scaled, seconds
from controlplane.policy.engine.column_store import Ints
from controlplane.policy.engine.interface import EngineView, StepPlan
from controlplane.policy.engine.plan_builder import LOST_LANE, OVERSIZED_LANE, PlanBuilder, Ranking
from controlplane.policy.engine.request_state import RequestState, memory_time
from controlplane.policy.engine.size_cutoff import SizeCutoff
from controlplane.policy.engine.waiting_index import NEVER, WaitingIndex

_START_LOST_EVERY = 4
_LOST_AT_ONCE = 4
_RESUME_MARGIN_STEPS = 3

Age = tuple[int, str]
Key = tuple[float, int, str]
"""Size, arrival, id."""

_PATIENCE = seconds(300)
# The price of a prompt follows each step. If the order did, requests alike would not go by arrival.
_PRICE_CHANGE = 1.25


@dataclass(frozen=True, slots=True)
class SrmtOptions:
    """`urgency` is the part of the time to the first token that must be gone before it is worth a
    preemption; `share` of the memory is planned for by the size cut over `window` arrivals (0: no
    cut); `aged_share` of it goes to those lost for longer than `patience` (0: to nobody); so much of what
    reading a prompt costs counts as `price` says (0: memory-time alone)."""

    preempt_ratio: float = 1.1
    urgency: float = 0.5
    settle: int = 12
    share: float = 0.75
    window: int = 600
    patience: Duration = _PATIENCE
    aged_share: float = 0.02
    price: float = 1.0

    def __post_init__(self) -> None:
        if self.preempt_ratio < 1:
            raise ValueError(
                f"preempt_ratio={self.preempt_ratio}: at least 1, or two would preempt each other"
            )
        for name, low, high in (
            ("urgency", 0, 1),
            ("share", 0, 2),
            ("aged_share", 0, 1),
            ("price", 0, 10),
            ("settle", 0, 1_000),
            ("window", 1, 100_000),
        ):
            if not low <= (value := getattr(self, name)) <= high:
                raise ValueError(f"{name}={value}: must be between {low} and {high}")


class ShortestRemainingMemoryTime:
    def __init__(self, options: SrmtOptions) -> None:
        self._options = options
        self._cutoff = SizeCutoff(window=options.window, share=options.share) if options.share else None
        self._unstarted = WaitingIndex[Key]()
        self._paused = WaitingIndex[tuple[int, str]]()
        self._prefill_price = 0.0
        self._lost: list[tuple[Age, RequestState]] = []
        self._due: list[tuple[int, str]] = []
        self._is_lost: dict[str, bool] = {}
        self._aged = AgedShare(options.aged_share)
        self._new: list[RequestState] = []
        self._steps = 0

    # --- who waits ---------------------------------------------------------------------------

    def enqueue(self, state: RequestState, now: Instant) -> None:
        self._new.append(state)
        self._is_lost[state.request.id] = False

    def dequeue(self, state: RequestState) -> None:
        request_id = state.request.id
        is_lost = self._is_lost.pop(request_id)
        if state in self._new:
            self._new.remove(state)
        elif is_lost:
            del self._lost[bisect_left(self._lost, _age(state), key=_first)]
        else:
            self._index_of(state).drop(request_id)

    def waiting(self) -> int:
        return len(self._is_lost)

    def _index_of(self, state: RequestState) -> WaitingIndex[Key] | WaitingIndex[tuple[int, str]]:
        """Of one that waits and is hopeful."""
        return self._unstarted if state.first_token is None else self._paused

    def _key(self, state: RequestState, left: int) -> Key:
        size = memory_time(state.tokens, left) + self._prefill_price * state.tokens
        return (size, state.request.arrival, state.request.id)

    def _update_prefill_price(self, view: EngineView) -> None:
        """What reading costs now; if that is something else, everybody is sorted anew."""
        price = self._options.price * view.prefill_cost
        low, high = sorted((price, self._prefill_price))
        if high <= _PRICE_CHANGE * low:
            return
        self._prefill_price = price
        self._unstarted.resort(lambda state: self._key(state, state.remaining()))

    def _sort_new(self, view: EngineView) -> None:
        """Each newcomer into its line, and into the lost one as soon as its time is up."""
        self._update_prefill_price(view)
        for state in self._new:
            left = state.remaining()
            key = self._key(state, left)
            is_new = state.first_token is None and not state.preemptions
            if self._cutoff is not None and is_new and not state.is_guess:
                self._cutoff.arrived(state.request.arrival, key[0], state.tokens + left)
            work = state.prefill(view.pace)
            if state.cannot_meet_slo(view.now, work):
                self._mark_lost(state)
                continue
            deadline = state.deadline()
            if state.first_token is None:
                self._unstarted.add(state, key, left, self._urgent_from(state))
            else:
                self._paused.add(state, (state.last_token or 0, state.request.id), left, deadline)
            if deadline is not None:
                heappush(self._due, (deadline - work, state.request.id))
        self._new.clear()
        while self._due and self._due[0][0] < view.now:
            _, request_id = heappop(self._due)
            if self._is_lost.get(request_id, True):
                continue
            found = self._unstarted.find(request_id) or self._paused.find(request_id)
            if found is not None and found.cannot_meet_slo(view.now, found.prefill(view.pace)):
                self._index_of(found).drop(request_id)
                self._mark_lost(found)

    def _mark_lost(self, state: RequestState) -> None:
        self._is_lost[state.request.id] = True
        insort(self._lost, (_age(state), state), key=_first)

    # --- the plan ----------------------------------------------------------------------------

    def plan(self, view: EngineView) -> StepPlan:
        self._sort_new(view)
        self._aged.account(view)
        if self._cutoff is not None:
            self._cutoff.update(
                view.quota * view.block_tokens, view.pace.step, view.used / max(1, view.quota)
            )
        builder = PlanBuilder(view, self._ranked, self._options.settle)
        while builder.free < 0 and builder.preempt_last():
            pass
        self._start_aged(builder)
        self._resume(builder)
        self._start_unstarted(builder)
        self._steps += 1
        if builder.is_idle or self._steps % _START_LOST_EVERY == 0:
            self._start_lost(builder)
        return StepPlan(builder.preempt, builder.offer, builder.ranked)

    def _is_oversized(self, state: RequestState, size: float) -> bool:
        return self._cutoff is not None and size > self._cutoff.size and not state.is_guess

    def _ranked(self, view: EngineView) -> Ranking:
        running = view.running
        sizes, is_lost = running.memory_time(), running.is_lost(view.now)
        if self._cutoff is not None:
            sizes[(sizes > self._cutoff.size) & ~(running.is_guess | is_lost)] += OVERSIZED_LANE
        sizes[is_lost] += LOST_LANE
        return Ranking(running, sizes, spared=self._aged.running)

    def _start_aged(self, builder: PlanBuilder) -> None:
        """The oldest beyond its patience takes what it needs and keeps it, unless their share is spent."""
        options, view = self._options, builder.view
        for (arrival, _), state in self._lost:
            if not self._aged.has_credit or arrival + options.patience > view.now:
                return
            if builder.need(state) > view.quota:
                continue
            while builder.free < builder.need(state) and builder.preempt_last():
                pass
            if builder.start(state):
                self._aged.running.add(state)
            return

    def _resume(self, builder: PlanBuilder) -> None:
        """Those paused that stay, and those whose next token will be late unless they resume about now."""
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
        # Blocks that nobody could be given: who comes later is larger, so fewer give way for it.
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

    def _startable(self, builder: PlanBuilder, needs: Ints, unobtainable: int) -> Ints:
        """Their places."""
        waiting = self._unstarted
        may = waiting.may_start(builder, needs, waiting.due <= builder.view.now, unobtainable)
        too_large = waiting.place((self._max_size(builder), NEVER, ""))
        may[too_large:] &= waiting.is_guess[too_large:]
        places: Ints = may.nonzero()[0]
        return places

    def _max_size(self, builder: PlanBuilder) -> float:
        """Whoever needs more, and whose need was predicted, can start in no case."""
        if self._cutoff is None or builder.is_idle:
            return inf
        left = builder.free_at_horizon if builder.free > 0 else 0.0
        return self._cutoff.size * (1 + max(0.0, left) / builder.view.quota)

    def _start_urgent(self, builder: PlanBuilder, state: RequestState, size: float, unobtainable: int) -> int:
        """One that fits may overtake: what is urgent takes its memory when it must. Blocks that nobody could
        be given from now on."""
        if not self._is_urgent(state, builder.view.now) or builder.start(state):
            return unobtainable
        return (
            NEVER
            if builder.start_by_preempting(state, self._options.preempt_ratio * size)
            else builder.need(state)
        )

    def _start_oversized(self, builder: PlanBuilder, state: RequestState, size: float) -> None:
        if builder.is_idle:
            builder.start_if_fits_to_end(state)
        elif self._cutoff is not None and builder.fits_for_horizon(state):
            left = builder.free_at_horizon - builder.need(state)
            if size <= self._cutoff.size * (1 + left / builder.view.quota):
                builder.start(state)

    def _is_urgent(self, state: RequestState, now: Instant) -> bool:
        urgent_from = self._urgent_from(state)
        return urgent_from is not None and now >= urgent_from

    def _urgent_from(self, state: RequestState) -> Instant | None:
        deadline, arrival = state.deadline(), state.request.arrival
        if deadline is None:
            return None
        return after(arrival, scaled(Duration(deadline - arrival), self._options.urgency))

    def _start_lost(self, builder: PlanBuilder) -> None:
        """One alone, in order of arrival; else the smallest that find room in what arrivals leave over."""
        if builder.slots <= 0:
            return
        for _, state in self._lost:
            if not builder.is_idle:
                break
            builder.start_if_fits_to_end(state)
        if not self._lost or (left := self._left_for_lost(builder.view)) <= 0:
            return
        lost = (state for _, state in self._lost)
        for state in nsmallest(_LOST_AT_ONCE, lost, key=lambda state: self._key(state, state.remaining())):
            need = builder.need_at_end(state)
            if need > left or not builder.start_if_fits_to_end(state):
                return
            left -= need

    def _left_for_lost(self, view: EngineView) -> float:
        """Blocks that arrivals leave over, less what those that are lost hold."""
        if self._cutoff is None:
            return view.quota
        if (spare := self._cutoff.spare) <= 0:
            return 0.0
        return spare * view.quota - int(view.running.held[view.running.is_lost(view.now)].sum())


def _age(state: RequestState) -> Age:
    return (state.request.arrival, state.request.id)


def _first(entry: tuple[Age, RequestState]) -> Age:
    return entry[0]


# FOLDED aged_share.py:
# When may the next of those that have lost their promise start? When its share of the memory is not spent.
#
# A share of the quota is earned every step, and what aged requests hold is paid from it. Whenever the
# account is not in debt the oldest may start; it then runs to its end. So with aged requests waiting all the
# time they get that share of all block-steps, less one stay, and no more than it, plus one stay. Who comes to
# be aged waits at most for the block-steps of those that arrived before it, divided by the share.


class AgedShare:
    """`running` are the aged ones that run; the caller adds to it."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._balance = 0.0
        self.running: set[RequestState] = set()

    def account(self, view: EngineView) -> None:
        """Call once a step. Nothing is saved up while nobody is served."""
        if self.running:
            self.running = set(view.running.at(view.running.places(self.running)))
        held = sum(state.held for state in self.running)
        self._balance = min(0.0, self._balance + self._share * view.quota - held)

    @property
    def has_credit(self) -> bool:
        return self._share > 0 and self._balance >= 0
