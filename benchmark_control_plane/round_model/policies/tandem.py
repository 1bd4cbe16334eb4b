"""The `tandem` policy: smallest memory volume first, improved by a local search with bounded work per step.

A request occupies prompt + k cells in its k-th step: its volume over o steps is `s * o + o * (o + 1) / 2`
cell-steps. Serving small volumes first is Smith's rule for a shared memory; it leaves memory unused that a
better packing would fill. So in every step the first few requests of the order are planned exactly
(`exact_plan.py`), swaps and insertions that do not raise the sum of planned starts are kept, and the order
persists from step to step. Requests planned for the current step start. Nothing depends on the clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from benchmark_control_plane.round_model.policies.clearing_policy import HorizonPolicy
from benchmark_control_plane.round_model.policies.exact_plan import ExactPlan, PlannedJob
from benchmark_control_plane.round_model.policies.overflow import OverflowClearing
from benchmark_control_plane.round_model.policies.step_policy import Candidate, StepOptions

_MODULUS = 1 << 31


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """Search limits per step: `window` requests planned, `trials` changes, about `work` list entries."""

    window: int = 10
    trials: int = 40
    work: int = 30_000


@dataclass(frozen=True, slots=True)
class _QueuedJob:
    key: tuple[float, ...]
    candidate: Candidate
    job: PlannedJob


class TandemPolicy(HorizonPolicy):
    """Serves by memory volume and improves the head of the order by a bounded search."""

    def __init__(self, options: StepOptions, overflow: OverflowClearing, effort: SearchLimits) -> None:
        super().__init__(options, overflow)
        self._effort = effort
        self._new: list[_QueuedJob] = []
        self._order: list[_QueuedJob] = []
        self._state = 1

    def start(self, step: int) -> Sequence[Candidate]:
        self._horizon.advance(step)
        self._insert_new()
        started: list[Candidate] = []
        trials, work = self._effort.trials, self._effort.work
        while self._order:
            head = list(takewhile(self._is_planned, self._order[: self._effort.window]))
            if not head:
                if len(self._horizon) == 0:
                    started.append(self._order.pop(0).candidate)
                    self._begin(started[-1], step)
                break
            plan = ExactPlan(
                self._horizon.levels(step), [queued.job for queued in head], self._options.budget
            )
            trials, work = self._improve(plan, trials, work)
            head = [head[at] for at in plan.order]
            now = plan.starting_now()
            for queued in head[:now]:
                self._begin(queued.candidate, step)
                started.append(queued.candidate)
            self._order[: len(head)] = head[now:]
            if now < len(head):
                break
        return started

    def _wait(self, candidate: Candidate) -> None:
        stay = self._horizon.stay_steps(candidate)
        key = (self._weight(candidate.prompt, stay), candidate.arrival, candidate.id)
        self._new.append(_QueuedJob(key, candidate, PlannedJob(candidate.prompt, stay)))

    def _is_planned(self, queued: _QueuedJob) -> bool:
        """A request that exceeds the budget is not planned: at the head, it waits to run exclusively."""
        return not self._exceeds(queued.candidate)

    def _exceeds(self, candidate: Candidate) -> bool:
        return candidate.prompt + candidate.predicted > self._options.budget

    def _weight(self, prompt: int, stay: int) -> float:
        """Memory volume in cell-steps. Prefill delays all running requests, so it costs the whole budget."""
        prefill = prompt * self._options.prompt_steps * self._options.budget
        return prompt * stay + stay * (stay + 1) / 2 + prefill

    def _insert_new(self) -> None:
        """Inserts new requests in order of their keys, each behind the last one that it does not precede."""
        for new in sorted(self._new, key=lambda queued: queued.key):
            at = len(self._order)
            while at > 0 and self._order[at - 1].key > new.key:
                at -= 1
            self._order.insert(at, new)
        self._new.clear()

    def _begin(self, candidate: Candidate, step: int) -> None:
        self._horizon.add(candidate, step, exclusive=self._exceeds(candidate))
        self._overflow.joined(candidate, step)

    def _improve(self, plan: ExactPlan, trials: int, work: int) -> tuple[int, int]:
        """Tries changes of the plan; returns the trials and the work left."""
        count = len(plan.order)
        if count < 2:
            return trials, work
        while trials > 0 and work > 0:
            trials -= 1
            left = self._random() % count
            right = self._random() % count
            is_swap = self._random() % 2 == 0
            if left != right:
                work -= plan.swap(left, right) if is_swap else plan.move(left, right)
        return trials, work

    def _random(self) -> int:
        """The next number of a linear congruential generator, so plans repeat exactly in every process."""
        self._state = (self._state * 1_103_515_245 + 12_345) % _MODULUS
        return self._state >> 8
