"""Finds the boxes whose prefix cache may have the beginning of a prompt.

A session, and a prefix that a request names, have homes, on which all routers agree without a message: the
boxes that win a draw by the hash of name and box (rendezvous hashing, Thaler and Ravishankar 1998).

Where a block of tokens went last is remembered by each router. This affinity is soft: it makes the box one of
those compared, and shortens the prompt in its forecast. A box that is too busy loses the comparison. Each
model has a cache of its own, and so its own blocks.
"""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from controlplane.fleet.routing_rules import HOMES

_KEPT = 10_000


def _hashed(name: str) -> np.uint64:
    return np.uint64(int.from_bytes(blake2b(name.encode(), digest_size=8).digest()))


class PrefixHomes:
    """The homes of sessions and of named prefixes.

    A box is the first home of a share of all names in proportion to its weight. If a box comes or goes,
    only the homes that it gains or had are others.

    Args:
        names: of the boxes; equal names have equal homes in all processes.
        weights: of the boxes, positive.
    """

    def __init__(self, names: Sequence[str], weights: Sequence[float]) -> None:
        self._names = names
        self._hashes = np.array([_hashed(name) for name in names], np.uint64)
        self._weights = np.array(weights, np.float64)
        # By the process's secret hash of the name: a client chooses it, and it may be long or name a person.
        self._kept: dict[int, list[str]] = {}

    def of(self, name: str | None) -> list[str]:
        """The boxes that are to have what the name stands for, the first home first; none for None."""
        if name is None:
            return []
        if (found := self._kept.get(mark := hash(name))) is None:
            if len(self._kept) >= _KEPT:
                self._kept.clear()
            found = self._kept[mark] = [self._names[at] for at in self._drawn(name)]
        return found

    def _drawn(self, name: str) -> list[int]:
        mixed = (self._hashes ^ _hashed(name)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0x94D049BB133111EB)
        uniform = ((mixed >> np.uint64(11)) + 0.5) / 2.0**53
        # The earliest of exponential times whose rates are the weights.
        first: list[int] = np.argsort(-np.log(uniform) / self._weights)[:HOMES].tolist()
        return first


class Affinity(NamedTuple):
    """A box, and the leading tokens of the prompt that it was sent before."""

    box: str
    tokens: int


class AffinityTable:
    """The last box of each prompt block of a model; the least recently used are forgotten.

    Args:
        capacity: blocks that are remembered.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[tuple[str, int], Affinity] = OrderedDict()

    def find(self, model: str, blocks: Sequence[int]) -> Affinity | None:
        """Where the longest known prefix of these block hashes went last."""
        # The chained hash of a block implies all blocks before it, so the deepest known one decides.
        return next(
            (known for block in reversed(blocks) if (known := self._blocks.get((model, block)))), None
        )

    def sent(self, box: str, model: str, blocks: Sequence[int], block_tokens: int) -> None:
        """Records where a request went."""
        # The end of a prefix is forgotten first.
        for at in range(len(blocks) - 1, -1, -1):
            self._blocks[model, blocks[at]] = Affinity(box, (at + 1) * block_tokens)
            self._blocks.move_to_end((model, blocks[at]))
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
