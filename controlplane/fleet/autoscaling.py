"""Decides how many boxes a kind should have, by the utilisation predicted for when a new box would serve.

The load is the sum of the boxes' utilisations (`use` in their reports), in boxes. Its recent mean and its
slope predict it one start time ahead, and the target is the predicted load over the utilisation aimed at. It
is raised at once. It is lowered by one box at a time, only if no prediction of a while asked for more, and
not while a box starts: the host lets the requests of a removed box end.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, sqrt

_MOST_USE = 2.0
"""Utilisation counted of one box. An overloaded box may state any multiple of an objective, but what it
rejects is not known; so a fleet may triple in one step and no more."""
_CLEAR = 3.0
"""Standard errors that a slope must have, so that noise is no growth."""
_OBSERVATIONS = 60
"""Observations of one start time; those of a faster host are left out, because they repeat each other."""
_LEVEL = 10
_LEAST = 5
# Sums of utilisations are floating-point numbers.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """Parameters of a kind of box.

    Attributes:
        min_boxes: the fewest boxes, at least 1.
        max_boxes: the most boxes.
        start: seconds from the start of a box until it serves.
        utilisation: mean utilisation aimed at, above 0 and at most 1.
        lower_after: seconds for which fewer boxes must have been enough.
    """

    min_boxes: int
    max_boxes: int
    start: float
    utilisation: float
    lower_after: float


class BoxScaler:
    """The rule with the observations of one kind of box."""

    def __init__(self, rule: ScalingRule) -> None:
        self.rule = rule
        # (seconds, load), of one start time: a forecast reaches as far ahead as it looks back.
        self._loads: deque[tuple[float, float]] = deque(maxlen=_OBSERVATIONS)
        # (seconds, boxes) of the time before a box may be removed; numbers fall, so the first is the most.
        self._wanted: deque[tuple[float, int]] = deque()
        self._began: float | None = None
        self._changed_at = -inf

    def target(self, utilisations: Sequence[float], running: int, target: int, now: float) -> int:
        """The number of boxes to have.

        Args:
            utilisations: of the boxes that reported lately. One that did not gets no requests from routers.
            running: boxes that run.
            target: the number that the host works towards.
            now: seconds on a monotonic clock.
        """
        rule = self.rule
        present = min(max(target, rule.min_boxes), rule.max_boxes)
        if not utilisations:
            # Neither the loss of all reports nor a start says anything of the load.
            return present
        if self._began is None:
            self._began = now
        self._observe(sum(min(each, _MOST_USE) for each in utilisations), now)
        needed = ceil(self.predicted_load() / rule.utilisation - _ROUNDING)
        wanted = min(max(needed, rule.min_boxes), rule.max_boxes)
        most = self._most_wanted(wanted, now)
        if wanted > present:
            self._changed_at = now
            return wanted
        has_settled = running == present and now - self._changed_at >= rule.start
        if most < present and has_settled and now - self._began >= rule.lower_after:
            self._changed_at = now
            return present - 1
        return present

    def predicted_load(self) -> float:
        """The load in boxes, one start time after the last observation.

        The slope is the smaller one of the two halves of the last start time, so that a step is no growth.
        """
        observed = list(self._loads)
        middle, level = len(observed) // 2, observed[-_LEVEL:]
        slope = min(_clear_slope(observed[:middle]), _clear_slope(observed[middle:]))
        return sum(load for _, load in level) / len(level) + slope * self.rule.start

    def _observe(self, load: float, now: float) -> None:
        if self._loads and now - self._loads[-1][0] < self.rule.start / _OBSERVATIONS - _ROUNDING:
            return
        self._loads.append((now, load))
        while self._loads[0][0] < now - self.rule.start:
            self._loads.popleft()

    def _most_wanted(self, wanted: int, now: float) -> int:
        """The most boxes that were wanted in the time before a box may be removed."""
        while self._wanted and self._wanted[-1][1] <= wanted:
            self._wanted.pop()
        self._wanted.append((now, wanted))
        while self._wanted[0][0] < now - self.rule.lower_after:
            self._wanted.popleft()
        return self._wanted[0][1]


def _clear_slope(found: Sequence[tuple[float, float]]) -> float:
    """Slope of the line of least squares; 0 unless it rises and exceeds its standard error clearly."""
    count = len(found)
    if count < _LEAST:
        return 0.0
    mean_at, mean_load = (sum(each) / count for each in zip(*found, strict=True))
    spread = sum((at - mean_at) ** 2 for at, _ in found)
    if spread == 0:
        return 0.0
    slope = sum((at - mean_at) * (load - mean_load) for at, load in found) / spread
    squares = sum((load - mean_load - slope * (at - mean_at)) ** 2 for at, load in found)
    error = sqrt(squares / (count - 2) / spread)
    return slope if slope > _CLEAR * error else 0.0
