"""How far a predicted share of requests may be off, part by part; each part is half of a 95 % interval.

Near 0 and 100 % the spread of a sample says too little: if none of 100 requests was late, up to 3.7 % of
others may be. So a share has the interval of Wilson (1927), and a difference of paired outcomes has those of
its gains and of its losses, combined as by Newcombe (1998).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, sqrt

import numpy as np

Z95 = 1.96
_PARTS = 10
# Student's t of that many parts, 95 %.
_T95 = 2.262


@dataclass(frozen=True, slots=True)
class ErrorParts:
    """The parts of the error of a predicted share of requests, as shares.

    Attributes:
        sampling: other requests of the same kind would change as much of the difference of the two replays.
        self_check: as far apart are the replay and the log under the log's own configuration.
        device: as much a device changes that is slower by the error of the self-check's times.
        lengths: as much another draw of the output lengths changes that the log does not have.
    """

    sampling: float
    self_check: float
    device: float
    lengths: float

    @property
    def total(self) -> float:
        """All parts together, as if independent of each other; at most 1."""
        return min(1.0, hypot(self.sampling, self.self_check, self.device, self.lengths))


def wilson_error(share: float, count: int) -> float:
    """From a share of `count` outcomes to the farther end of its interval; 1 without any outcome."""
    if not count:
        return 1.0
    square = Z95**2 / count
    center = (share + square / 2) / (1 + square)
    half = Z95 * sqrt(share * (1 - share) / count + square / (4 * count)) / (1 + square)
    return max(center + half - share, share - center + half)


def paired_error(gains: Sequence[int]) -> float:
    """Of the mean of paired differences of outcomes, each -1, 0 or 1."""
    count = len(gains)
    gained, lost = (sum(gain == sign for gain in gains) for sign in (1, -1))
    return hypot(*(wilson_error(found / max(1, count), count) for found in (gained, lost)))


def sampling_error(gains: Sequence[int]) -> float:
    """Of the mean of differences in order of time, which may change together: by the parts of the log too."""
    alone = paired_error(gains)
    if len(gains) < _PARTS:
        return alone
    means = [float(np.mean(part)) for part in np.array_split(np.asarray(gains, dtype=float), _PARTS)]
    return max(alone, _T95 * float(np.std(means, ddof=1)) / sqrt(_PARTS))


def draw_error(gains: Sequence[int]) -> float:
    """Of one random draw, by the paired differences of the outcomes under another one."""
    if not gains:
        return 0.0
    net, changed = abs(sum(gains)), sum(map(abs, gains))
    return Z95 / sqrt(2) * max(net, sqrt(changed)) / len(gains)
