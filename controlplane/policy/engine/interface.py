"""Interface of engine policies: the view before each engine step, and the plan that a policy returns.

The host calls `enqueue` and `dequeue` as requests start and stop waiting, and `plan` before every step.
Memory is counted in blocks. A policy never rejects, because every waiting request was accepted: a request
that is not offered keeps waiting. The engine admits the offered requests in order, while blocks and batch
suffice.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Protocol

import numpy as np

from controlplane.core.clock import Instant
from controlplane.core.pool_view import Pace
from controlplane.policy.engine.column_store import Ints
from controlplane.policy.engine.request_state import RequestState
from controlplane.policy.engine.running_batch import RunningBatch

RANKED = 32
"""Requests ranked for the host: at most so many are preempted in one step beyond the plan."""


@dataclass(frozen=True, slots=True)
class EngineView:
    """State of the engine before one step; memory in blocks.

    `quota` blocks are the engine's and `used` are in use. After the quota was lowered, requests that run may
    use up to `use_ceiling` until they end (None: the quota). `growth` is what the running requests need for
    this step if none is preempted; each has a `held` of its own: what preempting it frees. `free_slots` more
    requests may run. Unless `has_packed`, every request stores `block_tokens` tokens per block. Unless
    `has_shared`, no request uses, or would use, a block together with others; a shared block is part of
    `used` once.
    """

    now: Instant
    pace: Pace
    block_tokens: int
    quota: int
    used: int
    growth: int
    free_slots: int
    running: RunningBatch
    has_packed: bool = True
    has_shared: bool = True
    use_ceiling: int | None = None

    @property
    def ceiling(self) -> int:
        """Blocks that may be in use after this step: the quota, or present use if the running may keep it."""
        use_ceiling = self.quota if self.use_ceiling is None else self.use_ceiling
        return max(self.quota, min(self.used + self.growth, use_ceiling))

    @property
    def free(self) -> int:
        """Blocks with which requests may start; negative if requests must be preempted for this step.

        While use is above the quota this is zero: a request starts only in place of a preempted one.
        """
        return self.ceiling - self.used - self.growth

    @property
    def prefill_cost(self) -> float:
        """Token-steps that a full memory loses while one prompt token is prefilled; 0 while unknown."""
        step = self.pace.step
        return self.quota * self.block_tokens * self.pace.per_prompt_token / step if step > 0 else 0.0

    def without(self, gone: Sequence[RequestState]) -> "EngineView":
        """The view after these requests left; their growth in this step stays counted."""
        if not gone:
            return self
        return replace(
            self,
            used=self.used - sum(state.held for state in gone),
            free_slots=self.free_slots + len(gone),
            running=self.running.without(gone),
        )

    def admitted(self, plan: "StepPlan") -> list[RequestState]:
        """The requests of the plan's offer that may start.

        The engine enforces the use ceiling. While that is above the quota, these are the first for which the
        quota and the plan's victims have room.
        """
        if self.use_ceiling in (None, self.quota):
            return plan.offer
        room = self.free + sum(state.held for state in plan.preempt)
        for count, state in enumerate(plan.offer):
            room -= self.need(state)
            if room < 0:
                return plan.offer[:count]
        return plan.offer

    def block_tokens_of(self, states: Iterable[RequestState]) -> Ints | int:
        """Tokens per block of each request: int64 [n], or one int if all are equal."""
        if not self.has_packed:
            return self.block_tokens
        return np.array([state.block_tokens or self.block_tokens for state in states], np.int64)

    def need(self, state: RequestState) -> int:
        """Blocks that a waiting request takes from the free ones until its next token is computed."""
        return state.tokens // (state.block_tokens or self.block_tokens) + 1 - state.shared

    def needs(self, tokens: Ints, states: Iterable[RequestState]) -> Ints:
        """`need` of requests that have these tokens, both int64 [n]."""
        needs: Ints = tokens // self.block_tokens_of(states) + 1
        if self.has_shared:
            needs -= np.fromiter((state.shared for state in states), np.int64, len(needs))
        return needs


@dataclass(slots=True)
class StepPlan:
    """Decisions before one engine step.

    `preempt` leave before the step. `offer` may start in it, in this order. `ranked` are requests that run
    on, the first to be preempted last: what the host preempts if memory runs short after all. Only the last
    `RANKED` of them are required, and none where memory suffices. `beneficiaries` has for each of `preempt`,
    in the same order, the request that is to start in its place, for the operator; None or a shorter list
    where running requests need the blocks.
    """

    preempt: list[RequestState] = field(default_factory=list)
    offer: list[RequestState] = field(default_factory=list)
    ranked: list[RequestState] = field(default_factory=list)
    beneficiaries: list[RequestState | None] = field(default_factory=list)

    def preemptions(self) -> Iterator[tuple[RequestState, RequestState | None]]:
        """Each request to preempt, with its beneficiary."""
        return zip_longest(self.preempt, self.beneficiaries[: len(self.preempt)])


class EnginePolicy(Protocol):
    """Decides the order of waiting requests and the preemption of running ones inside the engine."""

    def enqueue(self, state: RequestState) -> None:
        """The request waits from now on: it is new, or was preempted."""

    def dequeue(self, state: RequestState) -> None:
        """The request no longer waits: it started, finished or was aborted. Called once per `enqueue`."""

    def waiting(self) -> int:
        """Number of waiting requests."""
        ...

    def plan(self, view: EngineView) -> StepPlan:
        """The plan of the next step. Called before every step, also if nothing waits."""
        ...
