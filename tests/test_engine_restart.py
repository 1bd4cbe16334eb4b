"""The complete server when its engine dies or hangs under load, during its start, and with restarts off."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
import yaml

from benchmark_control_plane.common.servers import Server, free_port, serving
from benchmark_control_plane.experiments.gate.overload import CONFIG

pytestmark = pytest.mark.engine

log = logging.getLogger(__name__)

CHATS = 12
CHAT = {"model": "tiny-llama", "prompt": "x" * 40, "max_tokens": 400, "stream": True, "ignore_eos": True}
BATCH = {"x-service-class": "batch"}
RECOVERY_SECONDS = 240.0


def config_file(folder: Path, **chat: object) -> Path:
    """The overload test's configuration with further keys of the chat model."""
    models = {**CONFIG["models"], "chat": {**CONFIG["models"]["chat"], **chat}}
    path = folder / "restart.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, "models": models}), encoding="utf-8")
    return path


def command_of(path: Path, port: int) -> list[str]:
    return [sys.executable, "-m", "controlplane.cli", "serve", str(path), "--port", str(port)]


def engine_of(server_id: int) -> int | None:
    """Process id of the server's EngineCore; None while there is none."""
    for thread in Path(f"/proc/{server_id}/task").iterdir():
        # A thread or process may end between its listing and its reading.
        with suppress(FileNotFoundError, ProcessLookupError):
            for child in (thread / "children").read_text().split():
                if "EngineCore" in Path(f"/proc/{child}/cmdline").read_text():
                    return int(child)
    return None


async def next_engine(server_id: int, but: int | None = None) -> int:
    end = time.monotonic() + 120
    while (found := engine_of(server_id)) is None or found == but:
        assert time.monotonic() < end, "no engine process"
        await asyncio.sleep(0.02)
    return found


def directory_of(server_id: int) -> Path:
    """The run directory of the server: it holds the lock file there open."""
    for descriptor in Path(f"/proc/{server_id}/fd").iterdir():
        # A file may be closed between its listing and its reading.
        with suppress(FileNotFoundError):
            opened = descriptor.readlink()
            if opened.parent.name.startswith("tandem-run-"):
                return opened.parent
    raise AssertionError(f"process {server_id} has no run directory")


async def until_one_streams(chats: list[asyncio.Task[str]], streams: asyncio.Event) -> None:
    async with asyncio.timeout(60):
        await streams.wait()
    assert not all(chat.done() for chat in chats)


async def chat(http: httpx.AsyncClient, streams: asyncio.Event | None = None) -> str:
    """How one streamed request ended, from the client's view; sets `streams` at its first token."""
    lines = []
    async with http.stream("POST", "/v1/completions", json=CHAT, headers=BATCH) as answer:
        async for line in answer.aiter_lines():
            lines.append(line)
            if streams is not None and answer.status_code == 200:
                streams.set()
    if answer.status_code == 429:
        # Not started when the engine hung, and the hang is noticed later than the longest waiting time.
        assert "queue_timeout" in lines[0]
        return "429"
    if answer.status_code != 200:
        assert answer.status_code == 503, lines
        is_retried = int(answer.headers.get("retry-after", 0)) >= 1
        assert is_retried != (answer.headers.get("x-should-retry") == "false")
        return "503" if is_retried else "503, no retry"
    ends = [line for line in lines if line == "data: [DONE]" or line == "event: error"]
    assert len(ends) == 1, lines[-3:]
    assert ends == ["data: [DONE]"] or "can safely be sent again" in "".join(lines[-3:])
    return "done" if ends == ["data: [DONE]"] else "error event"


async def embed_until(http: httpx.AsyncClient, stop: asyncio.Event) -> Counter[int]:
    statuses: Counter[int] = Counter()
    while not stop.is_set():
        body = {"model": "minilm", "input": ["a text about queues"] * 4}
        statuses[(await http.post("/v1/embeddings", json=body, headers=BATCH)).status_code] += 1
    return statuses


async def seconds_until_ready(http: httpx.AsyncClient, status: int, limit: float) -> float:
    started = time.monotonic()
    while (await http.get("/ready")).status_code != status:
        assert time.monotonic() - started < limit, f"/ready is not {status} after {limit} s"
        await asyncio.sleep(0.05)
    return time.monotonic() - started


async def metric(http: httpx.AsyncClient, name: str) -> float:
    lines = (await http.get("/metrics")).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


