"""Tracks free blocks and slots while a step is planned, and preempts in order of rank.

A request that starts takes blocks and a slot, a preempted one returns them. The last in rank is preempted
first.
"""

from collections.abc import Callable, Collection

import numpy as np

from controlplane.core.memory_ledger import Floats
from controlplane.policy.engine.column_store import Bools, Ints
from controlplane.policy.engine.gate_view_adapter import footprint_of, lease_table
from controlplane.policy.engine.interface import RANKED, EngineView, StepPlan
from controlplane.policy.engine.request_state import RequestState
from controlplane.policy.engine.running_batch import RunningBatch
from controlplane.policy.gate.memory_lookahead import LookAhead

# Offsets of the later lanes, larger than any memory-time, so that the lane decides before the size.
# Memory-time is a multiple of 1/2, so float64 holds the sum exactly; over a weight, to 1/128.
OVERSIZED_LANE, LOST_LANE = 2.0**44, 2.0**45


class Ranking:
    """The running requests except those in `spared`, in reverse order of preemption.

    `order` holds their positions in the batch: by lane and size, then request id; the last is preempted
    first. `sizes` are indexed by position: what preempting each request is worth to the policy, with the
    offset of the lane.
    """

    def __init__(self, batch: RunningBatch, sizes: Floats, spared: Collection[RequestState]) -> None:
        self.batch = batch
        self.sizes = sizes
        self.order: list[int] = np.lexsort((batch.by_id, sizes)).tolist()
        if spared:
            spared_positions = set(batch.places(spared))
            self.order = [index for index in self.order if index not in spared_positions]


