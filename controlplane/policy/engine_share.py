"""What is an engine's state in the gate's terms? The same `Share` and `Waiting`, with tokens for bytes.

The engine knows blocks; the policies are indifferent to the unit, so one token of cache counts as one
byte. A line bounds its blocks from above, as in the ledger.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from controlplane.core.geometry import KvGeometry
from controlplane.core.memory import Footprint, LeaseTable, generate_footprint
from controlplane.core.request import Owner
from controlplane.core.view import PoolView, Queue, Running, Share, Waiting
from controlplane.policy.engine_step import EngineView
from controlplane.policy.ordering import Rank
from controlplane.policy.progress import Progress


def footprint_of(progress: Progress, block_tokens: int) -> Footprint:
    deviation = 0.0
    if progress.forecast is not None:
        deviation = progress.forecast.remaining(after=progress.done).deviation
    return generate_footprint(
        KvGeometry(1, 1, block_tokens),
        prompt_tokens=progress.tokens,
        max_output_tokens=max(1, progress.request.max_output_tokens - progress.done),
        expected_tokens=progress.remaining(),
        deviation_tokens=deviation,
    )


def lease_table(alive: Iterable[Progress], block_tokens: int) -> LeaseTable:
    listed = list(alive)
    tokens = np.array([p.tokens for p in listed], dtype=np.float64)
    slope, variance = np.ones(len(listed)), np.zeros(len(listed))
    # A token of one that packs its blocks more densely takes less than a token of the cache.
    if any(packed := [p.per_block for p in listed]):
        slope = np.array([block_tokens / (per_block or block_tokens) for per_block in packed])
    # `remaining` of each, asked only of those that have no predicted end before them.
    steps = np.array([p.ends_at for p in listed], dtype=np.float64) - tokens
    if asked := np.flatnonzero(steps < 1).tolist():
        steps[asked] = [listed[at].remaining() for at in asked]
        forecasts = [listed[at].forecast for at in asked]
        variance[asked] = [0.0 if one is None else one.deviation**2 for one in forecasts]
    priority = np.array([p.priority for p in listed], dtype=np.float64)
    ids = tuple([p.request.id for p in listed])
    return LeaseTable(ids, slope * tokens + block_tokens - 1, slope, steps, variance, priority)


def share_of(view: EngineView) -> Share:
    tokens = view.block_tokens

    def preemptible() -> tuple[Running, ...]:
        return tuple(p.as_running(view.now, p.held * tokens, view.pace) for p in view.running)

    return Share(
        ceiling=view.quota * tokens,
        held=min(view.used + view.growth, view.quota) * tokens,
        deficit=0,
        largest=view.quota * tokens,
        free_slots=view.free_slots,
        leases=lease_table(view.running, tokens),
        pace=view.pace,
        preemptible=preemptible,
    )


def waiting_of(progress: Progress, block_tokens: int, rank: Rank | None = None) -> Waiting:
    """It was accepted, so its wait has no bound."""
    request, footprint = progress.request, footprint_of(progress, block_tokens)
    return Waiting(request, footprint, None, rank or (0, request.arrival, request.id), footprint.area)


def pool_view(view: EngineView, waiting: Sequence[Waiting]) -> PoolView:
    """The whole view as the gate's cycle takes it, for comparing the two."""
    return PoolView({Owner.LLM: share_of(view)}, {Owner.LLM: Queue(tuple(waiting), ())})
