"""Who gives way? Running requests of strictly lower priority that free enough at the least loss.

The collocation proposal's Algorithm 3, corrected: urgency `1 / (max(slack, 0) + tau)` never turns
negative, so late high-priority requests are not the first to go; a request already past its deadline
costs only its recompute; candidates are taken by cost *per byte freed*, the last one chosen so that the
whole costs at most twice the least possible, and victims that turn out unneeded are given back. Nothing is
evicted unless it suffices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from controlplane.core.clock import Duration, to_seconds
from controlplane.core.decision import Victim
from controlplane.core.view import Running


@dataclass(frozen=True, slots=True)
class PreemptionOptions:
    """`tau` is what the loss of all slack weighs, for each unit of priority, beside the recompute; slack of
    `tau` halves it. `almost_done_steps` protects requests about to free their memory anyway; each
    earlier preemption adds `thrash_penalty` times the cost."""

    tau: Duration
    almost_done_steps: int
    thrash_penalty: float

    def __post_init__(self) -> None:
        if self.tau <= 0:
            raise ValueError(f"admission.victim_tau={self.tau}: urgency must stay finite; raise it above 0")
        for name in ("almost_done_steps", "thrash_penalty"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"admission.victim_{name}={value}: must be at least 0; 0 switches it off")


class ChooseVictims(Protocol):
    """Chooses running requests whose blocks make room for a request of a higher priority."""

    def __call__(
        self,
        running: Sequence[Running],
        *,
        needed_bytes: int,
        incoming_priority: int,
        options: PreemptionOptions,
    ) -> tuple[Victim, ...]:
        """Victims below `incoming_priority` that free at least `needed_bytes`; empty if there are none."""
        ...


def victim_cost(running: Running, options: PreemptionOptions) -> float:
    """Seconds of work lost and of urgency. No urgency when already late, or without a deadline."""
    urgency = 0.0
    if running.slack is not None and running.slack >= 0:
        share = options.tau / (running.slack + options.tau)
        urgency = (1 + running.priority) * to_seconds(options.tau) * share
    return (to_seconds(running.recompute) + urgency) * (1.0 + options.thrash_penalty * running.preemptions)


def choose_victims(
    running: Sequence[Running],
    *,
    needed_bytes: int,
    incoming_priority: int,
    options: PreemptionOptions,
) -> tuple[Victim, ...]:
    """Victims that free at least `needed_bytes`; empty when none are needed or none suffice.

    A prediction that was outrun protects only until the host predicts anew: after k tokens an outrun
    answer is expected to take k / 4 more.
    """
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
    chosen = _pruned(_cheap_cover(allowed, needed_bytes, costs), needed_bytes, costs)
    alone = [r for r in allowed if r.freed_bytes >= needed_bytes]
    if alone:
        single = min(alone, key=lambda r: (costs[r.request_id], r.request_id))
        if costs[single.request_id] <= sum(costs[r.request_id] for r in chosen):
            chosen = [single]
    return tuple(Victim(r.request_id, r.freed_bytes, costs[r.request_id]) for r in chosen)


def _cheap_cover(ranked: Sequence[Running], needed: int, costs: Mapping[str, float]) -> list[Running]:
    """Takes what is too small to suffice, and tries each that would suffice as the last one.

    At most twice the least cost: greedy for the minimum knapsack (Csirik et al., 1991).
    """
    small: list[Running] = []
    spent = 0.0
    best: list[Running] = []
    least: float | None = None
    for candidate in ranked:
        cost = costs[candidate.request_id]
        if candidate.freed_bytes < needed:
            small.append(candidate)
            spent += cost
            needed -= candidate.freed_bytes
        elif least is None or spent + cost < least:
            best, least = [*small, candidate], spent + cost
    return best


def _pruned(chosen: list[Running], needed: int, costs: Mapping[str, float]) -> list[Running]:
    """Gives back, dearest first, every victim whose bytes the others already cover."""
    spare = sum(r.freed_bytes for r in chosen) - needed
    kept = list(chosen)
    for victim in sorted(chosen, key=lambda r: (-costs[r.request_id], r.request_id)):
        if victim.freed_bytes <= spare:
            kept.remove(victim)
            spare -= victim.freed_bytes
    return kept
