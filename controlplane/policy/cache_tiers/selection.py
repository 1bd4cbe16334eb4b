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
NOBODY: frozenset[str] = frozenset()

_PLAIN = 2
_AMPLE = 0.5
_IDLE = 0.25


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
    taken = sum(_blocks(p, view) for p in view.running)
    if not waiting:
        is_idle = taken <= _IDLE * view.quota and price != FREE_OF_CHARGE
        return TierChoice(leaving=_leaving(view, hidden) if is_idle else NOBODY)
    listed = sorted(waiting, key=lambda progress: progress.request.id)
    cells = np.array([_blocks(p, view) for p in listed], dtype=np.float64)
    room = max(0.0, _AMPLE * view.quota - taken)
    if cells.sum() <= room:
        return TierChoice()
    if price == FREE_OF_CHARGE:
        # Keys and values would gain nothing for the memory that they take.
        return TierChoice(frozenset(p.request.id for p in listed))
    ratio = view.block_tokens / rows_per_block
    to_come = np.array([p.remaining() for p in listed], dtype=np.float64)
    tokens = np.array([p.tokens for p in listed]) + to_come / 2
    everybody = len(view.running) + max(1.0, min(len(listed), view.free / (ratio * cells.mean())))
    delay = price.token * tokens + price.request + price.step / everybody
    offers = hybrid_offers(
        to_come * to_seconds(view.pace.step),
        cells,
        ratio=ratio,
        cell_penalty=everybody * delay * to_come / cells,
        whole_blocks=True,
    )
    tiers = plan_tiers(offers, room).tiers
    hidden_gain, plain_gain = offers.values() / offers.sizes()
    return TierChoice(
        frozenset(
            p.request.id
            for p, tier, pays in zip(listed, tiers, hidden_gain > plain_gain, strict=True)
            if tier != _PLAIN and pays
        )
    )


def _blocks(progress: RequestState, view: EngineView) -> int:
    """Of keys and values, at its predicted end."""
    tokens = max(progress.tokens + 1, progress.request.prompt_tokens + progress.predicted)
    return -(-tokens // view.block_tokens)


def _leaving(view: EngineView, hidden: Collection[str]) -> frozenset[str]:
    """Whoever has most to come, if the blocks that it lacks are there."""
    on_hidden = [p for p in view.running if p.request.id in hidden]
    if not on_hidden:
        return NOBODY
    longest = max(on_hidden, key=lambda p: (p.remaining(), p.request.id))
    more = -(-(longest.tokens + 1) // view.block_tokens) - longest.held
    return frozenset({longest.request.id}) if more <= view.free else NOBODY
