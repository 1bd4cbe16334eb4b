"""How does a fixed block pool get smaller? Blocks that the quota withholds are taken and held.

Every check in vLLM then sees them as used. Blocks come from the free list only, so the balloon never
takes what a request holds: it grows as far as it can, and further when somebody has left.
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

    def leave(self, quota: int) -> None:
        """Withholds all but `quota` blocks, as far as free ones go round."""
        missing = self.total - quota - len(self._blocks)
        if missing < 0:
            given, self._blocks = self._blocks[missing:], self._blocks[:missing]
            self._pool.free_blocks(given)
        elif missing > 0 and (taken := min(missing, self._pool.get_num_free_blocks())):
            self._blocks += self._pool.get_new_blocks(taken)
