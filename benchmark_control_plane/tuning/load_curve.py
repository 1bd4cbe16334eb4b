"""Attainment over load: held-out blocks whose requests arrive closer together or further apart.

The arrivals of a block are moved as if the same requests came in so many times the rate of the log. Sizes,
classes and objectives stay, and so do the requests that are in the system when a block begins.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmark_control_plane.tuning.evaluation import LOAD, Sections
from benchmark_control_plane.tuning.paired_blocks import PairedBlocks
from benchmark_control_plane.tuning.search_space import Changes
from benchmark_control_plane.tuning.trial_search import Fits, affordable_blocks

LOADS = (0.7, 0.85, 1.0, 1.15, 1.3)
"""Multiples of the log's load."""


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """Points of the operator's configuration and of the tuned one at a multiple of the log's load.

    `error` is half of the 95 % interval of their difference over `blocks` blocks.
    """

    load: float
    blocks: int
    before: float
    after: float
    error: float


def load_curve(paired: PairedBlocks, changes: Changes, *, fits: Fits) -> Sequence[LoadPoint]:
    """The points at `LOADS`, on as many blocks of the first two rungs as fit; none if not even 3 do.

    Raises TimeIsOver.
    """
    if not (count := affordable_blocks(paired, curve_replays(1), fits)):
        return []
    found = []
    for load in LOADS:
        (comparison,) = replace(paired, served=_Served(paired, load)).compare([changes], count)
        if comparison is not None:
            gain = comparison.gain
            before = comparison.before
            found.append(LoadPoint(load, count, before, before + gain.mean, gain.error))
    return found


def curve_replays(blocks: int) -> int:
    """The replays that the curve takes: those at the log's load are known from the verdict."""
    return 2 * (len(LOADS) - 1) * blocks


@dataclass(frozen=True, slots=True)
class _Served:
    """The sections of a configuration at a multiple of the log's load."""

    paired: PairedBlocks
    load: float

    def __call__(self, content: Mapping[str, Any]) -> Sections:
        found = self.paired.served(content)
        return found if self.load == 1 else {**found, LOAD: self.load}
