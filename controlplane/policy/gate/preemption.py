"""Chooses running requests of lower priority that free enough memory at the least loss.

Algorithm 3 of the collocation proposal, corrected. Urgency `1 / (max(slack, 0) + tau)` is never negative, so
late requests of high priority are not preempted first. A request past its deadline costs only its recompute.
Candidates are taken by cost *per byte freed*; the last one is chosen such that the total costs at most twice
the minimum; victims that turn out not to be needed are kept running. Nothing is preempted unless the victims
suffice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from controlplane.core.clock import Duration, to_seconds
from controlplane.core.decision import Victim
from controlplane.core.pool_view import Running


@dataclass(frozen=True, slots=True)
class PreemptionOptions:
    """Weights of the preemption cost.

    `tau` is the weight, per unit of priority, of losing all slack; a slack of `tau` halves it.
    `almost_done_steps` protects requests that will soon free their memory anyway. Each earlier preemption of
    a request adds `thrash_penalty` times its cost.
    """

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
    """Cost of preempting `running`, in seconds: recompute plus urgency, scaled by earlier preemptions.

    There is no urgency if the request is late or has no deadline.
    """
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
    """The cheapest sufficient set of victims, to within a factor of two.

    They free at least `needed_bytes`. Empty if nothing is needed or if no allowed set suffices.

    A request that outran its predicted length is protected by `almost_done_steps` only until the next
    forecast: after k tokens it is expected to produce k / 4 more.
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
    """Takes candidates too small to suffice alone, and tries each larger one as the last victim.

    At most twice the least cost: greedy for the minimum knapsack problem (Csirik et al., 1991).
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
    """Drops, most expensive first, every victim whose bytes the others already cover."""
    spare = sum(r.freed_bytes for r in chosen) - needed
    kept = list(chosen)
    for victim in sorted(chosen, key=lambda r: (-costs[r.request_id], r.request_id)):
        if victim.freed_bytes <= spare:
            kept.remove(victim)
            spare -= victim.freed_bytes
    return kept
