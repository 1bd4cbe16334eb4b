"""Who that starts now keeps hidden states, and who that runs leaves them? By the greedy of `hybrid`.

Memory is ample while all that are present take no more than half of it as keys and values, each as long as it
is predicted to become: then all that start get them. Else the greedy hands out what that half has left.
A request with memory is worth a step's time for every token to come, since that is what it waits without.
On hidden states it costs what they delay a step by, for every token to come, times everybody in memory. So
hidden states pay while a cell of memory gains more that way than as keys and values. What having any costs
is shared by all in memory, who may all come to keep them.

Half, and not all, because the way from hidden states to keys and values is short and the way back is not:
memory that keys and values hold stays taken to their end. How long a request has waited already does not
count: that is lost in either form, and weighed by the order in which requests start.

Who runs on hidden states leaves them, one a step, when they cost something, nobody waits, and all present
take at most a quarter: the one with the most tokens to come.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from controlplane.core.clock import to_seconds
from controlplane.core.view import HiddenStateCost
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
    """Requests by id: of those that wait, who starts on hidden states; of those that run, who leaves them."""

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
    """`hidden` are those of `view.running` on hidden states."""
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
        # Keys and values would gain nothing for the memory that they take.
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
    """Of keys and values, at its predicted end."""
    tokens = max(state.tokens + 1, state.request.prompt_tokens + state.predicted)
    return -(-tokens // view.block_tokens)


def _leaving(view: EngineView, hidden: Collection[str]) -> frozenset[str]:
    """Whoever has most to come, if the blocks that it lacks are there."""
    on_hidden = [state for state in view.running if state.request.id in hidden]
    if not on_hidden:
        return NO_REQUESTS
    longest = max(on_hidden, key=lambda state: (state.remaining(), state.request.id))
    more = -(-(longest.tokens + 1) // view.block_tokens) - longest.held
    return frozenset({longest.request.id}) if more <= view.free else NO_REQUESTS
