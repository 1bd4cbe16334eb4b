"""Simulated scheduler that hosts an engine policy, as `backends.vllm.scheduler` does inside vLLM.

Before each step the policy chooses the requests to preempt and those that may start; then the step is
composed as by vLLM's own scheduler, but only offered requests start. If blocks still run out, the request
with the largest rank is preempted. Blocks beyond the use ceiling are withheld as far as they are free
(`backends.vllm.plugin.balloon`). Shared blocks are tracked by the plug-in's own code
(`backends.vllm.plugin.prefix_sharing`). Scheduling is synchronous: a step is planned when the previous one
ended.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import numpy as np

from backends.cost_models.step_time import StepLoad
from backends.simulated.continuous_batching import RankedScheduler, SimulatedSequence
from backends.simulated.prefix_cache import CachedBlock
from backends.vllm.plugin.preemption_log import KEPT
from backends.vllm.plugin.prefix_sharing import PrefixSharing
from controlplane.core.clock import NO_TIME, Duration, Instant
from controlplane.core.engine_reports import EnginePreemption
from controlplane.core.forecast import LengthForecast
from controlplane.core.pool_view import UNKNOWN_PACE
from controlplane.policy.engine.decode_pacing import next_step_start
from controlplane.policy.engine.interface import RANKED, EngineView
from controlplane.policy.engine.options import EngineOptions
from controlplane.policy.engine.request_state import RequestState
from controlplane.policy.engine.running_batch import RunningBatch
from controlplane.policy.registry import engine_policy
from predictors.timing.online_step_time import ObservedPace, StepWork


@dataclass(eq=False, slots=True)
class PolicySequence(SimulatedSequence):
    """A sequence with the policy's state of it; the properties are those of vLLM's `Request`."""

    skip_reading_prefix_cache: ClassVar[bool] = False
    state: RequestState = field(init=False)

    @property
    def tandem(self) -> RequestState:
        """The policy's state."""
        return self.state

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return self.state.request.id

    @property
    def sender_id(self) -> str:
        """Id of the request at its sender, which all its samples have."""
        return self.state.request.id

    @property
    def num_tokens(self) -> int:
        """Known tokens."""
        return self.total

    @property
    def block_hashes(self) -> list[int]:
        """Hashes of the full blocks."""
        return self.hashes


P = TypeVar("P", bound=PolicySequence)


