"""Plans exact start steps of a few waiting requests in order, and improves the order by local changes.

Every request starts at the earliest step, not before its predecessor, from which it fits until its end. Any
schedule is such a plan of its own order of starts, so the restriction loses nothing. A change of the order is
planned from the first position that it touches, and dropped once it cannot be better.
"""

from dataclasses import dataclass
from operator import add

_SLICE_COST = 20
"""Fixed cost of reading one slice, in list entries."""


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """Prompt cells, and steps in the batch."""

    prompt: int
    steps: int


class ExactPlan:
    """The plan of one order; steps count from now.

    `levels` is `Horizon.levels`, `budget` the cells that may be used.
    """

    def __init__(self, levels: list[int], jobs: list[PlannedJob], budget: int) -> None:
        self._jobs = jobs
        self._budget = budget
        self.order = list(range(len(jobs)))
        self._levels = [levels]
        self._starts: list[int] = []
        self._plan_from(self.order, 0, None)

    def starting_now(self) -> int:
        """Number of requests that start in this step: a prefix of the order, as starts never decrease."""
        return sum(start == 0 for start in self._starts)

    def swap(self, left: int, right: int) -> int:
        """Swaps two positions if the sum of starts does not rise. Returns the work in list entries."""
        order = self.order.copy()
        order[left], order[right] = order[right], order[left]
        return self._plan_from(order, min(left, right), sum(self._starts))

    def move(self, source: int, target: int) -> int:
        """Moves the request at `source` to `target` if the sum of starts does not rise. Returns the work."""
        order = self.order.copy()
        order.insert(target, order.pop(source))
        return self._plan_from(order, min(source, target), sum(self._starts))

    def _plan_from(self, order: list[int], first: int, limit: int | None) -> int:
        """Plans `order` from position `first` on; keeps it unless the sum of starts exceeds `limit`."""
        starts = self._starts[:first]
        at = starts[-1] if starts else 0
        total = sum(starts)
        levels = self._levels[first]
        changed: list[list[int]] = []
        work = 0
        for position in range(first, len(order)):
            job = self._jobs[order[position]]
            at, slices = self._earliest(levels, job, at)
            work += (slices + 1) * (job.steps + _SLICE_COST)
            total += at
            if limit is not None and total + at * (len(order) - position - 1) > limit:
                return work
            starts.append(at)
            levels = levels.copy()
            end = at + job.steps
            if end > len(levels):
                levels.extend(range(len(levels), end))
            levels[at:end] = map(add, levels[at:end], range(job.prompt + 1, job.prompt + job.steps + 1))
            changed.append(levels)
        self.order = order
        self._starts = starts
        self._levels[first + 1 :] = changed
        return work

    def _earliest(self, levels: list[int], job: PlannedJob, at: int) -> tuple[int, int]:
        """The first step from `at` on at which the job fits, and how many slices were read."""
        cap = self._budget - job.prompt - 1
        slices = 1
        while window := levels[at : at + job.steps]:
            top = max(window)
            if top <= cap + at:
                break
            # Start later until it fits at the fullest step, or start after that step.
            at = min(top - cap, at + window.index(top) + 1)
            slices += 1
        return at, slices
