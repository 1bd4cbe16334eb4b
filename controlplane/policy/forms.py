"""Who that starts now keeps hidden states, and who that runs leaves them? By the greedy of `hybrid`.

Those that wait are offered the free blocks, as keys and values or as hidden states. Where all fit as keys and
values, all get them. Where not, a hidden state is worth its request's pending time less what it costs
everybody until it ends: seconds per block and step, times all requests present, times the tokens to come.
Pending counts a tenth where the promise is broken anyhow: at a low price memory is better spared all the
same. Who is left out by the greedy but started by the engine's own order takes hidden states where they are
worth what they cost.

Who runs on hidden states leaves them, one a step, when they cost something, nobody waits, and a quarter of
the memory stays free: the one with the most tokens to come.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from controlplane.core.clock import Duration, between, to_seconds
from controlplane.policy.engine_step import EngineView
from controlplane.policy.hybrid import hybrid_offers, plan_tiers
from controlplane.policy.progress import Progress

_PLAIN = 2
_KEPT_FREE = 0.25
_BROKEN = 0.1


@dataclass(frozen=True, slots=True)
class FormChoice:
    """Requests by id: of those that wait, who starts on hidden states; of those that run, who leaves them."""

    hidden: frozenset[str] = frozenset()
    leaving: frozenset[str] = frozenset()


def choose_forms(
    view: EngineView,
    waiting: Sequence[Progress],
    hidden: Collection[str],
    *,
    rows_per_block: int,
    block_seconds: float,
) -> FormChoice:
    """`hidden` are those of `view.running` on hidden states; `block_seconds` is what a block's worth of
    tokens on hidden states adds to every step."""
    if not waiting:
        return FormChoice(leaving=_leaving(view, hidden, block_seconds))
    listed = sorted(waiting, key=lambda progress: progress.request.id)
    cells = np.array([-(-(p.tokens + 1) // view.block_tokens) for p in listed], dtype=np.float64)
    if cells.sum() <= view.free:
        return FormChoice()
    if block_seconds <= 0:
        # Keys and values would gain nothing for the memory that they take.
        return FormChoice(frozenset(p.request.id for p in listed))
    pending = np.array([_pending(p, view) for p in listed])
    to_come = np.array([p.remaining() for p in listed], dtype=np.float64)
    offers = hybrid_offers(
        pending,
        cells,
        ratio=view.block_tokens / rows_per_block,
        cell_penalty=block_seconds * (len(view.running) + len(listed)) * to_come,
        whole_blocks=True,
    )
    tiers = plan_tiers(offers, max(0, view.free)).tiers
    is_worthwhile = offers.values()[0] > 0
    return FormChoice(
        frozenset(
            p.request.id
            for p, tier, worth in zip(listed, tiers, is_worthwhile, strict=True)
            if tier != _PLAIN and worth
        )
    )


def _pending(progress: Progress, view: EngineView) -> float:
    since = progress.request.arrival if progress.last_token is None else progress.last_token
    is_broken = progress.is_hopeless(view.now, Duration(0))
    return to_seconds(between(since, view.now)) * (_BROKEN if is_broken else 1.0)


def _leaving(view: EngineView, hidden: Collection[str], block_seconds: float) -> frozenset[str]:
    on_hidden = [p for p in view.running if p.request.id in hidden]
    if block_seconds <= 0 or not on_hidden:
        return frozenset()
    longest = max(on_hidden, key=lambda p: (p.remaining(), p.request.id))
    more = -(-(longest.tokens + 1) // view.block_tokens) - view.held[longest.request.id]
    fits = view.free - more >= _KEPT_FREE * view.quota
    return frozenset({longest.request.id}) if fits else frozenset()
