"""The process that compiles grammars: one child for each, ended by the kernel at its limits."""

import asyncio
import ctypes
import multiprocessing
import os
import signal
import socket
import threading
from concurrent.futures import CancelledError
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from backends.vllm.grammar_compiler import CompileLimits, serve, unsupported_part
from backends.vllm.grammar_limits import GrammarLimits
from backends.vllm.grammar_process import GrammarProcess, _exchange
from controlplane.core.errors import BackendDown, BackendFailed

SECONDS, MEMORY_BYTES = 0.3, 128 * 2**20
LIMITS = GrammarLimits(
    max_grammar=1, max_schema=1, max_grammar_properties=1, max_grammar_choices=1, max_grammar_repeat=1,
    grammar_ms=1, grammar_step_ms=1, grammar_memory=1,
)  # fmt: skip


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
    serve(listener, parent, check, CompileLimits(SECONDS, MEMORY_BYTES))


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


@pytest.mark.long
@pytest.mark.parametrize(
    ("do", "expected"),
    [
        # On a busy machine the limit of wall time, which refuses the grammar likewise, may come first.
        ("spin", {signal.SIGPROF, signal.SIGALRM}),
        ("spin in a token", {signal.SIGVTALRM, signal.SIGALRM}),
        ("wait", {signal.SIGALRM}),
        ("allocate", {0}),
        ("crash", {signal.SIGSEGV}),
        ("raise", {0}),
    ],
)
async def test_a_child_beyond_a_limit_is_ended_and_the_signal_reported(tmp_path, do: str, expected: set[int]):
    async with served(tmp_path) as (path, process):
        assert (await _exchange(path, {"do": do}))["signal"] in expected
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


async def test_a_process_that_cannot_be_started_fails_the_grammars_only(monkeypatch):
    def start(process):
        raise OSError("no memory for a process")

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", start)
    one = GrammarProcess(LIMITS)
    one.start()
    with pytest.raises(BackendFailed, match="ended while it loaded"):
        await one.ready()
    await one.stop()


class Loaded(GrammarProcess):
    """Has its compilers loaded as soon as the engine's configuration is stated, which is their socket."""

    def _load(self) -> str:
        try:
            return str(self._config.result())
        except CancelledError:
            raise BackendFailed("ended while it loaded") from None


@pytest.mark.parametrize("stage", ["loading", "compiling"])
async def test_a_grammar_whose_engine_stops_meanwhile_finds_it_down(tmp_path, stage: str):
    """It is a 503 and not a 500: the engine is restarted, and the request can be sent again."""
    one, path = Loaded(LIMITS), str(tmp_path / "socket")

    async def stop(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        await one.stop()
        writer.close()

    async with await asyncio.start_unix_server(stop, path):
        one.start()
        compiling = asyncio.create_task(one.compile({"json": "{}"}))
        await asyncio.sleep(0)
        if stage == "compiling":
            one.configure(path)
        else:
            await one.stop()
        with pytest.raises(BackendDown):
            await compiling


class SlowToEnd:
    """A process that ends once the event loop has run."""

    def __init__(self) -> None:
        self.may_end, self.has_ended = threading.Event(), False

    def kill(self) -> None:
        pass

    def join(self) -> None:
        self.has_ended = self.may_end.wait(5)


async def test_the_event_loop_runs_while_the_process_ends(tmp_path):
    """Other requests are served while an engine stops; the kernel takes a while to free its memory."""
    one, process = Loaded(LIMITS), SlowToEnd()
    one.start()
    one.configure(str(tmp_path / "socket"))
    await one.ready()
    one._process = process
    asyncio.get_running_loop().call_later(0.01, process.may_end.set)
    await one.stop()
    assert process.has_ended


async def test_the_process_ends_with_its_parent(tmp_path):
    async with served(tmp_path):
        pass
    assert multiprocessing.active_children() == []


TAGS = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
SHOWN = '{"type": "array", "items": {"type": "string"}, "uniqueItems": true}'


@pytest.mark.long
@pytest.mark.parametrize(
    ("schema", "found"),
    [
        (
            {"type": "object", "properties": {"a": {"type": "string"}, "tags": TAGS}},
            f"properties.tags: {SHOWN}",
        ),
        ({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/t"}], "$defs": {"t": TAGS}}, f"$defs.t: {SHOWN}"),
        ({"anyOf": [{"type": "null"}, TAGS]}, f"anyOf[1]: {SHOWN}"),
        (TAGS, f"the schema itself: {SHOWN}"),
    ],
)
def test_the_part_of_a_schema_that_xgrammar_cannot_enforce_is_named(schema: dict, found: str):
    assert unsupported_part(schema) == f" They are in {found}"


@pytest.mark.long
@pytest.mark.parametrize("schema", [True, {}, {"type": "array", "items": {"type": "string"}}])
def test_a_schema_that_xgrammar_enforces_has_no_such_part(schema: object):
    assert unsupported_part(schema) == ""
