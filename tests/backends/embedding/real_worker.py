"""Shared by tests of the real worker: inputs, and ways to kill or constrain it."""

import asyncio
import contextlib
import os
import resource
import select
import signal
from pathlib import Path
from random import Random

from backends.embedding.client import WorkerEmbedder
from controlplane.core.request import Kind
from tests.example_requests import a_request

REQUEST = a_request(kind=Kind.EMBED, model="minilm")
BOUND_SECONDS = 120
BUDGET = 4_096
CAN_MEASURE = Path("/proc/self/clear_refs").exists()


async def embed(embedder: WorkerEmbedder, inputs, *, deadline=None):
    return await asyncio.wait_for(embedder.embed(REQUEST, inputs, deadline=deadline), BOUND_SECONDS)


def until_gone(pid: int) -> bool:
    """Whether the process ended within the bound; it need not be a child."""
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([watch], [], [], BOUND_SECONDS)[0])
    finally:
        os.close(watch)


def kill_worker(embedder: WorkerEmbedder) -> int:
    pid = embedder.worker_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return pid


def scheduling_of(embedder: WorkerEmbedder) -> set[int]:
    """Scheduling policies of the worker's threads."""
    threads = Path(f"/proc/{embedder.worker_pid}/task").iterdir()
    return {os.sched_getscheduler(int(thread.name)) for thread in threads}


def resident_bytes(embedder: WorkerEmbedder) -> int:
    return int(Path(f"/proc/{embedder.worker_pid}/statm").read_text().split()[1]) * resource.getpagesize()


@contextlib.contextmanager
def address_space_limited(embedder: WorkerEmbedder, *, spare_bytes: int):
    """Limits the current worker's address space to what it uses plus `spare_bytes`."""
    pid = embedder.worker_pid
    assert pid is not None
    before = resource.prlimit(pid, resource.RLIMIT_AS)
    in_use = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (in_use + spare_bytes, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_AS, before)


def heavy_inputs(count: int = 64) -> list[list[int]]:
    """Seconds of work on one core, in several batches."""
    return [[101, *[2000 + i] * 254, 102] for i in range(count)]


def sentences(count: int) -> list[str]:
    random = Random(7)
    words = ["memory", "token", "deadline", "queue", "Überlast", "two", "kinds", "of", "work", "✓"]
    return [" ".join(random.choices(words, k=random.randint(0, 90))) for _ in range(count)]
