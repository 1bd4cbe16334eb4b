"""Who gives way? The fewest, cheapest running requests of strictly lower priority that free enough.

The collocation proposal's Algorithm 3, corrected: urgency `1 / (max(slack, 0) + tau)` never turns
negative, so late high-priority requests are not the first to go; a request already past its deadline
costs only its recompute; candidates are ranked by cost *per byte freed*, pruned of victims that turn
out to be unneeded, and compared with the best single one. Nothing is evicted unless it suffices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from controlplane.core.clock import Duration, to_seconds
from controlplane.core.decision import PreemptionMode, Victim
from controlplane.core.view import Running


@dataclass(frozen=True, slots=True)
class EvictionOptions:
    """`tau` bounds the urgency of a request with no slack left; `almost_done_steps` protects requests
    about to free their memory anyway; each earlier preemption adds `thrash_penalty` times the cost."""

    tau: Duration
    almost_done_steps: int
    thrash_penalty: float


def victim_cost(running: Running, options: EvictionOptions) -> float:
    """Seconds of work lost, weighted by priority and urgency. Zero urgency when hopeless or unbound."""
    recompute = to_seconds(running.recompute)
    urgency = 0.0
    if running.slack is not None and running.slack >= 0:
        urgency = running.priority / to_seconds(Duration(running.slack + options.tau))
    return recompute * (1.0 + urgency) * (1.0 + options.thrash_penalty * running.preemptions)


def choose_victims(
    running: Sequence[Running],
    *,
    needed_bytes: int,
    incoming_priority: int,
    options: EvictionOptions,
) -> tuple[Victim, ...]:
    """Victims that free at least `needed_bytes`; empty when none are needed or none suffice."""
    if needed_bytes <= 0:
        return ()
    allowed = [
        r
        for r in running
        if r.priority < incoming_priority
        and r.freed_bytes > 0
        and r.remaining_steps > options.almost_done_steps
    ]
    costs = {r.request_id: victim_cost(r, options) for r in allowed}
    allowed.sort(key=lambda r: (costs[r.request_id] / r.freed_bytes, r.request_id))
    chosen = _pruned(_cheapest_prefix(allowed, needed_bytes), needed_bytes, costs)
    alone = [r for r in allowed if r.freed_bytes >= needed_bytes]
    if alone and chosen:
        single = min(alone, key=lambda r: (costs[r.request_id], r.request_id))
        if costs[single.request_id] <= sum(costs[r.request_id] for r in chosen):
            chosen = [single]
    return tuple(
        Victim(r.request_id, r.freed_bytes, costs[r.request_id], PreemptionMode.RECOMPUTE) for r in chosen
    )


def _cheapest_prefix(ranked: Sequence[Running], needed: int) -> list[Running]:
    prefix: list[Running] = []
    for candidate in ranked:
        prefix.append(candidate)
        needed -= candidate.freed_bytes
        if needed <= 0:
            return prefix
    return []


def _pruned(chosen: list[Running], needed: int, costs: dict[str, float]) -> list[Running]:
    """Gives back, dearest first, every victim whose bytes the others already cover."""
    spare = sum(r.freed_bytes for r in chosen) - needed
    kept = list(chosen)
    for victim in sorted(chosen, key=lambda r: (-costs[r.request_id], r.request_id)):
        if victim.freed_bytes <= spare:
            kept.remove(victim)
            spare -= victim.freed_bytes
    return kept
