"""The balloon takes no blocks of a pool that is mapped on demand."""

from types import SimpleNamespace

from backends.vllm.plugin.balloon import balloon_of


class ElasticPool:
    """Imitates kvcached's pool: free blocks depend on its limit, one block is the null block, and blocks of
    finished prompts are kept for reuse."""

    def __init__(self, blocks: int, limit: int) -> None:
        self.num_gpu_blocks, self.limit = blocks, limit
        self.taken = 1
        self._evictable_blocks: dict[int, object] = {}
        self.kv_cache_manager = SimpleNamespace(_get_num_alloced_blocks=lambda: self.taken)

    def get_num_free_blocks(self) -> int:
        return self.limit - self.taken + len(self._evictable_blocks)

    def get_new_blocks(self, count: int) -> list[object]:
        self.taken += count
        return [object()] * count


def test_a_pool_mapped_on_demand_is_left_to_its_own_limit():
    pool = ElasticPool(blocks=101, limit=101)
    balloon = balloon_of(pool)
    assert (balloon.total, balloon.used) == (100, 0)
    pool.get_new_blocks(30)
    balloon.withhold_beyond(50)
    assert (pool.taken, len(balloon), balloon.used) == (31, 0, 30)
    # Neither blocks beyond the limit nor evictable blocks are in use.
    pool.limit = 60
    pool._evictable_blocks = dict.fromkeys(range(10))
    assert balloon.used == 20
