"""How does a fixed block pool get smaller? Blocks that the quota withholds are taken and held.

Every check in vLLM then sees them as used. Blocks come from the free list only, so the balloon never
takes what a request holds: it grows as far as it can, and further when somebody has left. In kvcached's pool
a block that is taken is mapped, so there nothing is: a balloon would fill with the very bytes that others are
to get. Its limit, which the gate sets, withholds them.
"""

from typing import Any


class Balloon:
    """`total` blocks can hold tokens: vLLM keeps one as a placeholder."""

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

    def withhold_beyond(self, quota: int) -> None:
        """Withholds all but `quota` blocks, as far as free ones go round."""
        missing = self.total - quota - len(self._blocks)
        if missing < 0:
            given, self._blocks = self._blocks[missing:], self._blocks[:missing]
            self._pool.free_blocks(given)
        elif missing > 0 and (taken := min(missing, self._pool.get_num_free_blocks())):
            self._blocks += self._pool.get_new_blocks(taken)


class KvcachedBalloon(Balloon):
    """Of kvcached's pool, whose free blocks are no more than its limit and the device leave."""

    @property
    def used(self) -> int:
        taken: int = self._pool.kv_cache_manager._get_num_alloced_blocks()
        # One is a placeholder; what is only kept for reuse goes as soon as it is missed.
        return max(0, taken - 1 - len(self._pool._evictable_blocks))

    def withhold_beyond(self, quota: int) -> None:
        """Nothing."""


def balloon_of(pool: Any) -> Balloon:
    return KvcachedBalloon(pool) if hasattr(pool, "kv_cache_manager") else Balloon(pool)