# The fault suite measures how soon `/ready` says so: within 2 s of a death (docs/component-results.md).
NOTICED_SECONDS = 30.0
SLOW = [pytest.param(fault, marks=pytest.mark.slow) for fault in ("hang", "kill twice")]


@pytest.mark.untimed
@pytest.mark.parametrize("fault", ["kill", *SLOW])
async def test_an_engine_that_dies_under_load_is_back_without_help(tmp_path: Path, fault: str):
    port = free_port()
    path = config_file(tmp_path, stall_ms=3_000)
    with serving(Server("tandem", command_of(path, port), port, "/ready"), tmp_path / "log") as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
            stop = asyncio.Event()
            embedding = asyncio.create_task(embed_until(http, stop))
            streams = asyncio.Event()
            chats = [asyncio.create_task(chat(http, streams)) for _ in range(CHATS)]
            await until_one_streams(chats, streams)
            engine = await next_engine(server.process_id)
            os.kill(engine, signal.SIGSTOP if fault == "hang" else signal.SIGKILL)
            # A hang is noticed by readiness' own limit, and ended by the watchdog.
            noticed = await seconds_until_ready(http, 503, NOTICED_SECONDS)
            ends = Counter(await asyncio.gather(*chats))
            assert sum(ends.values()) == CHATS and set(ends) <= {"error event", "503", "429", "done"}
            assert ends["error event"] > 0
            if fault == "kill twice":
                os.kill(await next_engine(server.process_id, engine), signal.SIGKILL)
            served = await metric(http, 'tandem_requests_total{class="batch",kind="embed",outcome="met"}')
            back = await seconds_until_ready(http, 200, RECOVERY_SECONDS)
            log.info("%s: not ready after %.2f s, back %.1f s later; %s", fault, noticed, back, dict(ends))
            during = await metric(http, 'tandem_requests_total{class="batch",kind="embed",outcome="met"}')
            assert during > served, "embeddings go on"
            stop.set()
            assert set(await embedding) == {200}
            assert await chat(http) == "done"
            for left in ("held_bytes", "requests_running", "requests_waiting"):
                assert await metric(http, f"tandem_{left}") == 0, left
            failed = await metric(
                http, 'tandem_requests_total{class="batch",kind="generate",outcome="failed"}'
            )
            assert failed == ends["error event"] + ends["503"]
            assert await metric(http, "tandem_engine_restarts_total") == (2 if fault == "kill twice" else 1)
            assert await metric(http, "tandem_engine_stalls_total") == (fault == "hang")


@contextmanager
def launched(path: Path, port: int, log: Path):
    """A server that need not become ready."""
    with (
        log.open("w") as output,
        subprocess.Popen(
            command_of(path, port), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
async def test_without_restarts_the_process_ends_with_status_1(tmp_path: Path):
    port, log = free_port(), tmp_path / "log"
    with launched(config_file(tmp_path, restart="never"), port, log) as process:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120) as http:
            async with asyncio.timeout(RECOVERY_SECONDS):
                while "ready after" not in log.read_text():
                    assert process.poll() is None, log.read_text()[-2_000:]
                    await asyncio.sleep(0.1)
            streams = asyncio.Event()
            chats = [asyncio.create_task(chat(http, streams)) for _ in range(4)]
            await until_one_streams(chats, streams)
            os.kill(await next_engine(process.pid), signal.SIGKILL)
            assert set(await asyncio.gather(*chats)) <= {"error event", "503, no retry"}
        assert await asyncio.to_thread(process.wait, 60) == 1
    assert "it is not restarted" in log.read_text()


@pytest.mark.slow
async def test_deaths_during_the_start_leave_nothing_behind(tmp_path: Path):
    """First the server is killed, then the engine of its successor, which finds the files of the first."""
    path = config_file(tmp_path)
    with launched(path, free_port(), tmp_path / "first") as process:
        await next_engine(process.pid)
        first = directory_of(process.pid)
        assert {"lock"} < {file.name for file in first.iterdir()}
        process.kill()
        process.wait()
    with launched(path, free_port(), tmp_path / "second") as process:
        engine = await next_engine(process.pid)
        second = directory_of(process.pid)
        # A server of another test may have removed the first directory before this one did.
        assert second.exists() and not first.exists()
        os.kill(engine, signal.SIGKILL)
        assert await asyncio.to_thread(process.wait, 120) == 1
    assert not second.exists()
