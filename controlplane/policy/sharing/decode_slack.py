"""Decides how long an embedding batch may occupy the device without breaking a decode deadline.

Each running request that can still meet its deadlines tolerates a gap between two engine steps: its time
left, divided by the steps until the deadline, so that lateness is recovered over the rest of the response and
not in one pause of the embeddings. The gap is at most one TPOT objective, so that time gained earlier is not
spent in one visible pause; where no step reaches the objective, it is at most two steps (half of the engine's
speed). The smallest gap, less the engine's own step, is the slack. A request that misses its deadline in any
case is still paced by its TPOT, or by half of the engine's speed if that is slower, but no longer reduces the
slack to zero. Even without slack embeddings proceed one input at a time.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from controlplane.core.clock import Duration


@dataclass(frozen=True, slots=True)
class TokenDeadline:
    """Time left to a deadline, and the engine steps until it is met, at least one."""

    time_left: Duration
    steps: int


@dataclass(frozen=True, slots=True)
class Decoding:
    """Deadlines and TPOT objective of one running request."""

    deadlines: tuple[TokenDeadline, ...]
    tpot: Duration | None


def decode_slack(running: Iterable[Decoding], step: Duration) -> Duration | None:
    """Time for embeddings between two steps; None if no running request has a deadline."""
    gaps = [_max_step_gap(decoding, step) for decoding in running if decoding.deadlines]
    return Duration(max(0, min(gaps) - step)) if gaps else None


def _max_step_gap(decoding: Decoding, step: Duration) -> int:
    """Longest tolerated time from the start of one step to the start of the next."""
    gap = min(deadline.time_left // deadline.steps for deadline in decoding.deadlines)
    half_speed = 2 * step
    if gap < step:
        return max(decoding.tpot or 0, half_speed)
    if decoding.tpot is None:
        return gap
    # A TPOT that the engine misses even alone does not limit the pause.
    return min(gap, decoding.tpot if decoding.tpot >= step else half_speed)
