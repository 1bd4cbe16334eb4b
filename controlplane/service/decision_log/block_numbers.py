"""Numbers the blocks of prompts in the order in which they first appear in the log.

Requests that share a prefix share the numbers of its whole blocks, so a replay finds the same hits as the
engine's prefix cache. Unlike a hash, a number cannot confirm a guess of the text, and a run of new numbers
takes a few bytes where hashes take eight for each block.
"""

from collections.abc import Sequence


class BlockNumbers:
    """Remembers the blocks used latest, at least `capacity` and at most twice as many.

    A block that was forgotten gets a new number. The hash of a block covers all blocks before it, so the
    known blocks of a prompt come first.
    """

    def __init__(self, capacity: int = 1 << 17) -> None:
        self._capacity = capacity
        self._recent: dict[int, int] = {}
        self._earlier: dict[int, int] = {}
        self._next = 0

    def runs(self, blocks: Sequence[int]) -> list[list[int]]:
        """The numbers of these blocks as runs of [first, count]."""
        found: list[list[int]] = []
        recent, known = self._recent, 0
        for block in blocks:
            number = recent.get(block)
            if number is None:
                if (number := self._earlier.get(block)) is None:
                    break
                recent[block] = number
            known += 1
            if found and found[-1][0] + found[-1][1] == number:
                found[-1][1] += 1
            else:
                found.append([number, 1])
        if new := len(blocks) - known:
            first, self._next = self._next, self._next + new
            recent.update(zip(blocks[known:], range(first, first + new), strict=True))
            if found and found[-1][0] + found[-1][1] == first:
                found[-1][1] += new
            else:
                found.append([first, new])
        if len(recent) >= self._capacity:
            self._earlier, self._recent = recent, {}
        return found
