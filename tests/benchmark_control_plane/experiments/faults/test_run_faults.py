"""The fault suite: its accounting, its rows, and the rows that continuous integration can afford."""

import asyncio
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from benchmark_control_plane.experiments.faults import client_faults, run_faults
from benchmark_control_plane.experiments.faults.clients import (
    COMPLETIONS,
    DONE,
    ERROR_EVENT,
    LOAD,
    LOST,
    NOT_CONNECTED,
    Probes,
    ask,
    new_client,
)
from benchmark_control_plane.experiments.faults.trial import StateAfter, exceeded

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(text: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(text), text)


END = chunk(b"")
TOKEN = chunk(b'data: {"choices": []}\n\n')
CASES = {
    "whole": (HEAD + TOKEN + chunk(b"data: [DONE]\n\n") + END, DONE),
    "error": (HEAD + TOKEN + chunk(b'event: error\ndata: {"error": {}}\n\n') + END, ERROR_EVENT),
    "rejected": (b"HTTP/1.1 429 Too Many\r\ncontent-length: 2\r\n\r\n{}", "429"),
    "silent end": (HEAD + TOKEN + END, LOST),
    "cut": (HEAD + TOKEN, LOST),
    "nothing": (b"", LOST),
}


async def answered(reply: bytes) -> str:
    """How a request ends whose server sends `reply` and closes the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await reader.read(1)
        writer.write(reply)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = "http://127.0.0.1:{1}".format(*server.sockets[0].getsockname())
        async with new_client(SimpleNamespace(url=url)) as http:
            return await ask(http, COMPLETIONS, LOAD, "load")


@pytest.mark.parametrize(("reply", "ending"), CASES.values(), ids=CASES)
async def test_each_request_ends_in_one_counted_way(reply: bytes, ending: str):
    found = await answered(reply)
    assert found.startswith(ending) if ending == LOST else found == ending


async def test_a_server_that_has_ended_loses_nothing():
    async with httpx.AsyncClient(base_url="http://127.0.0.1:1") as http:
        assert await ask(http, COMPLETIONS, LOAD, "load") == NOT_CONNECTED


def test_a_death_during_a_restart_is_stated_already():
    probes = Probes(SimpleNamespace(port=1, health_port=2))
    # Ready at 1 s; the first death at 2 s is stated at 3 s on both ports, and the second one is at 4 s.
    probes.readiness += [(1.0, 2), (2.5, 1), (3.0, 0), (9.0, 1), (9.5, 2)]
    assert probes.seconds_until(is_ready=False, after=2.0) == 1.0
    assert probes.seconds_until(is_ready=False, after=4.0) == 0.0
    assert probes.seconds_until(is_ready=True, after=4.0) == 5.5
    assert probes.seconds_until(is_ready=False, after=9.2) is None


def test_what_is_left_behind_is_a_failure():
    assert list(StateAfter(held_bytes=0, open_requests=0, more_descriptors=3).failures()) == []
    left = list(StateAfter(held_bytes=32, open_requests=1, more_descriptors=100).failures())
    assert left == ["32 bytes held", "1 requests open", "100 more descriptors are open"]


def test_waits_and_memory_above_their_limits_are_no_failures():
    after = StateAfter(held_bytes=0, open_requests=0, peak_growth_mb=301.0, growth_mb=2.0, more_descriptors=0)
    assert list(after.failures()) == []
    assert list(exceeded(120.0, after)) == [
        "/health on its own port waited 120 ms",
        "301 MB more meanwhile",
    ]
    assert list(exceeded(99.0, StateAfter())) == []


def trials(tmp_path: Path, *arguments: str) -> Sequence[dict]:
    """Results of the suite with these arguments; no claim may fail."""
    file = tmp_path / "faults.json"
    assert run_faults.main([*arguments, "--runs", "1", "--results", str(file)]) == 0, file.read_text()
    return json.loads(file.read_text(encoding="utf-8"))["trials"]


@pytest.mark.slow
def test_some_faults_of_clients(tmp_path: Path):
    rows = ("headers without end", "half-closed connections")
    headers, _ = found = trials(tmp_path, "--groups", "simulated", "--rows", *rows)
    assert all(trial["sent"] > 0 and trial["lost"] == 0 for trial in found)
    statuses = {name: status for name, (status, _) in headers["notes"]["status and seconds of each"].items()}
    assert statuses["100,000 headers"] == 431 and statuses["content-length of 5,001 digits"] == 400


@pytest.mark.parametrize("group", ["simulated", "ending"])
@pytest.mark.slow
def test_faults_that_need_no_real_engine(tmp_path: Path, group: str):
    found = trials(tmp_path, "--groups", group)
    assert [trial["row"] for trial in found] == list(run_faults.GROUPS[group])
    assert all(trial["sent"] > 0 and trial["lost"] == 0 for trial in found)
    # What is there is not measured again.
    assert trials(tmp_path, "--groups", group) == found


@pytest.mark.slow
@pytest.mark.engine
def test_a_killed_worker_and_one_without_memory(tmp_path: Path):
    rows = ("worker killed", "worker without memory")
    killed, starved = trials(tmp_path, "--groups", "worker", "--rows", *rows)
    assert killed["not_ready_s"] <= 2 and killed["back_s"] > 0
    assert starved["notes"]["batches split"] or starved["notes"]["worker restarts"] > 1


async def test_an_overload_is_timed_from_its_planned_moments(monkeypatch):
    found = []

    async def sent(port, request, due):
        found.append(due)
        return "200", 0.0

    monkeypatch.setattr(client_faults, "_new_connection", sent)
    monkeypatch.setattr(client_faults, "_OVERLOAD_S", 0.02)
    await client_faults._offer(1, 1_000.0)
    assert [after - at for at, after in pairwise(found)] == pytest.approx([0.001] * 19, abs=1e-8)
