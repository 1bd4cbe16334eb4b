"""A quota withholds blocks of a pool that lies there; of one that is mapped on demand it takes none."""

from types import SimpleNamespace

from backends.vllm.plugin.balloon import balloon_of


class Mapped:
    """As kvcached's pool and its manager are, of which a taken block costs memory: what is free goes by its
    limit and by the device, one block is a placeholder, and blocks of finished prompts are kept for reuse."""

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


def test_what_is_mapped_on_demand_is_left_to_its_limit():
    pool = Mapped(blocks=101, limit=101)
    balloon = balloon_of(pool)
    assert (balloon.total, balloon.used) == (100, 0)
    pool.get_new_blocks(30)
    balloon.withhold_beyond(50)
    assert (pool.taken, len(balloon), balloon.used) == (31, 0, 30)
    # What the limit does not give is not in use, nor what is only kept.
    pool.limit = 60
    pool._evictable_blocks = dict.fromkeys(range(10))
    assert balloon.used == 20
