"""Remembers to which box a session and a prompt prefix went last, whose prefix cache can serve them again.

Affinity is soft: it makes the box one of those compared, and shortens the prompt in its forecast. A box that
is too busy loses the comparison. Each model has a cache of its own, and so its own sessions and prefixes.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


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
