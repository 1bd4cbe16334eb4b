"""Simulated prefix cache: the full blocks of sequences by chained hash, as in vLLM's `BlockPool`.

A full block can be found from the step that fills it. When no sequence uses it any more it stays cached but
counts as free; blocks that were never full are taken first, then the least recently used cached ones. Only
full blocks are objects: all others are equal, so the scheduler counts them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

OUTPUT_TOKEN = 0
"""Token id of all generated tokens."""


@dataclass(eq=False, slots=True)
class CachedBlock:
    """A full block that `ref_cnt` sequences use; its names are those of vLLM's `KVCacheBlock`."""

    block_id: int
    block_hash: int
    ref_cnt: int = 1


class PrefixCache:
    """Full blocks in use and free ones; its length is the number of free ones."""

    def __init__(self) -> None:
        self._ids = count()
        self._by_hash: dict[int, CachedBlock] = {}
        # Sequences that compute the same tokens at once fill a block each; the oldest is found.
        self._later: dict[int, list[CachedBlock]] = {}
        self._free: dict[CachedBlock, None] = {}

    def __len__(self) -> int:
        return len(self._free)

    def get_cached_block(self, block_hash: int, _group_ids: Sequence[int]) -> list[CachedBlock] | None:
        """The oldest block with this hash, in a list; None if there is none."""
        block = self._by_hash.get(block_hash)
        return None if block is None else [block]

    def find(self, hashes: Sequence[int], most: int) -> list[CachedBlock]:
        """The leading blocks that are cached, at most `most`."""
        found = []
        for block_hash in hashes[:most]:
            if (block := self._by_hash.get(block_hash)) is None:
                break
            found.append(block)
        return found

    def add(self, block_hash: int) -> CachedBlock:
        """A block that its first sequence has filled."""
        block = CachedBlock(next(self._ids), block_hash)
        if self._by_hash.setdefault(block_hash, block) is not block:
            self._later.setdefault(block_hash, []).append(block)
        return block

    def use(self, blocks: Iterable[CachedBlock]) -> None:
        """Adds a sequence to those that use these blocks."""
        for block in blocks:
            if not block.ref_cnt:
                del self._free[block]
            block.ref_cnt += 1

    def release(self, blocks: Sequence[CachedBlock]) -> int:
        """Removes a sequence that used these blocks; returns how many are free now."""
        before = len(self._free)
        # The end of a prefix is evicted first.
        for block in reversed(blocks):
            block.ref_cnt -= 1
            if not block.ref_cnt:
                self._free[block] = None
        return len(self._free) - before

    def evict(self, kept: int) -> None:
        """Evicts the least recently used free blocks until `kept` are left."""
        for block in [block for block, _ in zip(self._free, range(len(self._free) - kept), strict=False)]:
            del self._free[block]
            later = self._later.get(block.block_hash)
            if self._by_hash[block.block_hash] is not block:
                assert later is not None
                later.remove(block)
            elif later:
                self._by_hash[block.block_hash] = later.pop(0)
            else:
                del self._by_hash[block.block_hash]
            if later is not None and not later:
                del self._later[block.block_hash]
