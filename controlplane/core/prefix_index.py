"""Predicts which blocks of a prompt the engine has in its prefix cache, without asking the engine.

Blocks are identified by chained hashes of their token ids, as in the engine. The blocks of admitted requests
are in use; those of ended requests stay cached until as many blocks are known as the cache has. The least
recently used are dropped first. The hits that the engine reports correct the prediction.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple
from zlib import crc32


class CachedPrefix(NamedTuple):
    """Leading blocks of a prompt that are `cached`; of these, the blocks that admitted requests use."""

    cached: int
    used: int


def block_hashes(tokens: Sequence[int], block_tokens: int, previous: int = 0) -> list[int]:
    """Chained hashes of the full blocks of these token ids, which follow the block with hash `previous`."""
    found, chained = [], previous
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        chained = hash((chained, *tokens[start : start + block_tokens]))
        found.append(chained)
    return found


class PrefixIndex:
    """Block hashes of the prompts that one engine has served.

    Args:
        block_tokens: tokens of a block.
        capacity: blocks of the engine's cache.
    """

    def __init__(self, block_tokens: int, capacity: int) -> None:
        self.block_tokens = block_tokens
        self._capacity = capacity
        self._readers: dict[int, dict[str, None]] = {}
        self._unused: dict[int, None] = {}
        self._blocks_of: dict[str, Sequence[int]] = {}
        self.shared_blocks = 0
        """Blocks that two or more admitted requests use."""

    def __len__(self) -> int:
        return len(self._readers) + len(self._unused)

    def __iter__(self) -> Iterator[int]:
        """The known blocks: those in use, then the least recently used first."""
        return chain(self._readers, self._unused)

    def hashes(self, prompt: Sequence[int], adapter: str | None = None) -> tuple[int, ...]:
        """Hashes of the blocks that a request can find; the last token of its prompt is always computed.

        Requests with different LoRA adapters share no blocks.
        """
        # Not `hash`, which gives a string another value in each process.
        first = 0 if adapter is None else crc32(adapter.encode())
        blocks = block_hashes(prompt[:-1], self.block_tokens, first)
        # A client can choose token ids whose blocks have one hash. What follows the first repetition counts
        # as not cached.
        seen: set[int] = set()
        for count, block in enumerate(blocks):
            if block in seen:
                return tuple(blocks[:count])
            seen.add(block)
        return tuple(blocks)

    def find(self, blocks: Sequence[int]) -> CachedPrefix:
        """The leading blocks that are cached.

        What holds for a block holds for those before it: requests use a prefix from its start, and it is
        evicted from its end.
        """
        cached = bisect_left(
            blocks, True, key=lambda one: one not in self._readers and one not in self._unused
        )
        return CachedPrefix(
            cached, bisect_left(blocks[:cached], True, key=lambda one: one not in self._readers)
        )

    def admit(self, request_id: str, blocks: Sequence[int]) -> None:
        """Adds a request that uses these blocks from now on; no block twice."""
        self._blocks_of[request_id] = blocks
        for block in blocks:
            self._unused.pop(block, None)
            readers = self._readers.setdefault(block, {})
            readers[request_id] = None
            self.shared_blocks += len(readers) == 2
        self._trim()

    def release(self, request_id: str) -> dict[str, int]:
        """Removes a request; does nothing for one that was not admitted.

        Of the readers of a block the first pays for it. Returns how many blocks of the request each other
        reader pays for from now on.
        """
        taken_over: dict[str, int] = {}
        # The end of a prefix is evicted first.
        for block in reversed(self._blocks_of.pop(request_id, ())):
            readers = self._readers[block]
            has_paid = next(iter(readers)) == request_id
            del readers[request_id]
            self.shared_blocks -= len(readers) == 1
            if not readers:
                del self._readers[block]
                self._unused[block] = None
            elif has_paid:
                payer = next(iter(readers))
                taken_over[payer] = taken_over.get(payer, 0) + 1
        self._trim()
        return taken_over

    def shared(self, request_id: str) -> tuple[int, int]:
        """Blocks that an admitted request uses together with others, and those of them that it pays for."""
        readers = [self._readers[block] for block in self._blocks_of.get(request_id, ())]
        shared = [names for names in readers if len(names) > 1]
        return len(shared), sum(next(iter(names)) == request_id for names in shared)

    def forget_unused(self) -> None:
        """Drops the blocks that no request uses, after the engine had evicted some of them."""
        self._unused.clear()

    def _trim(self) -> None:
        while self._unused and len(self) > self._capacity:
            del self._unused[next(iter(self._unused))]
