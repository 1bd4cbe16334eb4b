"""What is an engine's state in the gate's terms? The same `Share` and `Waiting`, with tokens for bytes.

The engine knows blocks; the policies are indifferent to the unit, so one token of cache counts as one
byte. A line bounds its blocks from above, as in the ledger.
"""

from collections.abc import Sequence

import numpy as np

from controlplane.core.geometry import KvGeometry
from controlplane.core.memory import Footprint, LeaseTable, generate_footprint
from controlplane.core.request import Owner
from controlplane.core.view import PoolView, Queue, Running, Share, Waiting
from controlplane.policy.engine.interface import EngineView
from controlplane.policy.engine.request_state import RequestState
from controlplane.policy.engine.running_batch import RunningBatch
from controlplane.policy.gate.ordering import Rank


def footprint_of(state: RequestState, block_tokens: int) -> Footprint:
    deviation = 0.0
    if state.forecast is not None:
        deviation = state.forecast.remaining(after=state.done).deviation
    return generate_footprint(
        KvGeometry(1, 1, block_tokens),
        prompt_tokens=state.tokens,
        max_output_tokens=max(1, state.request.max_output_tokens - state.done),
        expected_tokens=state.remaining(),
        deviation_tokens=deviation,
    )


def lease_table(batch: RunningBatch, view: EngineView) -> LeaseTable:
    # A token of one that packs its blocks more densely takes less than a token of the cache.
    slope = np.full(len(batch), view.block_tokens / view.per_block(batch))
    return LeaseTable(
        ids=tuple(batch.ids),
        base=slope * batch.tokens.astype(np.float64) + view.block_tokens - 1,
        per_step=slope,
        steps=batch.to_come(),
        variance=batch.variance.copy(),
        priority=batch.priority.astype(np.float64),
    )


def share_of(view: EngineView) -> Share:
    tokens = view.block_tokens

    def preemptible() -> tuple[Running, ...]:
        return tuple(state.as_running(view.now, state.held * tokens, view.pace) for state in view.running)

    return Share(
        ceiling=view.quota * tokens,
        held=min(view.used + view.growth, view.quota) * tokens,
        deficit=0,
        largest=view.quota * tokens,
        free_slots=view.free_slots,
        leases=lease_table(view.running, view),
        pace=view.pace,
        preemptible=preemptible,
    )


def waiting_of(state: RequestState, footprint: Footprint, rank: Rank) -> Waiting:
    """It was accepted, so its wait has no bound."""
    return Waiting(state.request, footprint, None, rank, footprint.area)


def pool_view(view: EngineView, waiting: Sequence[Waiting]) -> PoolView:
    """The whole view as the gate's cycle takes it, for comparing the two."""
    return PoolView({Owner.LLM: share_of(view)}, {Owner.LLM: Queue(tuple(waiting), ())})
