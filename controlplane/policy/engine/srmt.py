"""Who should have the memory now, so that most promises are kept? Those that need it least.

Preemptive shortest remaining memory-time: with too much work for the memory, serving a request to its
end costs its remaining memory-time and earns one kept promise, so the smallest go first and the
largest pay. Who has still to be read costs more: the whole memory stands still for as long as its prompt
takes (`EngineView.reading`), and would again after a preemption. Three lanes:

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
from controlplane.policy.engine.plan_builder import BEYOND, LOST, PlanBuilder, Ranking
from controlplane.policy.engine.request_state import RequestState, memory_time
from controlplane.policy.engine.size_cutoff import SizeCutoff
from controlplane.policy.engine.waiting_index import NEVER, WaitingIndex

_ASK_LOST_EVERY = 4
_LOST_AT_ONCE = 4
_LAST_CALL_STEPS = 3

Age = tuple[int, str]
Key = tuple[float, int, str]
"""Size, arrival, id."""

_PATIENCE = seconds(300)
# The price of a prompt follows each step. If the order did, requests alike would not go by arrival.
_PRICE_MOVES = 1.25


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
        self._cut = SizeCutoff(window=options.window, share=options.share) if options.share else None
        self._fresh = WaitingIndex[Key]()
        self._paused = WaitingIndex[tuple[int, str]]()
        self._reading = 0.0
        self._lost: list[tuple[Age, RequestState]] = []
        self._due: list[tuple[int, str]] = []
        self._is_lost: dict[str, bool] = {}
        self._aged = AgedShare(options.aged_share)
        self._unripe: list[RequestState] = []
        self._steps = 0

    # --- who waits ---------------------------------------------------------------------------

    def enqueue(self, progress: RequestState, now: Instant) -> None:
        self._unripe.append(progress)
        self._is_lost[progress.request.id] = False

    def dequeue(self, progress: RequestState) -> None:
        request_id = progress.request.id
        is_lost = self._is_lost.pop(request_id)
        if progress in self._unripe:
            self._unripe.remove(progress)
        elif is_lost:
            del self._lost[bisect_left(self._lost, _age(progress), key=_first)]
        else:
            self._line_of(progress).drop(request_id)

    def waiting(self) -> int:
        return len(self._is_lost)

    def _line_of(self, progress: RequestState) -> WaitingIndex[Key] | WaitingIndex[tuple[int, str]]:
        """Of one that waits and is hopeful."""
        return self._fresh if progress.first_token is None else self._paused

    def _key(self, progress: RequestState, left: int) -> Key:
        size = memory_time(progress.tokens, left) + self._reading * progress.tokens
        return (size, progress.request.arrival, progress.request.id)

    def _price(self, view: EngineView) -> None:
        """What reading costs now; if that is something else, everybody is sorted anew."""
        reading = self._options.price * view.reading
        low, high = sorted((reading, self._reading))
        if high <= _PRICE_MOVES * low:
            return
        self._reading = reading
        self._fresh.resort(lambda progress: self._key(progress, progress.remaining()))

    def _sort_in(self, view: EngineView) -> None:
        """Each newcomer into its line, and into the lost one as soon as its time is up."""
        self._price(view)
        for progress in self._unripe:
            left = progress.remaining()
            key = self._key(progress, left)
            is_new = progress.first_token is None and not progress.preemptions
            if self._cut is not None and is_new and not progress.is_guess:
                self._cut.arrived(progress.request.arrival, key[0], progress.tokens + left)
            work = progress.prefill(view.pace)
            if progress.cannot_meet_slo(view.now, work):
                self._lose(progress)
                continue
            deadline = progress.deadline()
            if progress.first_token is None:
                self._fresh.add(progress, key, left, self._urgent_from(progress))
            else:
                self._paused.add(progress, (progress.last_token or 0, progress.request.id), left, deadline)
            if deadline is not None:
                heappush(self._due, (deadline - work, progress.request.id))
        self._unripe.clear()
        while self._due and self._due[0][0] < view.now:
            _, request_id = heappop(self._due)
            if self._is_lost.get(request_id, True):
                continue
            found = self._fresh.find(request_id) or self._paused.find(request_id)
            if found is not None and found.cannot_meet_slo(view.now, found.prefill(view.pace)):
                self._line_of(found).drop(request_id)
                self._lose(found)

    def _lose(self, progress: RequestState) -> None:
        self._is_lost[progress.request.id] = True
        insort(self._lost, (_age(progress), progress), key=_first)

    # --- the plan ----------------------------------------------------------------------------

    def plan(self, view: EngineView) -> StepPlan:
        self._sort_in(view)
        self._aged.account(view)
        if self._cut is not None:
            self._cut.update(view.quota * view.block_tokens, view.pace.step, view.used / max(1, view.quota))
        draft = PlanBuilder(view, self._ranked, self._options.settle)
        while draft.free < 0 and draft.preempt_last():
            pass
        self._start_aged(draft)
        self._resume(draft)
        self._start_fresh(draft)
        self._steps += 1
        if draft.is_idle or self._steps % _ASK_LOST_EVERY == 0:
            self._start_lost(draft)
        return StepPlan(draft.preempt, draft.offer, draft.ranked)

    def _is_beyond(self, progress: RequestState, size: float) -> bool:
        return self._cut is not None and size > self._cut.size and not progress.is_guess

    def _ranked(self, view: EngineView) -> Ranking:
        running = view.running
        sizes, is_lost = running.memory_time(), running.is_lost(view.now)
        if self._cut is not None:
            sizes[(sizes > self._cut.size) & ~(running.is_guess | is_lost)] += BEYOND
        sizes[is_lost] += LOST
        return Ranking(running, sizes, spared=self._aged.running)

    def _start_aged(self, draft: PlanBuilder) -> None:
        """The oldest beyond its patience takes what it needs and keeps it, unless their share is spent."""
        options, view = self._options, draft.view
        for (arrival, _), progress in self._lost:
            if not self._aged.has_credit or arrival + options.patience > view.now:
                return
            if draft.need(progress) > view.quota:
                continue
            while draft.free < draft.need(progress) and draft.preempt_last():
                pass
            if draft.start(progress):
                self._aged.running.add(progress)
            return

    def _resume(self, draft: PlanBuilder) -> None:
        """Those paused that stay, and those whose next token will be late unless they resume about now."""
        line, view = self._paused, draft.view
        if draft.slots <= 0 or draft.free <= 0 or not len(line):
            return
        late_from = view.now + (1 + _LAST_CALL_STEPS) * view.pace.step
        is_last_call = line.due < late_from + view.pace.per_prompt_token * line.tokens
        for at in line.may_start(draft, line.needs(view), is_last_call).nonzero()[0].tolist():
            _, progress = line[at]
            if is_last_call[at] or draft.fits_for_horizon(progress):
                draft.start(progress)

    def _start_fresh(self, draft: PlanBuilder) -> None:
        if draft.slots <= 0 or not len(self._fresh):
            return
        # Blocks that nobody could be given: who comes later is larger, so fewer give way for it.
        in_vain, needs = int(NEVER), self._fresh.needs(draft.view)
        asked = self._fresh_that_may_start(draft, needs, in_vain)
        while len(asked) and draft.slots > 0:
            at, asked = int(asked[0]), asked[1:]
            before, was_in_vain = len(draft.offer), in_vain
            (size, _, _), progress = self._fresh[at]
            if self._is_beyond(progress, size):
                self._start_beyond(draft, progress, size)
            elif not (draft.fits_for_horizon(progress) and draft.start(progress)):
                in_vain = self._start_urgent(draft, progress, size, in_vain)
            if len(draft.offer) != before:
                asked = self._fresh_that_may_start(draft, needs, in_vain)
                asked = asked[asked > at]
            elif in_vain != was_in_vain:
                theirs = needs[asked]
                asked = asked[(theirs < in_vain) | (theirs <= draft.free)]

    def _fresh_that_may_start(self, draft: PlanBuilder, needs: Ints, in_vain: int) -> Ints:
        """Their places."""
        line = self._fresh
        may = line.may_start(draft, needs, line.due <= draft.view.now, in_vain)
        too_large = line.place((self._largest(draft), NEVER, ""))
        may[too_large:] &= line.is_guess[too_large:]
        places: Ints = may.nonzero()[0]
        return places

    def _largest(self, draft: PlanBuilder) -> float:
        """Whoever needs more, and whose need was predicted, can start in no case."""
        if self._cut is None or draft.is_idle:
            return inf
        left = draft.left_when_settled if draft.free > 0 else 0.0
        return self._cut.size * (1 + max(0.0, left) / draft.view.quota)

    def _start_urgent(self, draft: PlanBuilder, progress: RequestState, size: float, in_vain: int) -> int:
        """One that fits may overtake: what is urgent takes its memory when it must. Blocks that nobody could
        be given from now on."""
        if not self._is_urgent(progress, draft.view.now) or draft.start(progress):
            return in_vain
        return (
            NEVER
            if draft.start_by_preempting(progress, self._options.preempt_ratio * size)
            else draft.need(progress)
        )

    def _start_beyond(self, draft: PlanBuilder, progress: RequestState, size: float) -> None:
        if draft.is_idle:
            draft.start_if_fits_to_end(progress)
        elif self._cut is not None and draft.fits_for_horizon(progress):
            left = draft.left_when_settled - draft.need(progress)
            if size <= self._cut.size * (1 + left / draft.view.quota):
                draft.start(progress)

    def _is_urgent(self, progress: RequestState, now: Instant) -> bool:
        urgent_from = self._urgent_from(progress)
        return urgent_from is not None and now >= urgent_from

    def _urgent_from(self, progress: RequestState) -> Instant | None:
        deadline, arrival = progress.deadline(), progress.request.arrival
        if deadline is None:
            return None
        return after(arrival, scaled(Duration(deadline - arrival), self._options.urgency))

    def _start_lost(self, draft: PlanBuilder) -> None:
        """One alone, in order of arrival; else the smallest that find room in what arrivals leave over."""
        if draft.slots <= 0:
            return
        for _, progress in self._lost:
            if not draft.is_idle:
                break
            draft.start_if_fits_to_end(progress)
        if not self._lost or (left := self._left_for_lost(draft.view)) <= 0:
            return
        lost = (progress for _, progress in self._lost)
        for progress in nsmallest(_LOST_AT_ONCE, lost, key=lambda one: self._key(one, one.remaining())):
            need = draft.need_at_end(progress)
            if need > left or not draft.start_if_fits_to_end(progress):
                return
            left -= need

    def _left_for_lost(self, view: EngineView) -> float:
        """Blocks that arrivals leave over, less what those that are lost hold."""
        if self._cut is None:
            return view.quota
        if (spare := self._cut.spare) <= 0:
            return 0.0
        return spare * view.quota - int(view.running.held[view.running.is_lost(view.now)].sum())


def _age(progress: RequestState) -> Age:
    return (progress.request.arrival, progress.request.id)


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
        held = sum(one.held for one in self.running)
        self._balance = min(0.0, self._balance + self._share * view.quota - held)

    @property
    def has_credit(self) -> bool:
        return self._share > 0 and self._balance >= 0
