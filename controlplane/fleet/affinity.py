"""Remembers to which box a session and a prompt prefix went last, whose prefix cache can serve them again.

Affinity is soft: it makes the box one of those compared, and shortens the prompt in its forecast. A box that
is too busy loses the comparison.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class Affinity(NamedTuple):
    """A box, and the leading tokens of the prompt that it was sent before."""

    box: str
    tokens: int


class AffinityTable:
    """The last box of each session and of each prompt block; the least recently used are forgotten.

    Args:
        capacity: sessions, and likewise blocks, that are remembered.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._sessions: OrderedDict[str, Affinity] = OrderedDict()
        self._blocks: OrderedDict[int, Affinity] = OrderedDict()

    def find(self, session: str | None, blocks: Sequence[int]) -> Affinity | None:
        """Where the session went last, else where the longest known prefix of these block hashes did."""
        if session is not None and (last := self._sessions.get(session)) is not None:
            return last
        # The chained hash of a block implies all blocks before it, so the deepest known one decides.
        return next((known for block in reversed(blocks) if (known := self._blocks.get(block))), None)

    def sent(
        self, box: str, session: str | None, prompt_tokens: int, blocks: Sequence[int], block_tokens: int
    ) -> None:
        """Records where a request went."""
        if session is not None:
            self._sessions[session] = Affinity(box, prompt_tokens)
            self._sessions.move_to_end(session)
            if len(self._sessions) > self._capacity:
                self._sessions.popitem(last=False)
        # The end of a prefix is forgotten first.
        for at in range(len(blocks) - 1, -1, -1):
            self._blocks[blocks[at]] = Affinity(box, (at + 1) * block_tokens)
            self._blocks.move_to_end(blocks[at])
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
