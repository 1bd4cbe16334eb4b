"""Decides how long an embedding pass may occupy the device without breaking a decode deadline.

Each running request that can still meet its deadlines tolerates a gap between two engine steps: its time
left, divided by the steps until the deadline, so that lateness is recovered over the rest of the response and
not in one pause of the embeddings. Prefills of other requests take their usual share (`lost_share`) of the
time left. The gap is at most one TPOT objective, so that time gained earlier is not spent in one visible
pause; where no step reaches the objective, it is at most two steps (half of the engine's speed). The smallest
gap, less the engine's own step, is the slack.

A pass has a start cost. Where not even one input fits into the slack, a pass at every step would make all
running requests late for little embedding work. Such a pass may take the lead: the time by which every
request is ahead of its deadlines even if it produces as few tokens as is likely.

A request that misses its deadline in any case sets no limit. A request that must not pause has the objective
`gap`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from controlplane.core.clock import Duration
from controlplane.core.ports import PassLimit


@dataclass(frozen=True, slots=True)
class TokenDeadline:
    """Time left to a deadline, and the engine steps until it is met, at least one."""

    time_left: Duration
    steps: int


@dataclass(frozen=True, slots=True)
class Decoding:
    """Deadlines and TPOT objective of one running request.

    `deadlines` follow from its expected length, `sure_deadlines` from the fewest tokens it is likely to
    produce.
    """

    deadlines: tuple[TokenDeadline, ...]
    sure_deadlines: tuple[TokenDeadline, ...]
    tpot: Duration | None


def decode_slack(running: Iterable[Decoding], step: Duration, lost_share: float = 0.0) -> PassLimit | None:
    """Time for embeddings between two steps; None if no running request can still meet a deadline.

    Args:
        running: running requests.
        step: time of a step without embeddings.
        lost_share: share of the time that decoding loses to prefills and overlong passes.
    """
    slacks, leads = [], []
    for decoding in running:
        usable = 1.0 - lost_share
        gap = min((usable * each.time_left / each.steps for each in decoding.deadlines), default=0.0)
        if gap < step or not decoding.deadlines:
            continue
        if (tpot := decoding.tpot) is not None:
            # A TPOT that the engine misses even alone does not limit the pause.
            gap = min(gap, tpot if tpot >= step else 2 * step)
        slacks.append(gap - step)
        leads.append(min(usable * each.time_left - step * each.steps for each in decoding.sure_deadlines))
    if not slacks:
        return None
    slack = Duration(int(min(slacks)))
    return PassLimit(slack, Duration(max(slack, int(min(leads)))))
