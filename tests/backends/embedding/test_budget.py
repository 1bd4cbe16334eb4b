"""The tightest bound of a pass applies, and the bound after out of memory recovers gradually."""

from hypothesis import given
from hypothesis import strategies as st

from backends.embedding.budget import PassBudget
from backends.embedding.memory_model import EmbeddingMemory
from backends.embedding.time_model import ObservedTime, PassTime

MEMORY = EmbeddingMemory(1_000, 100.0, 4)
TIME = PassTime(0.001, 1e-5, 0.0)


def budget(full_tokens: int = 1_600, *, lanes: int = 1, limit_bytes: int | None = None) -> PassBudget:
    found = PassBudget(full_tokens, lanes, MEMORY, ObservedTime(TIME))
    found.bytes = limit_bytes
    return found


@given(st.integers(1, 5_000), st.integers(1, 4), st.none() | st.integers(0, 10**6), st.integers(1, 500))
def test_passes_of_several_inputs_respect_every_bound(full, lanes, limit_bytes, longest):
    found = budget(full, lanes=lanes, limit_bytes=limit_bytes)
    most = found.max_inputs(longest)
    assert most >= 1
    if most > 1:
        assert most * longest <= full
        assert limit_bytes is None or lanes * MEMORY.pass_bytes(most, longest) <= limit_bytes


def test_out_of_memory_halves_the_bound_and_large_passes_raise_it():
    found = budget(1_600)
    found.record_out_of_memory(1_600)
    assert found.tokens == 800
    found.record_out_of_memory(800)
    assert found.tokens == 400
    found.record_success(100)
    assert found.tokens == 400, "a small pass must not raise the bound"
    seen = []
    while found.tokens < 1_600:
        seen.append(found.tokens)
        found.record_success(found.tokens)
    assert len(seen) > 16
    assert seen == sorted(seen)


def test_a_restarted_worker_inherits_learned_bounds():
    before = budget(1_600, limit_bytes=10**6)
    before.record_out_of_memory(1_600)
    after = budget(1_600)
    after.inherit(before)
    assert (after.tokens, after.bytes) == (800, 10**6)


def test_lanes_share_the_bytes():
    one, two = budget(lanes=1, limit_bytes=70_000), budget(lanes=2, limit_bytes=70_000)
    assert one.tokens == MEMORY.max_tokens(70_000)
    assert two.tokens == MEMORY.max_tokens(35_000)
    assert two.fits_with([35_000, 35_000], 35_000), "the third pass waits at the worker"
    assert not two.fits_with([35_000], 40_000)
    assert two.fits_with([], 10**9), "a pass alone is always allowed"


def test_predicted_time_sums_over_passes_and_lanes():
    one = budget(1_000)
    assert one.seconds([100] * 25) == 2 * TIME.seconds(10, 100) + TIME.seconds(5, 100)
    assert budget(1_000, lanes=2).seconds([100] * 20) == TIME.seconds(10, 100)
    assert one.seconds([]) == 0
