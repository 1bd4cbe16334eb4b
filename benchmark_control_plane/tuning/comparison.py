"""Compares two configurations on the same blocks: attainment, weighted by class, in points.

A point is one hundredth of the weighted requests. The difference of two configurations is taken block by
block, and its 95 % interval is that of a mean of so many differences (Student's t). That of a verdict counts
what the model of the machine leaves out, too.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import hypot, sqrt
from statistics import fmean, stdev

from scipy import stats

from benchmark_control_plane.decision_replay.replayed_requests import RequestResult
from benchmark_control_plane.tuning.blocks import Block

COST_PER_KEY = 0.1
"""Points that each changed key has to bring."""
MOST_LOST = 1.0
"""Points that a class may lose."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean of paired differences in points, and half of its 95 % interval; 0 blocks have no interval."""

    mean: float
    error: float

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        return self.mean - self.error


@dataclass(frozen=True, slots=True)
class ClassDifference:
    """Attainment of a class before and after, as shares of its `requests`."""

    name: str
    requests: int
    before: float
    after: float
    rejected_before: float
    rejected_after: float

    @property
    def lost(self) -> float:
        """Points that the class loses; negative if it gains."""
        return 100 * (self.before - self.after)

    @property
    def tolerance(self) -> float:
        """Points that it may lose: 1, or one request where that is more."""
        return max(MOST_LOST, 100 / self.requests) + 1e-9


@dataclass(frozen=True, slots=True)
class Comparison:
    """A configuration against the operator's.

    Attributes:
        before: points of the operator's configuration.
        gains: points gained in each block.
        classes: what changes for each class.
        changed: number of changed keys.
        self_check: as many points the replay and the log are apart under the log's configuration (95 %).
        device: as many points the gain is another one on a slower device.

    The last two are known of a verdict.
    """

    before: float
    gains: Sequence[float]
    classes: Sequence[ClassDifference]
    changed: int
    self_check: float = 0.0
    device: float = 0.0

    @property
    def sampling(self) -> Difference:
        """The mean gain, in points, with the part of its error that other blocks would show."""
        return difference(self.gains)

    @property
    def gain(self) -> Difference:
        """The mean gain, in points, with all parts of its error."""
        found = self.sampling
        return Difference(found.mean, hypot(found.error, self.self_check, self.device))

    @property
    def value(self) -> float:
        """What the search maximises: the gain less the cost of the keys and what classes lose too much."""
        excess = sum(max(0.0, each.lost - each.tolerance) for each in self.classes)
        return self.gain.mean - COST_PER_KEY * self.changed - excess

    @property
    def losers(self) -> list[ClassDifference]:
        """Classes that lose more than they may."""
        return [each for each in self.classes if each.lost > each.tolerance]

    @property
    def is_better(self) -> bool:
        """Whether the gain is more than its error, worth its keys, and no class pays for it."""
        worth = self.gain.low > 0 and self.gain.mean > COST_PER_KEY * self.changed
        return worth and not self.losers


def points(block: Block, results: Sequence[RequestResult], weights: Mapping[str, float]) -> float:
    """Attainment in a block, weighted by class, in points; 0 for a block without judged requests."""
    kept = total = 0.0
    for (name, _), numbers in block.groups.items():
        total += weights[name] * len(numbers)
        kept += weights[name] * sum(results[number].outcome == "met" for number in numbers)
    return 100 * kept / total if total else 0.0


def difference(values: Sequence[float]) -> Difference:
    """The mean of paired differences; of one alone the error is infinite."""
    if len(values) < 2:
        return Difference(fmean(values), float("inf"))
    spread = stats.t.ppf(0.975, len(values) - 1) * stdev(values) / sqrt(len(values))
    return Difference(fmean(values), float(spread))


def compare(
    blocks: Sequence[Block],
    before: Sequence[Sequence[RequestResult]],
    after: Sequence[Sequence[RequestResult]],
    weights: Mapping[str, float],
    *,
    changed: int,
) -> Comparison:
    """Compares the results of two configurations on `blocks`; `changed` is the number of changed keys."""
    points_before = [points(block, old, weights) for block, old in zip(blocks, before, strict=True)]
    points_after = [points(block, new, weights) for block, new in zip(blocks, after, strict=True)]
    gains = [new - old for old, new in zip(points_before, points_after, strict=True)]
    counts = {when: Counter[tuple[str, str]]() for when in ("before", "after")}
    requests = Counter[str]()
    for block, old, new in zip(blocks, before, after, strict=True):
        for (name, _), numbers in block.groups.items():
            requests[name] += len(numbers)
            for when, results in (("before", old), ("after", new)):
                counts[when].update((name, results[number].outcome) for number in numbers)

    def share(when: str, name: str, *outcomes: str) -> float:
        return sum(counts[when][name, outcome] for outcome in outcomes) / requests[name]

    lost = ("rejected", "evicted")
    classes = [
        ClassDifference(
            name,
            requests[name],
            share("before", name, "met"),
            share("after", name, "met"),
            share("before", name, *lost),
            share("after", name, *lost),
        )
        for name in sorted(requests)
    ]
    return Comparison(fmean(points_before), gains, classes, changed)
