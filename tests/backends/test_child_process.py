"""Processes that are started without a fork of this one."""

import asyncio
import os
import signal
import sys

import uvloop

from backends.child_process import ChildProcess
from backends.embedding.handshake import EncoderOptions
from backends.embedding.worker_link import WorkerLink


def started(program: str, *descriptors: int) -> ChildProcess:
    return ChildProcess(
        [sys.executable, "-c", program], descriptors=descriptors, environment={"VARIABLE": "value"}
    )


async def test_it_has_its_environment_its_descriptors_and_no_input():
    ours, theirs = os.pipe()
    written = f"os.write({theirs}, os.environ['VARIABLE'].encode())"
    program = f"import os, sys; {written}; sys.exit(sys.stdin.read() or 7)"
    child = started(program, theirs)
    os.close(theirs)
    async with asyncio.timeout(20):
        assert await child.wait() == child.returncode == 7
    assert os.read(ours, 100) == b"value"
    os.close(ours)
    child.kill()


async def test_a_killed_process_states_the_signal():
    child = started("import time; time.sleep(60)")
    assert child.returncode is None
    child.kill()
    async with asyncio.timeout(20):
        assert await child.wait() == -signal.SIGKILL


def test_a_worker_is_started_without_a_fork_of_the_server():
    """A fork copies the page tables of the server, on its event loop; uvloop's own processes are forked."""
    forks: list[None] = []
    os.register_at_fork(before=lambda: forks.append(None))

    async def start() -> str:
        link = await WorkerLink.open(EncoderOptions("none", batch_tokens=1), stall_seconds=60)
        return await link.close()

    assert uvloop.run(start()) == "exit status 0"
    assert forks == []
