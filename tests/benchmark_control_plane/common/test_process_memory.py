"""Memory of a process with its children, which count from their start and no longer when they have ended."""

import mmap
import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

from backends.device.probe import UNCOUNTED_NAME
from benchmark_control_plane.common.process_memory import GRAMMARS, OTHER, SERVER, TreeMemory

SIZE_MB = 64


def hold(pipe: Connection) -> None:
    """Says that it runs, and holds memory from one message to the next."""
    pipe.send(0)
    pipe.recv()
    held = b"x" * (SIZE_MB * 1_000_000)
    pipe.send(len(held))
    pipe.recv()


def test_the_peak_has_what_a_child_held():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=hold, args=(theirs,))
    child.start()
    ours.recv()
    memory = TreeMemory(child.pid)
    memory.reset_peak()
    ours.send(None)
    ours.recv()
    memory.sample()
    assert memory.growth_mb() >= 0.9 * SIZE_MB
    ours.send(None)
    child.join()
    assert memory.growth_mb() < 0
    assert memory.peak_growth_mb() >= 0.9 * SIZE_MB


def hold_as_compiler(pipe: Connection) -> None:
    """`hold` in a process of the name that the compilers of grammars have."""
    Path("/proc/self/comm").write_text(UNCOUNTED_NAME, encoding="ascii")
    hold(pipe)


def test_memory_is_named_by_process():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=hold_as_compiler, args=(theirs,))
    child.start()
    ours.recv()
    memory = TreeMemory(os.getpid())
    memory.reset_peak()
    ours.send(None)
    ours.recv()
    grown = memory.growth_by_process()
    assert grown[GRAMMARS] >= 0.9 * SIZE_MB and grown[SERVER] < 0.5 * SIZE_MB
    memory.sample()
    ours.send(None)
    child.join()
    assert memory.growth_by_process()[GRAMMARS] < 0
    assert memory.peak_growth_by_process()[GRAMMARS] >= 0.9 * SIZE_MB
    # Python's resource tracker.
    assert grown.keys() <= {GRAMMARS, SERVER, OTHER}


def map_file(path: Path, pipe: Connection) -> None:
    """Reads all pages of a file, and keeps them mapped until a message comes."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        pipe.send(mapped.find(b"x"))
        pipe.recv()


def test_the_end_of_another_program_with_the_same_libraries_is_no_growth(tmp_path: Path):
    file = tmp_path / "library"
    file.write_bytes(bytes(SIZE_MB * 1_000_000))
    context = multiprocessing.get_context("spawn")
    pipes, programs = [], []
    for _ in range(2):
        ours, theirs = context.Pipe()
        program = context.Process(target=map_file, args=(file, theirs))
        program.start()
        assert ours.recv() == -1
        pipes.append(ours)
        programs.append(program)
    memory = TreeMemory(programs[0].pid)
    pipes[1].send(None)
    programs[1].join()
    assert memory.growth_mb() < 0.1 * SIZE_MB
    pipes[0].send(None)
    programs[0].join()


def test_memory_that_a_fork_shares_counts_once():
    held = b"x" * (SIZE_MB * 1_000_000)
    memory = TreeMemory(os.getpid())
    memory.reset_peak()
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        # Ends at the end of the stream.
        os.close(theirs)
        os.read(ours, 1)
        os._exit(0)
    try:
        memory.sample()
        assert memory.peak_growth_mb() < 0.5 * SIZE_MB, len(held)
    finally:
        os.close(theirs)
        os.close(ours)
        os.waitpid(child, 0)
