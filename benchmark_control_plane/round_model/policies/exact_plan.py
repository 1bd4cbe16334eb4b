"""When would each of a few waiting requests start, in a given order? Exact under the predictions.

Every request starts at the earliest step, not before its predecessor, at which it fits until its end.
Any schedule is such a plan of its own order of starts, so nothing is lost by it. Changes of the order
are tried from the first place they touch, and given up once they cannot be better.
"""

from dataclasses import dataclass
from operator import add

_PROBE = 20
"""Fixed cost of looking at a slice once, in list entries."""


@dataclass(frozen=True, slots=True)
class PlannedJob:
    prompt: int
    steps: int


class ExactPlan:
    """`levels` is `Horizon.levels`; steps count from now."""

    def __init__(self, levels: list[int], stays: list[PlannedJob], budget: int) -> None:
        self._stays = stays
        self._budget = budget
        self.order = list(range(len(stays)))
        self._levels = [levels]
        self._starts: list[int] = []
        self._try(self.order, 0, None)

    def starting_now(self) -> int:
        """How many of the order start in this step: a prefix, as starts never fall."""
        return sum(start == 0 for start in self._starts)

    def swap(self, one: int, other: int) -> int:
        """Keeps the change if the sum of starts does not rise; returns the work done."""
        order = self.order.copy()
        order[one], order[other] = order[other], order[one]
        return self._try(order, min(one, other), sum(self._starts))

    def move(self, source: int, target: int) -> int:
        """Like `swap`: `source` is taken out and put in at `target`."""
        order = self.order.copy()
        order.insert(target, order.pop(source))
        return self._try(order, min(source, target), sum(self._starts))

    def _try(self, order: list[int], first: int, limit: int | None) -> int:
        """Plans `order` from place `first` on, the places before being as they are."""
        starts = self._starts[:first]
        at = starts[-1] if starts else 0
        total = sum(starts)
        levels = self._levels[first]
        changed: list[list[int]] = []
        work = 0
        for place in range(first, len(order)):
            stay = self._stays[order[place]]
            at, probes = self._earliest(levels, stay, at)
            work += (probes + 1) * (stay.steps + _PROBE)
            total += at
            if limit is not None and total + at * (len(order) - place - 1) > limit:
                return work
            starts.append(at)
            levels = levels.copy()
            end = at + stay.steps
            if end > len(levels):
                levels.extend(range(len(levels), end))
            levels[at:end] = map(add, levels[at:end], range(stay.prompt + 1, stay.prompt + stay.steps + 1))
            changed.append(levels)
        self.order = order
        self._starts = starts
        self._levels[first + 1 :] = changed
        return work

    def _earliest(self, levels: list[int], stay: PlannedJob, at: int) -> tuple[int, int]:
        """The first step from `at` on at which it fits, and how many slices were looked at."""
        cap = self._budget - stay.prompt - 1
        probes = 1
        while window := levels[at : at + stay.steps]:
            top = max(window)
            if top <= cap + at:
                break
            # Fewer steps beside the fullest one until it fits, or none: joining after it.
            at = min(top - cap, at + window.index(top) + 1)
            probes += 1
        return at, probes
