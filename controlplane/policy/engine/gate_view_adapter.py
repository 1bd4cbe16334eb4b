"""Maps the engine's state to the gate's `Share`, with tokens in place of bytes.

The policies do not depend on the unit, so one token of KV cache counts as one byte. As in the ledger, a
linear footprint bounds the blocks of a request from above.
"""

from functools import partial

import numpy as np

from controlplane.core.kv_geometry import KvGeometry
from controlplane.core.memory_ledger import Footprint, LeaseTable, generate_footprint
from controlplane.core.pool_view import Running, Share
from controlplane.policy.engine.interface import EngineView
from controlplane.policy.engine.request_state import RequestState
from controlplane.policy.engine.running_batch import RunningBatch


def footprint_of(state: RequestState, block_tokens: int) -> Footprint:
    """Footprint of a waiting request in tokens, from the forecast of the remaining output."""
    return generate_footprint(
        KvGeometry(1, 1, block_tokens),
        prompt_tokens=state.tokens - state.shared * block_tokens,
        max_output_tokens=max(1, state.request.max_output_tokens - state.done),
        expected_tokens=state.remaining(),
    )


def lease_table(batch: RunningBatch, view: EngineView) -> LeaseTable:
    """The running batch as a lease table in tokens."""
    # A request with more tokens per block takes less than one token of cache per token.
    slope = np.full(len(batch), view.block_tokens / view.block_tokens_of(batch))
    base = slope * batch.tokens.astype(np.float64) + view.block_tokens - 1
    if view.has_shared:
        # A shared block is part of one lease.
        base -= view.block_tokens * np.array([state.shared - state.carried for state in batch])
    return LeaseTable(
        ids=tuple(batch.ids),
        base=base,
        per_step=slope,
        steps=batch.remaining_tokens(),
        priority=batch.priority.astype(np.float64),
    )


def preemptible_of(view: EngineView) -> tuple[Running, ...]:
    """The running requests as possible victims."""
    tokens = view.block_tokens
    return tuple(state.as_running(view.now, state.held * tokens, view.pace) for state in view.running)


def share_of(view: EngineView) -> Share:
    """The engine as one share of the pool; nothing is in deficit, because the engine enforces its quota."""
    tokens = view.block_tokens
    return Share(
        ceiling=view.ceiling * tokens,
        held=min(view.used + view.growth, view.ceiling) * tokens,
        deficit=0,
        largest=view.quota * tokens,
        free_slots=view.free_slots,
        leases=lease_table(view.running, view),
        pace=view.pace,
        preemptible=partial(preemptible_of, view),
    )
