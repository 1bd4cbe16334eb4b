"""The process that compiles grammars: one child for each, ended by the kernel at its limits."""

import asyncio
import ctypes
import multiprocessing
import os
import signal
import socket
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from backends.vllm.grammar_compiler import MEMORY_BYTES, serve
from backends.vllm.grammar_process import _exchange

SECONDS = 0.3


def check(stated):
    """Stands in for the compiler, which is vLLM's."""
    match stated["do"]:
        case "spin":
            while True:
                pass
        case "wait":
            signal.pause()
        case "allocate":
            return {"length": len(bytearray(2 * MEMORY_BYTES))}
        case "crash":
            ctypes.string_at(0)
        case "raise":
            raise RuntimeError("a defect of the compiler")
        case "read":
            Path(stated["path"]).read_bytes()
        case "spin in a token":
            signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS / 2)
            while True:
                pass
    return {"pid": os.getpid(), **stated}


def run(parent, path):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    parent.send(None)
    serve(listener, parent, check, cpu_seconds=SECONDS)


@asynccontextmanager
async def served(folder):
    context, path = multiprocessing.get_context("spawn"), str(folder / "socket")
    ours, theirs = context.Pipe()
    process = context.Process(target=run, args=(theirs, path))
    process.start()
    theirs.close()
    assert ours.recv() is None
    try:
        yield path, process
    finally:
        ours.close()
        process.join(10)
        assert process.exitcode == 0


@pytest.mark.parametrize(
    ("do", "expected"),
    [
        ("spin", signal.SIGPROF),
        ("spin in a token", signal.SIGVTALRM),
        ("wait", signal.SIGALRM),
        ("allocate", 0),
        ("crash", signal.SIGSEGV),
        ("raise", 0),
    ],
)
async def test_a_child_beyond_a_limit_is_ended_and_the_signal_reported(tmp_path, do: str, expected: int):
    async with served(tmp_path) as (path, process):
        assert await _exchange(path, {"do": do}) == {"signal": expected}
        again = await _exchange(path, {"do": "answer"})
        assert again["do"] == "answer" and again["pid"] != process.pid


async def test_children_run_side_by_side(tmp_path):
    """A reply ends although other children, forked before and after it, have not ended."""
    async with served(tmp_path) as (path, _):
        pipes, waiting = [tmp_path / "first", tmp_path / "second"], []
        for release in pipes:
            os.mkfifo(release)
            waiting.append(asyncio.create_task(_exchange(path, {"do": "read", "path": str(release)})))
            assert (await _exchange(path, {"do": "answer"}))["do"] == "answer"
        assert not any(task.done() for task in waiting)
        for release in pipes:
            # Opening it waits for its reader.
            await asyncio.to_thread(release.write_text, "go")
        assert {reply["do"] for reply in await asyncio.gather(*waiting)} == {"read"}


async def test_a_request_may_be_large(tmp_path):
    async with served(tmp_path) as (path, _):
        text = "x" * 1_000_000
        assert (await _exchange(path, {"do": "answer", "text": text}))["text"] == text


async def test_the_process_ends_with_its_parent(tmp_path):
    async with served(tmp_path):
        pass
    assert multiprocessing.active_children() == []
