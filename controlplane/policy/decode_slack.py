"""How long may an embedding batch keep the device from the LLM?

Rule: for each running request, until its next token is due, but never longer than one TPOT objective,
so that time gained earlier is not spent in one visible pause; the engine's own step comes off. The least
over all requests; `None` when none has an objective to miss. A request that is late already leaves no
slack, and then embeddings go on one input at a time: they are never stopped.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from controlplane.core.clock import Duration


@dataclass(frozen=True, slots=True)
class Decoding:
    """`slack` is the time left to the next token's deadline (None: it has none)."""

    slack: Duration | None
    tpot: Duration | None


def decode_slack(running: Iterable[Decoding], step: Duration) -> Duration | None:
    gaps = [
        min(d for d in (one.slack, one.tpot) if d is not None) for one in running if one.slack is not None
    ]
    return Duration(max(0, min(gaps) - step)) if gaps else None
