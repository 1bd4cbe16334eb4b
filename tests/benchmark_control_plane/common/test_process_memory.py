"""Memory of a process with its children, which count from their start and no longer when they have ended."""

import multiprocessing
import os
from multiprocessing.connection import Connection

from benchmark_control_plane.common.process_memory import TreeMemory, processes_of

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
    assert child.pid in set(processes_of(os.getpid()))
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
