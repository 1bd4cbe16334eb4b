"""The simulated scheduler completes every sequence, conserves blocks and preempts the newest."""

from hypothesis import given
from hypothesis import strategies as st

from backends.cost_models.step_time import StepLoad
from backends.simulated.continuous_batching import SimulatedScheduler, SimulatedSequence


def drain(engine: SimulatedScheduler[SimulatedSequence]) -> list[StepLoad]:
    loads = []
    while True:
        load = StepLoad()
        if not engine.plan(load):
            return loads
        loads.append(load)
        engine.complete()
        assert len(loads) < 100_000


def test_prompt_chunks_add_up_to_the_squared_length():
    engine: SimulatedScheduler[SimulatedSequence] = SimulatedScheduler(
        blocks=None, block_tokens=16, max_running=4, step_tokens=100
    )
    engine.waiting.append(SimulatedSequence(prompt=250, output=3))
    loads = drain(engine)
    assert [load.prefill_tokens for load in loads] == [100, 100, 50, 0, 0]
    assert [load.decodes for load in loads] == [0, 0, 0, 1, 1]
    assert sum(load.squares for load in loads) == 250**2
    assert [load.cells for load in loads] == [0, 100, 200, 250, 251]


def test_decodes_share_a_step_with_a_prompt_chunk():
    engine: SimulatedScheduler[SimulatedSequence] = SimulatedScheduler(
        blocks=None, block_tokens=16, max_running=4, step_tokens=64
    )
    first, second = SimulatedSequence(prompt=10, output=8), SimulatedSequence(prompt=300, output=1)
    engine.waiting.append(first)
    engine.plan(StepLoad())
    engine.complete()
    engine.waiting.append(second)
    load = StepLoad()
    engine.plan(load)
    assert (load.decodes, load.prefill_tokens) == (1, 63)


def test_the_newest_sequence_is_preempted_and_recomputes():
    # Five blocks of 4: 8 + 8 prompt tokens fill four, and both grow into a third block.
    engine: SimulatedScheduler[SimulatedSequence] = SimulatedScheduler(
        blocks=5, block_tokens=4, max_running=4, step_tokens=64
    )
    old, new = SimulatedSequence(prompt=8, output=6), SimulatedSequence(prompt=8, output=6)
    engine.waiting.extend([old, new])
    loads = drain(engine)
    assert (old.preemptions, new.preemptions, engine.recompute_tokens) == (0, 1, 8)
    assert (old.produced, new.produced) == (6, 6)
    # Two prompts, then the second prompt again with its output so far.
    assert [load.prefill_tokens for load in loads if load.prefill_tokens] == [16, 9]
    assert engine.free_blocks == 5


def test_a_sequence_removed_during_a_step_gets_no_token():
    engine: SimulatedScheduler[SimulatedSequence] = SimulatedScheduler(
        blocks=8, block_tokens=4, max_running=4, step_tokens=64
    )
    stays, leaves = SimulatedSequence(prompt=4, output=2), SimulatedSequence(prompt=4, output=2)
    engine.waiting.extend([stays, leaves])
    engine.plan(StepLoad())
    engine.remove(leaves)
    assert engine.complete() == [stays]
    assert leaves.produced == 0
    drain(engine)
    assert engine.free_blocks == 8


@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=30),
    blocks=st.integers(20, 60),
    block_tokens=st.integers(4, 16),
    max_running=st.integers(1, 12),
    step_tokens=st.integers(1, 200),
)
def test_every_sequence_finishes_and_every_block_is_freed(
    sizes, blocks, block_tokens, max_running, step_tokens
):
    engine: SimulatedScheduler[SimulatedSequence] = SimulatedScheduler(
        blocks=blocks, block_tokens=block_tokens, max_running=max_running, step_tokens=step_tokens
    )
    engine.waiting.extend(SimulatedSequence(prompt, output) for prompt, output in sizes)
    sequences = list(engine.waiting)
    computed = 0
    while True:
        load = StepLoad()
        if not engine.plan(load):
            break
        assert load.prefill_tokens + load.decodes <= step_tokens
        assert len(engine.running) <= max_running
        held = sum(sequence.blocks for sequence in engine.running)
        assert engine.free_blocks == blocks - held >= 0
        engine.complete()
        computed += load.prefill_tokens + load.decodes
    assert [sequence.produced for sequence in sequences] == [output for _, output in sizes]
    assert engine.free_blocks == blocks
    least = sum(prompt + output - 1 for prompt, output in sizes)
    assert computed == least + engine.recompute_tokens
    assert (engine.recompute_tokens > 0) == (engine.preemptions > 0)
