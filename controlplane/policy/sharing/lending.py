"""Lends quota that its owner does not need now, between the LLM and the embeddings.

Nominal quotas move slowly, by urgency (`quota`). Lending is immediate: bytes that an owner needs neither now
nor for the forecast work go to the other owner if it is short of memory, and come back as soon as they are
needed. Lending and borrowing have limits of their own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from controlplane.core.request import Owner
from controlplane.policy.sharing.quota import QuotaOptions, apply_dead_band, target_nominal

OTHER = {Owner.LLM: Owner.EMBEDDING, Owner.EMBEDDING: Owner.LLM}


@dataclass(frozen=True, slots=True)
class Sharing:
    """Configuration of the division, in bytes.

    Without `follows_urgency` every owner keeps `nominal`.
    """

    options: QuotaOptions
    borrow: Mapping[Owner, int]
    lend: Mapping[Owner, int]
    follows_urgency: bool

    @property
    def nominal(self) -> dict[Owner, int]:
        """The quotas while nothing is urgent."""
        llm = self.options.nominal_llm_bytes
        return {Owner.LLM: llm, Owner.EMBEDDING: self.options.pool - llm}


def target_next(target: int, urgency: Mapping[Owner, float], sharing: Sharing) -> int:
    """The LLM's next target quota in bytes, after `target`."""
    if not sharing.follows_urgency:
        return sharing.options.nominal_llm_bytes
    return apply_dead_band(target, target_nominal(urgency, sharing.options), sharing.options)


def usable_bytes(
    owned: Mapping[Owner, int], needed: Mapping[Owner, int], sharing: Sharing
) -> dict[Owner, int]:
    """Usable bytes of each owner, in whole blocks for the LLM; they sum to `owned`."""
    usable = dict(owned)
    for giver, taker in OTHER.items():
        spare, short = owned[giver] - needed[giver], needed[taker] - owned[taker]
        above_minimum = owned[giver] - sharing.options.minimum[giver]
        moved_at_most = min(spare, short, above_minimum, sharing.lend[giver], sharing.borrow[taker])
        moved = max(0, moved_at_most) // sharing.options.block_bytes * sharing.options.block_bytes
        usable[giver] -= moved
        usable[taker] += moved
    return usable


def split_among_models(budget: int, least: Sequence[int], full: Sequence[int]) -> list[int]:
    """Divides one owner's bytes among its models.

    Each model gets `least` (1 or more) if the budget suffices, and the rest goes by `full` less `least`.
    """
    floors, rest = list(least), budget - sum(least)
    weights = [max(0, largest - minimum) for largest, minimum in zip(full, least, strict=True)]
    if rest < 0 or not any(weights):
        floors, rest, weights = [0] * len(floors), budget, floors
    total = sum(weights)
    return [floor + rest * weight // total for floor, weight in zip(floors, weights, strict=True)]
