"""The gate's prediction of the engine's prefix cache."""

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core import prefix_index
from controlplane.core.prefix_index import PrefixIndex

BLOCK = 4


def prompt(group: int, shared: int, own: int, number: int) -> list[int]:
    return [group] * shared + [1_000 + number] * own


def test_the_last_token_is_never_found():
    index = PrefixIndex(BLOCK, 100)
    assert [len(index.hashes(range(length))) for length in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]


def test_blocks_of_admitted_requests_are_in_use_and_stay_cached_afterwards():
    index = PrefixIndex(BLOCK, 100)
    first = index.hashes([7] * 20)
    assert index.find(first) == (0, 0)
    index.admit("a", first)
    assert index.find(index.hashes([7] * 12 + [8] * 20)) == (3, 3)
    assert index.release("a") == {}
    assert index.find(first) == (4, 0)
    index.forget_unused()
    assert index.find(first) == (0, 0)


def test_the_least_recently_used_blocks_are_dropped_beyond_the_capacity():
    index = PrefixIndex(BLOCK, 6)
    for number in range(3):
        index.admit(f"r{number}", index.hashes([number] * 13))
        index.release(f"r{number}")
    assert [index.find(index.hashes([number] * 13)).cached for number in range(3)] == [0, 3, 3]
    # The end of a prefix is dropped first.
    index.admit("new", index.hashes([9] * 9))
    assert [index.find(index.hashes([number] * 13)).cached for number in range(3)] == [0, 1, 3]


steps = st.lists(
    st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 40), st.integers(1, 20)), max_size=40
)


@given(steps)
def test_each_used_block_is_paid_for_once(plan):
    index, alive = PrefixIndex(BLOCK, 10_000), OrderedDict()
    paid: dict[str, int] = {}
    for number, (is_new, group, shared, own) in enumerate(plan):
        if is_new or not alive:
            name, blocks = f"r{number}", index.hashes(prompt(group, shared, own, number))
            paid[name] = len(blocks) - index.find(blocks).used
            index.admit(name, blocks)
            alive[name] = blocks
        else:
            name, _ = alive.popitem(last=shared % 2 == 0)
            del paid[name]
            for heir, blocks in index.release(name).items():
                paid[heir] += blocks
        assert sum(paid.values()) == len({block for blocks in alive.values() for block in blocks})
        for name, blocks in alive.items():
            others = {block for other, held in alive.items() if other != name for block in held}
            used_by_others, paid_for = index.shared(name)
            assert used_by_others == len(others & set(blocks))
            assert 0 <= paid_for <= min(used_by_others, paid[name])
            # What a preemption would free is what only this request uses.
            assert paid[name] - paid_for == len(set(blocks) - others)


@pytest.mark.parametrize(("hashes", "kept"), [([5, 5, 7], 1), ([5, 7, 5, 8], 2), ([5, 7, 8], 3)])
def test_a_prompt_whose_blocks_have_one_hash_is_known_up_to_its_repetition(monkeypatch, hashes, kept):
    """A client can choose such token ids; releasing a block twice would fail."""
    monkeypatch.setattr(prefix_index, "block_hashes", lambda *_: hashes)
    index = PrefixIndex(BLOCK, 100)
    blocks = index.hashes([0] * 20)
    assert blocks == tuple(hashes[:kept])
    for name in "ab":
        index.admit(name, blocks)
    assert index.release("a") == {"b": kept}
    assert index.release("b") == {}
    assert (len(index), index.shared_blocks) == (kept, 0)
