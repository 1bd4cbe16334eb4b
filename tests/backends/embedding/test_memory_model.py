"""The memory estimate bounds every pass that the batcher forms."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.embedding.batcher import BatchQueue
from backends.embedding.memory_model import EmbeddingMemory, MemoryPoint, fit_memory_model, prior
from tests.backends.embedding.test_batcher import next_batch

MEMORIES = st.builds(EmbeddingMemory, st.integers(0, 10**6), st.floats(0, 10**5), st.integers(1, 4_096))


@given(
    MEMORIES,
    st.lists(st.integers(1, 300), min_size=1, max_size=30),
    st.integers(1, 2_000),
    st.integers(0, 500),
)
def test_the_estimate_bounds_every_pass_of_a_call(memory, lengths, budget, start_tokens):
    estimate = memory.batch_bytes(lengths, budget_tokens=budget)
    queue: BatchQueue[None] = BatchQueue(budget, start_tokens)
    queue.put(None, lengths, deadline=None)
    while (batch := next_batch(queue)) is not None:
        assert memory.pass_bytes(len(batch.items), batch.items[0].tokens) <= estimate
    assert estimate <= memory.workspace_bytes(budget_tokens=budget, max_input_tokens=300)


def test_prior_counts_eight_hidden_vectors_and_one_inner_vector_per_token():
    minilm = {"hidden_size": 384, "intermediate_size": 1_536}
    memory = prior(minilm, bytes_per_element=4, dimension=384)
    assert memory.pass_bytes(2, 100) == 4 * (8 * 384 + 1_536) * 200 + 4 * 2 * 384


POINTS = st.lists(
    st.builds(MemoryPoint, st.integers(1, 64), st.integers(1, 512), st.integers(0, 10**9)),
    min_size=2,
    unique_by=lambda p: p.tokens,
)


@given(POINTS, st.integers(1, 1_024))
def test_fit_bounds_every_measured_point(points, dimension):
    memory = fit_memory_model(points, dimension=dimension)
    for point in points:
        assert memory.pass_bytes(point.inputs, point.padded_length) >= point.peak_bytes - 1


def test_fit_recovers_the_generating_line():
    truth = EmbeddingMemory(1_000, 50.0, 8)
    shapes = [(1, 8), (4, 64), (16, 128)]
    found = fit_memory_model([MemoryPoint(n, w, truth.pass_bytes(n, w)) for n, w in shapes], dimension=8)
    assert found.per_token == pytest.approx(50.0, rel=0.01)
    assert found.base == pytest.approx(1_432, rel=0.01)


@given(MEMORIES, st.integers(0, 10**9))
def test_max_tokens_is_the_largest_pass_within_the_bytes(memory, limit):
    tokens = memory.max_tokens(limit)
    assert tokens == 0 or memory.pass_bytes(tokens, 1) <= limit + 1
    assert memory.pass_bytes(tokens + 2, 1) >= limit or memory.base > limit


@given(MEMORIES, st.builds(MemoryPoint, st.integers(1, 64), st.integers(1, 512), st.integers(0, 10**9)))
def test_raised_model_covers_the_measured_pass(memory, point):
    before = memory.pass_bytes(point.inputs, point.padded_length)
    raised = memory.raised_to_cover(point)
    assert raised.pass_bytes(point.inputs, point.padded_length) >= max(before, point.peak_bytes) - 1


def test_a_fit_needs_two_points_of_different_size():
    with pytest.raises(ValueError, match="two passes of different size are needed"):
        fit_memory_model([MemoryPoint(1, 8, 100)], dimension=4)


def test_an_empty_batch_takes_no_bytes():
    assert EmbeddingMemory(100, 1.0, 4).batch_bytes([], budget_tokens=10) == 0