class PolicyScheduler(RankedScheduler[P]):
    """Scheduler that applies the plans of an engine policy; the caller calls `arrange` before `plan`.

    Attributes:
        quota: blocks up to which sequences start.
        use_ceiling: blocks up to which running sequences grow.
        ceded: blocks that are neither held nor written by the step in flight, beyond quota and use.
        pace_estimator: model of the step time, fed by the steps.
        preempted: the last preemptions, the oldest first.
    """

    def __init__(
        self, options: EngineOptions, *, blocks: int, block_tokens: int, max_running: int, step_tokens: int
    ) -> None:
        super().__init__(
            blocks=blocks,
            block_tokens=block_tokens,
            max_running=max_running,
            step_tokens=step_tokens,
            reserves_prompts=True,
        )
        self.options = options
        self.quota = self.use_ceiling = blocks
        self.ceded = 0
        self.pace_estimator = ObservedPace()
        self.preempted: tuple[EnginePreemption, ...] = ()
        self._policy = engine_policy(options)
        self._withheld = 0
        self._previous_used = 0
        self._batch_view = RunningBatch()
        self._blocks_of: dict[str, list[CachedBlock]] = {}
        self._sharing = PrefixSharing(self._cache, self._blocks_of, block_tokens)
        # After a running sequence took blocks or a shared block changed hands, until `held` follows.
        self._is_stale = False
        self._of: dict[RequestState, P] = {}
        self._arrived: list[P] = []
        self._queued: dict[RequestState, P] = {}
        self._ranked: list[P] = []
        self._work: StepWork | None = None
        self._previous_schedule: Instant | None = None

    @property
    def waiting_count(self) -> int:
        """Number of waiting sequences."""
        return len(self._queued) + len(self._arrived)

    @property
    def used_blocks(self) -> int:
        """Blocks that sequences hold."""
        return self.total_blocks - self._withheld - self.free_blocks

    # --- one step ----------------------------------------------------------------------------

    def observe_step(self, now: Instant, *, is_alone: bool, waited: Duration = NO_TIME) -> None:
        """Learns from the step that ended `waited` before `now`; `is_alone` if no embedding pass ran."""
        if self._previous_schedule is not None and self._work is not None and self.running:
            took = Duration(now - self._previous_schedule - waited)
            self.pace_estimator.observe_work(self._work, took, is_alone=is_alone)

    def paced_start(self, now: Instant) -> Instant:
        """Earliest start of the next step while an embedding pass is under way; at once if requests wait."""
        if self._previous_schedule is None or self._work is None or not self.running or self.waiting_count:
            return now
        self._stamp(now)
        return next_step_start(
            self._batch_view,
            self._previous_schedule,
            now,
            self.options.decode_pacing,
            free_share=max(0.0, 1.0 - self.used_blocks / self.quota),
            longest_step=self.pace_estimator.longest_step,
            step=(self.pace_estimator.pace or UNKNOWN_PACE).step,
        )

    def arrange(self, now: Instant) -> None:
        """Applies the policy's plan for the next step."""
        self._previous_schedule = now
        for sequence in self._arrived:
            self._of[sequence.state] = sequence
            self._enqueue(sequence)
        self._arrived.clear()
        self._stamp(now)
        self._withhold_beyond_ceiling()
        self._sharing.waiting.refresh()
        view = self._view(now)
        plan = self._policy.plan(view)
        for victim, beneficiary in plan.preemptions():
            self.preempt(self._of[victim], None if beneficiary is None else self._of[beneficiary])
        if plan.preempt:
            self._withhold_beyond_ceiling()
        if plan.ranked:
            self._rank([self._of[state] for state in plan.ranked[-RANKED:]])
        self.waiting = deque(self._of[state] for state in view.admitted(plan))

    def plan(self, load: StepLoad) -> bool:
        """Composes the next step and adds it to `load`; False if there is nothing to compute."""
        has_work = super().plan(load)
        started = self.running[len(self._batch_view) :]
        for sequence in started:
            # The policy finds a request in its queue by its size, so it leaves before it grows.
            self._dequeue(sequence.state)
        for sequence in started:
            self._join(sequence)
        if self._is_stale:
            self._hold()
        self._sharing.waiting.recheck(self.waiting)
        self.waiting.clear()
        self._work = None
        if has_work:
            tokens, count = sum(self._chunks), len(self._batch)
            self._work = StepWork(tokens - count, count, self.used_blocks * self.block_tokens)
        self._publish()
        return has_work

    def _join(self, sequence: P) -> None:
        state, batch = sequence.state, self._batch_view
        state.held = sequence.blocks
        self._blocks_of[sequence.request_id] = sequence.full
        self._sharing.start(sequence, state, lambda: batch.requests(range(len(batch))))
        batch.add(state)

    def _hold(self) -> None:
        """Updates what preempting each running request frees: its blocks that no other request uses."""
        held = [sequence.blocks for sequence in self.running]
        if self._sharing:
            held = [blocks - one.state.shared for blocks, one in zip(held, self.running, strict=True)]
        self._batch_view.held[:] = held
        self._is_stale = False

    def complete(self) -> list[P]:
        """Ends the planned step and returns the sequences that got a token."""
        emitted = super().complete()
        if ended := [sequence for sequence in emitted if sequence.is_removed]:
            self._leave(ended)
            for sequence in ended:
                del self._of[sequence.state]
        return emitted

    def sync_idle(self) -> None:
        """Applies the quota; call only while no step is in flight."""
        self._withhold_beyond_ceiling()
        self._previous_used = self.used_blocks
        self._publish()

    def _publish(self) -> None:
        used = self.used_blocks
        # A step in flight may still write to blocks that its requests have just freed.
        self.ceded = self.total_blocks - max(self.use_ceiling, used, self._previous_used)
        self._previous_used = used

    def _stamp(self, now: Instant) -> None:
        """Records the tokens generated since the previous step."""
        if self.running:
            tokens = np.array([sequence.total for sequence in self.running], np.int64)
            self._batch_view.stamp(tokens, now)

    def _view(self, now: Instant) -> EngineView:
        if self._is_stale:
            self._hold()
        return EngineView(
            now=now,
            pace=self.pace_estimator.pace or UNKNOWN_PACE,
            block_tokens=self.block_tokens,
            quota=self.quota,
            used=self.used_blocks,
            growth=self._growth(),
            free_slots=self.max_running - len(self.running),
            running=self._batch_view,
            has_packed=False,
            has_shared=bool(self._sharing),
            use_ceiling=self.use_ceiling,
        )

    def _growth(self) -> int:
        """Blocks that the running sequences need for this step."""
        block, most, growth = self.block_tokens, self.step_tokens, 0
        for sequence in self.running:
            tokens, limit = sequence.total, sequence.computed + most
            growth += -(-(limit if limit < tokens else tokens) // block) - sequence.blocks
        return growth

    # --- memory ------------------------------------------------------------------------------

    def set_quota(self, blocks: int, use_ceiling: int) -> None:
        """Sets quota and use ceiling, from the next step on."""
        self.quota, self.use_ceiling = blocks, use_ceiling

    def _withhold_beyond_ceiling(self) -> None:
        missing = self.total_blocks - self.use_ceiling - self._withheld
        if taken := missing if missing < 0 else min(missing, self.free_blocks):
            self._withheld += taken
            self._take(taken)

    def _take(self, blocks: int) -> None:
        super()._take(blocks)
        self._is_stale = True

    def _rank(self, order: list[P]) -> None:
        for sequence in self._ranked:
            sequence.rank = 0
        for at, sequence in enumerate(order, start=1):
            sequence.rank = at
        self._ranked = order

    def preempt(self, victim: P, beneficiary: P | None = None) -> None:
        """Frees the blocks of `victim`, which waits again; None: running sequences need them."""
        victim.state.preemptions += 1
        self._leave([victim])
        before = self.recompute_tokens
        super().preempt(victim)
        at, tokens = self._previous_schedule or Instant(0), self.recompute_tokens - before
        name = None if beneficiary is None else beneficiary.sender_id
        lost = EnginePreemption(at, victim.sender_id, name, tokens)
        self.preempted = (*self.preempted[1 - KEPT :], lost)

    # --- requests ----------------------------------------------------------------------------

    def add(self, sequence: P) -> None:
        """Adds a new sequence; the policy sees it before the next step."""
        self._arrived.append(sequence)

    def _requeue(self, sequence: P) -> None:
        self._enqueue(sequence)

    def _enqueue(self, sequence: P) -> None:
        self._queued[sequence.state] = sequence
        self._sharing.waiting.enqueue(sequence)
        self._policy.enqueue(sequence.state)

    def _dequeue(self, state: RequestState) -> None:
        sequence = self._queued.pop(state)
        self._policy.dequeue(state)
        self._sharing.waiting.dequeue(sequence)

    def _leave(self, sequences: Iterable[P]) -> None:
        """Removes sequences that no longer run from the policy's view."""
        states = [sequence.state for sequence in sequences]
        for at in reversed(self._batch_view.places(states)):
            self._batch_view.pop(at)
        for sequence in sequences:
            self._is_stale |= bool(self._sharing)
            self._sharing.leave(sequence, sequence.state)
            del self._blocks_of[sequence.request_id]

    def remove(self, sequence: P) -> None:
        """Removes a sequence; a step in flight produces no token for it."""
        state = sequence.state
        if sequence in self._arrived:
            self._arrived.remove(sequence)
        elif state in self._queued:
            self._dequeue(state)
        else:
            self._leave([sequence])
        self._of.pop(state, None)
        super().remove(sequence)

    # --- control -----------------------------------------------------------------------------

    def set_options(self, changes: Mapping[str, Any]) -> None:
        """Builds a new policy and moves the waiting requests to it. Raises ValueError."""
        options = self.options.changed(changes)
        self._policy, self.options = engine_policy(options), options
        for state in self._queued:
            self._policy.enqueue(state)

    def set_forecast(self, sequence: P, forecast: LengthForecast) -> None:
        """Replaces the forecast of a sequence."""
        state, is_queued = sequence.state, sequence.state in self._queued
        if is_queued:
            self._policy.dequeue(state)
        state.set_forecast(forecast)
        if is_queued:
            self._policy.enqueue(state)
        elif sequence.blocks:
            self._batch_view.set_forecast(state)
