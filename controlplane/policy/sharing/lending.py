"""Who may use how much right now? What each owns, and of that, what one lends to the other for the moment.

What an owner owns moves slowly, towards urgency (`quota`). Lending is for the moment: bytes that an owner
needs neither now nor for the work forecast go to the other if that one is short of memory, and come back
as soon as they are needed. What is lent and what is borrowed have limits of their own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from controlplane.core.request import Owner
from controlplane.policy.sharing.quota import QuotaOptions, steadied, target_nominal

OTHER = {Owner.LLM: Owner.EMBEDDING, Owner.EMBEDDING: Owner.LLM}


@dataclass(frozen=True, slots=True)
class Sharing:
    """Bytes. Without `follows_urgency` everybody owns `nominal` for ever."""

    options: QuotaOptions
    nominal: Mapping[Owner, int]
    borrow: Mapping[Owner, int]
    lend: Mapping[Owner, int]
    follows_urgency: bool


def split(pool: int, llm: int, block_bytes: int) -> dict[Owner, int]:
    """The pool in two: the LLM's part in whole blocks, the embeddings' the rest."""
    llm = llm // block_bytes * block_bytes
    return {Owner.LLM: llm, Owner.EMBEDDING: pool - llm}


def target_next(target: int, urgency: Mapping[Owner, float], sharing: Sharing) -> int:
    """Bytes that the LLM should come to own, after it was `target`."""
    if not sharing.follows_urgency:
        return sharing.nominal[Owner.LLM]
    return steadied(target, target_nominal(urgency, sharing.options), sharing.options)


def lent(owned: Mapping[Owner, int], needed: Mapping[Owner, int], sharing: Sharing) -> dict[Owner, int]:
    """What each may use, in whole blocks for the LLM; the sum is that of `owned`."""
    usable = dict(owned)
    for giver, taker in OTHER.items():
        spare, short = owned[giver] - needed[giver], needed[taker] - owned[taker]
        above_minimum = owned[giver] - sharing.options.minimum[giver]
        moved_at_most = min(spare, short, above_minimum, sharing.lend[giver], sharing.borrow[taker])
        moved = max(0, moved_at_most) // sharing.options.block_bytes * sharing.options.block_bytes
        usable[giver] -= moved
        usable[taker] += moved
    return usable


def parts(budget: int, least: Sequence[int], full: Sequence[int]) -> list[int]:
    """One owner's bytes, shared out among its models: `least` (1 or more) to each if that goes round, the
    rest by what they could use of it beyond that: `full` less `least`."""
    floors, rest = list(least), budget - sum(least)
    weights = [max(0, moved_at_most - minimum) for moved_at_most, minimum in zip(full, least, strict=True)]
    if rest < 0 or not any(weights):
        floors, rest, weights = [0] * len(floors), budget, floors
    total = sum(weights)
    return [floor + rest * weight // total for floor, weight in zip(floors, weights, strict=True)]
