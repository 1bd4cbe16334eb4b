"""How long may an embedding batch keep the device from the LLM?

Rule: each answer that can still keep its promises bears a gap between two steps of the engine: the time left,
spread over the steps until then, so that lateness is made good over the rest of the answer and not in one
pause of the embeddings; and never more than one TPOT objective, so that time gained earlier is not spent in
one visible pause (half of the engine's speed, where no step reaches the objective). The least gap counts,
less the engine's own step. An answer that is lost whatever the
embeddings do is still paced, by its objective, or by half of the engine's speed if that is slower: it no
longer holds them to nothing. `None` when nobody has a promise to miss. Even without slack embeddings go on
one input at a time: they are never stopped.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from controlplane.core.clock import Duration


@dataclass(frozen=True, slots=True)
class TokenDeadline:
    """One promise: the time left to its deadline, and the engine's steps until it is kept, at least one."""

    left: Duration
    steps: int


@dataclass(frozen=True, slots=True)
class Decoding:
    """What one answer has still to keep."""

    pledges: tuple[TokenDeadline, ...]
    tpot: Duration | None


def decode_slack(running: Iterable[Decoding], step: Duration) -> Duration | None:
    gaps = [_bearable(decoding, step) for decoding in running if decoding.pledges]
    return Duration(max(0, min(gaps) - step)) if gaps else None


def _bearable(decoding: Decoding, step: Duration) -> int:
    """From the start of one step to the start of the next."""
    gap = min(pledge.left // pledge.steps for pledge in decoding.pledges)
    half_speed = 2 * step
    if gap < step:
        return max(decoding.tpot or 0, half_speed)
    if decoding.tpot is None:
        return gap
    # An objective that the engine alone does not reach bounds no pause.
    return min(gap, decoding.tpot if decoding.tpot >= step else half_speed)
