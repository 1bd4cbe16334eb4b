"""Sharing of blocks between running requests, against a count over all blocks from scratch."""

from collections import Counter
from dataclasses import dataclass
from itertools import count

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from backends.vllm.plugin.prefix_sharing import SharedBlocks
from controlplane.policy.engine.request_state import RequestState
from tests.example_requests import a_request

BLOCK_TOKENS = 16


@dataclass
class Block:
    block_id: int
    ref_cnt: int = 0


def a_state(name: str) -> RequestState:
    return RequestState(a_request(name, 100, 10), 10)


class Cache(RuleBasedStateMachine):
    """Requests start on a prefix of another's blocks, alone or several in one step, grow and leave."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[RequestState] = []
        self.blocks: dict[str, list[Block]] = {}
        self.shared = SharedBlocks(self.blocks, BLOCK_TOKENS)
        self.numbers, self.names = count(), count()

    def grown(self, prefix: list[Block], more: int) -> list[Block]:
        own = [Block(next(self.numbers)) for _ in range(more)]
        for block in (found := [*prefix, *own]):
            block.ref_cnt += 1
        return found

    @rule(starts=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6), st.integers(1, 5)), max_size=4))
    def start(self, starts):
        """All requests of a step have their blocks before the first is added."""
        new = []
        for of, taken, more in starts:
            others = self.running + new
            prefix = self.blocks[others[of % len(others)].request.id][:taken] if others else []
            new.append(state := a_state(f"r{next(self.names)}"))
            self.blocks[state.request.id] = self.grown(prefix, more)
        for state in new:
            self.shared.start(state, lambda: self.running)
            self.running.append(state)

    @precondition(lambda self: self.running)
    @rule(at=st.integers(0, 50), more=st.integers(1, 3))
    def grow(self, at, more):
        state = self.running[at % len(self.running)]
        self.blocks[state.request.id] += self.grown([], more)

    @precondition(lambda self: self.running)
    @rule(at=st.integers(0, 50))
    def leave(self, at):
        state = self.running.pop(at % len(self.running))
        self.shared.leave(state)
        for block in self.blocks.pop(state.request.id):
            block.ref_cnt -= 1
        assert (state.shared, state.carried, state.cached) == (0, 0, 0)

    @invariant()
    def a_block_counts_once(self):
        held = {state: len(self.blocks[state.request.id]) - state.shared for state in self.running}
        used = {block.block_id for blocks in self.blocks.values() for block in blocks}
        assert sum(held.values()) + sum(state.carried for state in self.running) == len(used)
        for state in self.running:
            assert 0 <= state.carried <= state.shared

    @invariant()
    def held_is_what_a_preemption_frees(self):
        readers = Counter(block.block_id for blocks in self.blocks.values() for block in blocks)
        for state in self.running:
            shared = sum(readers[block.block_id] > 1 for block in self.blocks[state.request.id])
            assert state.shared == shared
            assert state.cached == shared * BLOCK_TOKENS
        assert len(self.shared) == sum(number > 1 for number in readers.values())


TestCache = Cache.TestCase


def test_a_shared_block_is_carried_by_the_reader_that_started_last():
    blocks = {"a": [Block(0, 2), Block(1, 2), Block(2, 1)], "b": [], "c": []}
    blocks["b"] = [*blocks["a"][:2], Block(3, 1)]
    shared, first, second = SharedBlocks(blocks, BLOCK_TOKENS), a_state("a"), a_state("b")
    shared.start(first, list)
    shared.start(second, lambda: [first])
    assert [(s.shared, s.carried) for s in (first, second)] == [(2, 0), (2, 2)]
    shared.leave(second)
    assert (first.shared, first.carried, len(shared)) == (0, 0, 0)
