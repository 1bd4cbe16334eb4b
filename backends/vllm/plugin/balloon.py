"""Enforces the ceiling on the use of the KV cache by allocating the blocks beyond it (a memory balloon).

Every check in vLLM then counts them as used. The balloon takes blocks from the free list only, never from a
request, so it may reach its target only after requests have freed blocks. In kvcached's pool an allocated
block is mapped to device memory, so a balloon would occupy the bytes that it should release. There the limit
in kvcached's shared memory, which the server sets, enforces the quota.
"""

from typing import Any


class Balloon:
    """Holds blocks of a vLLM BlockPool so that only some are usable.

    `total` counts the blocks that can hold tokens: all but vLLM's null block.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._blocks: list[Any] = []
        self.total: int = pool.num_gpu_blocks - 1

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def used(self) -> int:
        """Blocks that requests hold."""
        free: int = self._pool.get_num_free_blocks()
        return self.total - len(self._blocks) - free

    def withhold_beyond(self, usable: int) -> None:
        """Grows or shrinks so that `usable` blocks remain, as far as free blocks allow."""
        missing = self.total - usable - len(self._blocks)
        if missing < 0:
            released, self._blocks = self._blocks[missing:], self._blocks[:missing]
            self._pool.free_blocks(released)
        elif missing > 0 and (available := min(missing, self._pool.get_num_free_blocks())):
            self._blocks += self._pool.get_new_blocks(available)


class KvcachedBalloon(Balloon):
    """Balloon of zero size for kvcached's elastic pool, which enforces its own limit."""

    @property
    def used(self) -> int:
        """Blocks that requests hold."""
        allocated: int = self._pool.kv_cache_manager._get_num_alloced_blocks()
        # One is the null block; evictable blocks only cache prefixes.
        return max(0, allocated - 1 - len(self._pool._evictable_blocks))

    def withhold_beyond(self, usable: int) -> None:
        """Does nothing: kvcached's own limit withholds blocks."""


def balloon_of(pool: Any) -> Balloon:
    """The balloon for a vLLM BlockPool or its kvcached replacement."""
    return KvcachedBalloon(pool) if hasattr(pool, "kv_cache_manager") else Balloon(pool)
