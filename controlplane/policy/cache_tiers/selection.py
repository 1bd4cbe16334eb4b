"""Chooses the cache tier (KV or hidden states) of each starting and running request.

Memory is ample while all requests present take at most half of it as keys and values, each at its predicted
length. Then every request starts on KV. Otherwise the greedy of `allocation` divides what is left of that
half. A request in memory is worth one step's time per token to come, because that is what it waits without
memory. On hidden states it delays every step, for every token to come, for all requests in memory. So hidden
states pay while a cell of memory gains more that way than as KV. The fixed cost of having any hidden states
is shared by all requests in memory, since all may come to use them.

Half, not all, because moving from hidden states to KV is cheap and the reverse is not: memory taken by KV
stays taken until the request ends. Past waiting time does not count: it is lost in either tier, and the order
of starts weighs it.

Running requests on hidden states move to KV, one per step, when hidden states cost something, nothing waits,
and all requests present take at most a quarter of the memory: the request with the most tokens to come moves
first.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from controlplane.core.clock import to_seconds
from controlplane.core.pool_view import HiddenStateCost
from controlplane.policy.cache_tiers.allocation import hybrid_offers, plan_tiers
from controlplane.policy.engine.interface import EngineView
from controlplane.policy.engine.request_state import RequestState

FREE_OF_CHARGE = HiddenStateCost(0.0)
NO_REQUESTS: frozenset[str] = frozenset()

_KV_TIER = 2
_AMPLE_SHARE = 0.5
_IDLE_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class TierChoice:
    """Request ids: waiting requests that start on hidden states, and running ones that leave them."""

    hidden: frozenset[str] = frozenset()
    leaving: frozenset[str] = frozenset()


def choose_tiers(
    view: EngineView,
    waiting: Sequence[RequestState],
    hidden: Collection[str],
    *,
    rows_per_block: int,
    price: HiddenStateCost,
) -> TierChoice:
    """Tiers for the next step.

    Args:
        view: the engine before the step.
        waiting: requests that may start.
        hidden: ids of the running requests on hidden states.
        rows_per_block: tokens of hidden states per block.
        price: cost of hidden states per engine step.
    """
    taken = sum(_blocks(state, view) for state in view.running)
    if not waiting:
        is_idle = taken <= _IDLE_SHARE * view.quota and price != FREE_OF_CHARGE
        return TierChoice(leaving=_leaving(view, hidden) if is_idle else NO_REQUESTS)
    candidates = sorted(waiting, key=lambda state: state.request.id)
    cells = np.array([_blocks(state, view) for state in candidates], dtype=np.float64)
    room = max(0.0, _AMPLE_SHARE * view.quota - taken)
    if cells.sum() <= room:
        return TierChoice()
    if price == FREE_OF_CHARGE:
        # Hidden states cost nothing, so keys and values gain nothing for their memory.
        return TierChoice(frozenset(state.request.id for state in candidates))
    ratio = view.block_tokens / rows_per_block
    remaining = np.array([state.remaining() for state in candidates], dtype=np.float64)
    tokens = np.array([state.tokens for state in candidates]) + remaining / 2
    requests_in_memory = len(view.running) + max(
        1.0, min(len(candidates), view.free / (ratio * cells.mean()))
    )
    delay = price.token * tokens + price.request + price.step / requests_in_memory
    offers = hybrid_offers(
        remaining * to_seconds(view.pace.step),
        cells,
        ratio=ratio,
        cell_penalty=requests_in_memory * delay * remaining / cells,
        whole_blocks=True,
    )
    tiers = plan_tiers(offers, room).tiers
    hidden_gain, plain_gain = offers.values() / offers.sizes()
    return TierChoice(
        frozenset(
            state.request.id
            for state, tier, pays in zip(candidates, tiers, hidden_gain > plain_gain, strict=True)
            if tier != _KV_TIER and pays
        )
    )


def _blocks(state: RequestState, view: EngineView) -> int:
    """Blocks of keys and values at the predicted end."""
    tokens = max(state.tokens + 1, state.request.prompt_tokens + state.predicted)
    return -(-tokens // view.block_tokens)


def _leaving(view: EngineView, hidden: Collection[str]) -> frozenset[str]:
    """The request with the most tokens to come, if the blocks that it needs for KV are free."""
    on_hidden = [state for state in view.running if state.request.id in hidden]
    if not on_hidden:
        return NO_REQUESTS
    longest = max(on_hidden, key=lambda state: (state.remaining(), state.request.id))
    more = -(-(longest.tokens + 1) // view.block_tokens) - longest.held
    return frozenset({longest.request.id}) if more <= view.free else NO_REQUESTS
