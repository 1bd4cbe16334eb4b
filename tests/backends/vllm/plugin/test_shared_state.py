"""The shared memory between the engine's process and the server."""

import multiprocessing
from pathlib import Path

import pytest

from backends.vllm.plugin.preemption_log import KEPT, ROW_SIZE
from backends.vllm.plugin.shared_state import EngineFacts, SharedState, TornRead, key_of


def facts(step: int) -> EngineFacts:
    return EngineFacts(
        at_ns=step,
        step=step,
        step_ns=6,
        prompt_token_ns=7,
        total=9,
        quota=7,
        use_ceiling=8,
        used=step % 8,
        ceded=1,
        running=2,
        waiting=3,
        preemptions=4,
        recompute_tokens=1 << 33,
        waited_ns=1 << 34,
    )


def preempted_in(step: int) -> bytes:
    return bytes([step % 256]) * ROW_SIZE * (step % (KEPT + 1))


def write_many(path: Path, steps: int) -> None:
    state = SharedState(path)
    for step in range(1, steps + 1):
        # A consistent read has the numbers of one step only.
        state.write(facts(step), *[[step] * (step % 50)] * 2, preempted_in(step))


def test_a_read_returns_what_was_written(tmp_path):
    state = SharedState.create(tmp_path / "state")
    assert (state.read(), state.newest()) == (None, 0)
    state.write(facts(5), [key_of("a"), key_of("b")], [2, 1])
    reading = state.read()
    assert reading.facts == facts(5)
    assert reading.rows == ((key_of("a"), 2), (key_of("b"), 1))
    assert (reading.preempted, state.newest()) == (b"", 1)
    state.write(facts(6), *[[1] * 4_097] * 2, preempted_in(KEPT))
    assert state.read().preempted == preempted_in(KEPT)


def test_the_contention_flag_is_independent_of_the_state(tmp_path):
    state = SharedState.create(tmp_path / "state")
    writer = SharedState(tmp_path / "state")
    assert not state.is_device_shared
    writer.is_device_shared = True
    state.write(facts(1), *[[1] * 4_097] * 2)
    assert state.is_device_shared and state.passes_begun == 1
    writer.is_device_shared = False
    assert not state.is_device_shared
    for _ in range(256):
        writer.is_device_shared = True
    assert state.passes_begun == 1
    assert state.read().facts == facts(1)


def read_along(path: Path, writer, until: int) -> set[int]:
    """Starts the writer and reads until step `until` or the writer's end; returns the steps seen."""
    state = SharedState.create(path)
    writer.start()
    seen = {0}
    try:
        while max(seen) < until:
            # Checked before the read, so that the last write is read as well.
            is_writing = writer.is_alive()
            reading = state.read()
            if reading is not None:
                step = reading.facts.step
                seen.add(step)
                assert reading.facts == facts(step)
                assert reading.rows == ((step, step),) * (step % 50)
                assert reading.preempted == preempted_in(step)
            if not is_writing:
                break
    finally:
        writer.join(30)
    return seen


def a_writer(path: Path, steps: int):
    return multiprocessing.get_context("spawn").Process(target=write_many, args=(path, steps), daemon=True)


def test_a_reader_in_another_process_never_sees_a_torn_state(tmp_path):
    path, steps = tmp_path / "state", 20_000
    writer = a_writer(path, steps)
    seen = read_along(path, writer, steps)
    assert (max(seen), writer.exitcode) == (steps, 0)
    assert len(seen) > 10


def test_a_writer_that_exits_does_not_block_readers(tmp_path):
    path = tmp_path / "state"
    assert max(read_along(path, a_writer(path, 5), until=6)) == 5


def test_a_writer_that_died_while_writing_leaves_the_previous_step(tmp_path):
    path = tmp_path / "state"
    state = SharedState.create(path)
    state.write(facts(1), [], [])
    state.write(facts(2), [7], [7])
    content = bytearray(path.read_bytes())
    content[content.index((7).to_bytes(8, "little"))] = 8
    path.write_bytes(content)
    assert SharedState(path).read().facts == facts(1)


def test_a_state_without_a_valid_half_raises_torn_read(tmp_path):
    path = tmp_path / "state"
    SharedState.create(path).write(facts(1), [], [])
    content = bytearray(path.read_bytes())
    content[content.index((3).to_bytes(4, "little"))] ^= 255
    path.write_bytes(content)
    with pytest.raises(TornRead, match="no half"):
        SharedState(path).read()
