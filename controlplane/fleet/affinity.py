"""Remembers to which box a session and a prompt prefix went last, whose prefix cache can serve them again.

Affinity is soft: it makes the box one of those compared, and shortens the prompt in its forecast. A box that
is too busy loses the comparison. Each model has a cache of its own, and so its own sessions and prefixes.

A prefix that a request names has homes instead, on which all routers agree without a message: the boxes that
win a draw by the hash of prefix and box (rendezvous hashing, Thaler and Ravishankar 1998).
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
    """The homes of named prefixes.

    A box is the first home of a share of all prefixes in proportion to its weight. If a box comes or goes,
    only the homes that it gains or had are others.

    Args:
        names: of the boxes; equal names have equal homes in all processes.
        weights: of the boxes, positive.
    """

    def __init__(self, names: Sequence[str], weights: Sequence[float]) -> None:
        self._names = names
        self._hashes = np.array([_hashed(name) for name in names], np.uint64)
        self._weights = np.array(weights, np.float64)
        self._kept: dict[str, list[str]] = {}

    def of(self, prefix: str | None) -> list[str]:
        """The boxes that are to have the prefix, the first home first; none for None."""
        if prefix is None:
            return []
        if (found := self._kept.get(prefix)) is None:
            if len(self._kept) >= _KEPT:
                self._kept.clear()
            found = self._kept[prefix] = [self._names[at] for at in self._drawn(prefix)]
        return found

    def _drawn(self, prefix: str) -> list[int]:
        mixed = (self._hashes ^ _hashed(prefix)) * np.uint64(0x9E3779B97F4A7C15)
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
    """The last box of each session and prompt block of a model; the least recently used are forgotten.

    Args:
        capacity: sessions, and likewise blocks, that are remembered.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._sessions: OrderedDict[tuple[str, str], Affinity] = OrderedDict()
        self._blocks: OrderedDict[tuple[str, int], Affinity] = OrderedDict()

    def find(self, model: str, session: str | None, blocks: Sequence[int]) -> Affinity | None:
        """Where the session went last, else where the longest known prefix of these block hashes did."""
        if session is not None and (last := self._sessions.get((model, session))) is not None:
            return last
        # The chained hash of a block implies all blocks before it, so the deepest known one decides.
        return next(
            (known for block in reversed(blocks) if (known := self._blocks.get((model, block)))), None
        )

    def sent(
        self,
        box: str,
        model: str,
        session: str | None,
        prompt_tokens: int,
        blocks: Sequence[int],
        block_tokens: int,
    ) -> None:
        """Records where a request went."""
        if session is not None:
            self._sessions[model, session] = Affinity(box, prompt_tokens)
            self._sessions.move_to_end((model, session))
            if len(self._sessions) > self._capacity:
                self._sessions.popitem(last=False)
        # The end of a prefix is forgotten first.
        for at in range(len(blocks) - 1, -1, -1):
            self._blocks[model, blocks[at]] = Affinity(box, (at + 1) * block_tokens)
            self._blocks.move_to_end((model, blocks[at]))
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
