"""The board between the engine's process and ours."""

import multiprocessing
from pathlib import Path

import pytest

from backends.vllm.plugin.shared_state import EngineFacts, SharedState, TornRead, key_of


def facts(step: int) -> EngineFacts:
    return EngineFacts(
        at_ns=step,
        step=step,
        step_ns=6,
        prompt_token_ns=7,
        total=9,
        quota=8,
        used=step % 8,
        ceded=1,
        running=2,
        waiting=3,
        preemptions=4,
        recompute_tokens=1 << 33,
        waited_ns=1 << 34,
    )


def write_many(path: Path, steps: int) -> None:
    board = SharedState(path)
    for step in range(1, steps + 1):
        # Every reading must be of one step: all numbers agree with its own.
        board.write(facts(step), *[[step] * (step % 50)] * 3)


def test_what_is_written_is_read(tmp_path):
    board = SharedState.create(tmp_path / "board")
    assert (board.read(), board.newest()) == (None, 0)
    board.write(facts(5), [key_of("a"), key_of("b")], [17, 3], [2, 1])
    reading = board.read()
    assert reading.facts == facts(5)
    assert reading.of("a") == (key_of("a"), 17, 2)
    assert reading.of("nobody") is None
    assert board.newest() == 1


def test_the_other_side_says_whether_the_device_is_shared(tmp_path):
    board = SharedState.create(tmp_path / "board")
    writer = SharedState(tmp_path / "board")
    assert not board.is_device_shared
    writer.is_device_shared = True
    board.write(facts(1), *[[1] * 4_097] * 3)
    assert board.is_device_shared
    writer.is_device_shared = False
    assert not board.is_device_shared
    assert board.read().facts == facts(1)


def read_along(path: Path, writer, until: int) -> set[int]:
    """Starts the writer and reads what it writes, until a step or its end. Returns the steps seen."""
    board = SharedState.create(path)
    writer.start()
    seen = {0}
    try:
        while max(seen) < until:
            # Asked before the reading: what it wrote last is read once more.
            is_writing = writer.is_alive()
            reading = board.read()
            if reading is not None:
                step = reading.facts.step
                seen.add(step)
                assert reading.facts == facts(step)
                assert reading.rows == ((step, step, step),) * (step % 50)
            if not is_writing:
                break
    finally:
        writer.join(30)
    return seen


def a_writer(path: Path, steps: int):
    return multiprocessing.get_context("spawn").Process(target=write_many, args=(path, steps), daemon=True)


def test_a_reader_in_another_process_never_sees_half_a_step(tmp_path):
    path, steps = tmp_path / "board", 20_000
    writer = a_writer(path, steps)
    seen = read_along(path, writer, steps)
    assert (max(seen), writer.exitcode) == (steps, 0)
    assert len(seen) > 10


def test_a_writer_that_ends_early_holds_up_no_reader(tmp_path):
    path = tmp_path / "board"
    assert max(read_along(path, a_writer(path, 5), until=6)) == 5


def test_a_writer_that_died_while_writing_leaves_the_step_before(tmp_path):
    path = tmp_path / "board"
    board = SharedState.create(path)
    board.write(facts(1), [], [], [])
    board.write(facts(2), [7], [7], [7])
    content = bytearray(path.read_bytes())
    content[content.index((7).to_bytes(8, "little"))] = 8
    path.write_bytes(content)
    assert SharedState(path).read().facts == facts(1)


def test_a_board_of_which_nothing_is_whole_is_noticed(tmp_path):
    path = tmp_path / "board"
    SharedState.create(path).write(facts(1), [], [], [])
    content = bytearray(path.read_bytes())
    content[content.index((3).to_bytes(4, "little"))] ^= 255
    path.write_bytes(content)
    with pytest.raises(TornRead, match="no half"):
        SharedState(path).read()