class PlanBuilder:
    """A plan under construction.

    A request may also be required to fit for `settle` more steps, as if no other started. `make_ranking` is
    called only if a request must be preempted.
    """

    def __init__(self, view: EngineView, make_ranking: Callable[[EngineView], Ranking], settle: int) -> None:
        self.view = view
        self.preempt: list[RequestState] = []
        self.beneficiaries: list[RequestState | None] = []
        self.offer: list[RequestState] = []
        self.free = view.free
        self.slots = view.free_slots
        self._settle = settle
        self._growth = settle / view.block_tokens
        self._cached_at_horizon: float | None = None
        self._make_ranking = make_ranking
        self._cached_ranking: Ranking | None = None
        self._offered: set[str] = set()
        self._look: LookAhead | None = None

    @property
    def ranked(self) -> list[RequestState]:
        """The last `RANKED` requests by rank; empty if no ranking was needed."""
        ranking = self._cached_ranking
        return [] if ranking is None else ranking.batch.requests(ranking.order[-RANKED:])

    def need_at_end(self, state: RequestState) -> int:
        """Blocks that a waiting request takes from the free ones until its predicted end."""
        return self.view.need(state) + state.remaining() // self.view.block_tokens

    def _ranking(self) -> Ranking:
        if self._cached_ranking is None:
            self._cached_ranking = self._make_ranking(self.view)
        return self._cached_ranking

    def plan(self) -> StepPlan:
        """The plan as it is now."""
        return StepPlan(self.preempt, self.offer, self.ranked, self.beneficiaries)

    def preempt_last(self, beneficiary: RequestState | None = None) -> bool:
        """Preempts the last in rank for a request that is to start, or for those that run.

        False if there is none left.
        """
        ranking = self._ranking()
        if not ranking.order:
            return False
        self._preempt(ranking.batch[ranking.order.pop()], beneficiary)
        return True

    def _preempt(self, victim: RequestState, beneficiary: RequestState | None) -> None:
        self.preempt.append(victim)
        self.beneficiaries.append(beneficiary)
        self.free += victim.held
        if self._cached_at_horizon is not None:
            self._cached_at_horizon += self._held_at_horizon(victim)
        self.slots += 1
        self._look = None

    def fits(self, state: RequestState) -> bool:
        """Whether blocks and a slot are free for the request now."""
        return self.slots > 0 and self.view.need(state) <= self.free

    def start(self, state: RequestState) -> bool:
        """Offers the request if it fits and is not offered yet; returns whether it did."""
        need = self.view.need(state)
        request_id = state.request.id
        if request_id in self._offered or not self.fits(state):
            return False
        self._offered.add(request_id)
        self.offer.append(state)
        self.free -= need
        if self._cached_at_horizon is not None:
            self._cached_at_horizon -= self._need_at_horizon(state)
        self.slots -= 1
        self._look = None
        return True

    @property
    def free_at_horizon(self) -> float:
        """Blocks free after `settle` steps; never more than now."""
        if self._cached_at_horizon is None:
            running = self.view.running
            done: list[int] = running.held[running.remaining_tokens() <= self._settle].tolist()
            # Shared blocks are in no request's `held`, and stay in use.
            used = self.view.used - sum(done) + self._growth * (len(running) - len(done))
            used -= sum(map(self._held_at_horizon, self.preempt))
            self._cached_at_horizon = self.view.quota - used - sum(map(self._need_at_horizon, self.offer))
        return min(self._cached_at_horizon, self.free)

    def fits_for_horizon(self, state: RequestState) -> bool:
        """Whether no preemption is expected within `settle` steps of its start; or it runs alone."""
        if self._settle == 0 or self.is_idle:
            return True
        return self._need_at_horizon(state) <= self.free_at_horizon

    def many_fit_for_horizon(self, needs: Ints, to_come: Ints) -> Bools:
        """`fits_for_horizon` of many requests at once, bool [n].

        Args:
            needs: blocks needed now, int64 [n].
            to_come: expected remaining tokens, int64 [n].
        """
        if self._settle == 0 or self.is_idle:
            return np.full(len(needs), True)
        left = self.free_at_horizon
        return (needs + self._growth <= left) | ((to_come <= self._settle) & (left >= 0))

    def _held_at_horizon(self, state: RequestState) -> float:
        is_done = state.remaining() <= self._settle
        return 0.0 if is_done else state.held + self._growth

    def _need_at_horizon(self, state: RequestState) -> float:
        return 0.0 if state.remaining() <= self._settle else self.view.need(state) + self._growth

    def start_by_preempting(self, state: RequestState, size: float) -> bool:
        """Starts the request on the blocks of lower-ranked running requests, if those suffice.

        Only requests of a later lane or with a memory-time over weight above `size` are preempted. Returns
        whether it started.
        """
        need, gained, count, ranking = self.view.need(state), 0, 0, self._ranking()
        for index in reversed(ranking.order):
            if self.free + gained >= need or ranking.sizes[index] <= size:
                break
            gained += int(ranking.batch.held[index])
            count += 1
        if self.free + gained < need:
            return False
        for _ in range(count):
            self.preempt_last(state)
        return self.start(state)

    def start_in_slot(self, state: RequestState, size: float) -> bool:
        """Starts the request in the slot of the lowest-ranked running request of a smaller class weight.

        None of a memory-time over weight up to `size` is preempted; the tokens that it computes again take no
        slot from others, so they do not count. Returns whether the request starts, now or already.
        """
        if state.request.id in self._offered:
            return True
        ranking, need = self._ranking(), self.view.need(state)
        weights, held = ranking.batch.weight, ranking.batch.held
        may = (weights < state.weight) & (ranking.batch.memory_time() > size * weights)
        may &= need <= self.free + held
        for place in reversed(range(len(ranking.order))):
            if may[ranking.order[place]]:
                self._preempt(ranking.batch[ranking.order.pop(place)], state)
                return self.start(state)
        return False

    @property
    def is_idle(self) -> bool:
        """Whether no request runs on and none starts."""
        return not self.offer and len(self.preempt) == len(self.view.running)

    def start_if_fits_to_end(self, state: RequestState) -> bool:
        """Starts the request if it and all others fit until their predicted ends, or if it runs alone."""
        if self.slots <= 0 or self.free < self.view.need(state):
            return False
        return (self.is_idle or self._fits_to_end(state)) and self.start(state)

    def _fits_to_end(self, state: RequestState) -> bool:
        if self._look is None:
            batch = self.view.running.without(self.preempt)
            for offered in self.offer:
                batch.add(offered)
            self._look = LookAhead(lease_table(batch, self.view))
        footprint = footprint_of(state, self.view.block_tokens)
        return self._look.peak_with(footprint) <= self.view.quota * self.view.block_tokens
