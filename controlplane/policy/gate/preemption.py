"""Chooses running requests of lower priority whose memory makes room for others.

The lowest priority goes first; within a priority the slot `victims` ranks, by default those that started last
first: they lose the least work, and those that started early finish and free their memory. Requests that turn
out not to be needed are kept running. Nothing is preempted unless the victims suffice.
"""

from collections.abc import Callable, Iterable, Sequence
from math import inf

from controlplane.core.decision import Victim
from controlplane.core.pool_view import Running

VictimRank = Callable[[Running], float]
"""Rank of a running request within its priority; the smallest is preempted first."""


def latest_started(running: Running) -> float:
    """Ranks by the first token, the latest first, and those without one before all others."""
    first_token = running.progress.first_token
    return -inf if first_token is None else -float(first_token)


def in_preemption_order(running: Iterable[Running], rank: VictimRank) -> list[Running]:
    """The requests by priority, then by `rank`, then by id; the first is preempted first."""
    return sorted(running, key=lambda r: (r.priority, rank(r), r.request_id))


def choose_victims(
    running: Sequence[Running], *, needed_bytes: int, incoming_priority: int, rank: VictimRank
) -> tuple[Victim, ...]:
    """The first requests below `incoming_priority`, in order of preemption, that free `needed_bytes`.

    Those whose bytes the others cover are left out. Empty if nothing is needed or if all do not suffice.
    """
    allowed = [r for r in running if r.priority < incoming_priority and r.freed_bytes > 0]
    chosen: list[Running] = []
    short = needed_bytes
    for candidate in in_preemption_order(allowed, rank):
        if short <= 0:
            break
        chosen.append(candidate)
        short -= candidate.freed_bytes
    if short > 0:
        return ()
    for victim in chosen[::-1]:
        if short + victim.freed_bytes <= 0:
            chosen.remove(victim)
            short += victim.freed_bytes
    return tuple(Victim(victim.request_id, victim.freed_bytes) for victim in chosen)
