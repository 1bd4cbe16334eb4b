"""Numbers of blocks say which prefixes are shared, and nothing else."""

from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.prefix_index import block_hashes
from controlplane.service.decision_log.block_numbers import BlockNumbers


def expanded(runs):
    return [first + at for first, count in runs for at in range(count)]


def test_a_shared_prefix_has_the_same_numbers_and_the_rest_has_new_ones():
    numbers = BlockNumbers()
    assert numbers.runs(block_hashes(range(64), 16)) == [[0, 4]]
    assert numbers.runs(block_hashes([*range(32), *range(100, 132)], 16)) == [[0, 2], [4, 2]]
    assert numbers.runs(block_hashes(range(64), 16)) == [[0, 4]]
    assert numbers.runs([]) == []


@given(st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=20))
def test_numbers_are_equal_where_the_blocks_are(prompts):
    numbers, seen = BlockNumbers(), {}
    for prompt in prompts:
        blocks = block_hashes(prompt, 1)
        found = expanded(numbers.runs(blocks))
        assert len(found) == len(blocks)
        for block, number in zip(blocks, found, strict=True):
            assert seen.setdefault(block, number) == number
    assert len(set(seen.values())) == len(seen)


def test_old_blocks_are_forgotten_and_used_ones_are_not():
    numbers = BlockNumbers(capacity=10)
    often = block_hashes([1, 2], 1)
    first = numbers.runs(often)
    once = numbers.runs([7])
    for at in range(100, 150):
        numbers.runs([at])
        assert numbers.runs(often) == first
    assert numbers.runs([7]) != once
    assert len(numbers._recent) + len(numbers._earlier) <= 22
