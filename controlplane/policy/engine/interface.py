"""What may a policy see before one engine step, and what may it answer?

The host tells an `EnginePolicy` who begins to wait and who stops waiting; before every step it asks
for a plan. Memory is counted in blocks. A policy never refuses: whatever waits was accepted. What it
does not offer waits on; the engine admits of the offer, in order, as long as blocks and batch suffice.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from controlplane.core.clock import Instant
from controlplane.core.view import Pace
from controlplane.policy.engine.column_store import Ints
from controlplane.policy.engine.request_state import RequestState
from controlplane.policy.engine.running_batch import RunningBatch

RANKED = 32
"""So many are ranked for the host, or all: beyond the plan no more give way in one step."""


@dataclass(frozen=True, slots=True)
class EngineView:
    """`quota` blocks may be used, `used` are. `growth` is what the running requests need for this step
    if nobody leaves; each knows what it has. `free_slots` more requests may run. Unless `has_packed`,
    nobody's `per_block` differs from `block_tokens`."""

    now: Instant
    pace: Pace
    block_tokens: int
    quota: int
    used: int
    growth: int
    free_slots: int
    running: RunningBatch
    has_packed: bool = True

    @property
    def free(self) -> int:
        """Blocks left after this step's growth; negative if somebody must go."""
        return self.quota - self.used - self.growth

    @property
    def prefill_cost(self) -> float:
        """Token-steps that pass in a full memory while one token of a prompt is read. 0 while not known."""
        step = self.pace.step
        return self.quota * self.block_tokens * self.pace.per_prompt_token / step if step > 0 else 0.0

    def without(self, gone: Sequence[RequestState]) -> "EngineView":
        """Had these left. What they would have grown by in this step stays counted."""
        if not gone:
            return self
        return replace(
            self,
            used=self.used - sum(state.held for state in gone),
            free_slots=self.free_slots + len(gone),
            running=self.running.without(gone),
        )

    def per_block(self, states: Iterable[RequestState]) -> Ints | int:
        """Tokens that a block holds of each; one number where it is the same of all."""
        if not self.has_packed:
            return self.block_tokens
        return np.array([state.per_block or self.block_tokens for state in states], np.int64)

    def need(self, state: RequestState) -> int:
        """Blocks that it takes to compute its next token."""
        return state.tokens // (state.per_block or self.block_tokens) + 1


@dataclass(slots=True)
class StepPlan:
    """`preempt` leave before the step, `offer` may start in it, in order. `ranked` are those that run on, the
    first to give way last: what the host does if memory runs short after all. Only the last `RANKED` of
    them need be there, and nobody where memory suffices."""

    preempt: list[RequestState] = field(default_factory=list)
    offer: list[RequestState] = field(default_factory=list)
    ranked: list[RequestState] = field(default_factory=list)


class EnginePolicy(Protocol):
    def enqueue(self, state: RequestState, now: Instant) -> None:
        """It waits from now on: new, or preempted."""

    def dequeue(self, state: RequestState) -> None:
        """It waits no more: started, finished or gone. Called once for each `enqueue`."""

    def waiting(self) -> int: ...

    def plan(self, view: EngineView) -> StepPlan: ...
