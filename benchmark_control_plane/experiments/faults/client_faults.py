"""Faults of clients: sockets that stall, mass disconnects, hostile bodies and more requests than capacity."""

import asyncio
import contextlib
import json
import multiprocessing
import random
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import uvloop

from benchmark_control_plane.experiments.faults.clients import (
    COMPLETIONS,
    EMBEDDINGS,
    LOAD,
    LOST,
    PROBE,
    TEXTS,
)
from benchmark_control_plane.experiments.faults.server_under_test import KEYS, ServerUnderTest
from benchmark_control_plane.experiments.faults.trial import FaultRow, Trial
from benchmark_control_plane.experiments.gate import hostile_requests

_SLOW, _IDLE, _DISCONNECTS, _AT_ONCE = 50, 2_000, 1_000, 100
# As many as the engine runs beside the load.
_STREAMS = 16
# Longer than every limit of time in the configuration of the suite.
_BEYOND_LIMITS_S = 5.0
_CAPACITY_CLIENTS, _CAPACITY_S, _OVERLOAD_S = 16, 3.0, 10.0
ANSWER_S = 2.0
"""Under overload every request is answered or rejected within this time."""
_MAX_BODY = 4_800_000
_LARGE = {**LOAD, "n": 4, "logprobs": 5, "max_tokens": 800}

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def request_bytes(
    body: Mapping[str, Any], tenant: str, *, service_class: str = "batch", path: str = COMPLETIONS
) -> bytes:
    """A request as bytes, the only one of its connection."""
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEYS[tenant]}\r\n"
        f"x-service-class: {service_class}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + content


async def _connected(server: ServerUnderTest, *, receive_bytes: int | None = None) -> Connection:
    plain = socket.socket()
    if receive_bytes is not None:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    plain.setblocking(False)
    await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", server.port))
    return await asyncio.open_connection(sock=plain, limit=4_096)


def _close(connections: list[Connection]) -> None:
    for _, writer in connections:
        writer.transport.abort()


async def _slow_readers(trial: Trial) -> None:
    """Clients that begin a long stream and read nothing of it."""
    connections = [await _connected(trial.server, receive_bytes=4_096) for _ in range(4)]
    for _, writer in connections:
        writer.write(request_bytes(_LARGE, "load"))
        writer.transport.pause_reading()  # type: ignore[attr-defined]
    await asyncio.sleep(2 * _BEYOND_LIMITS_S)
    _close(connections)


async def _slow_reading(trial: Trial) -> None:
    """Clients that read 256 bytes of a long stream every 0.2 s."""
    connections = [await _connected(trial.server, receive_bytes=4_096) for _ in range(4)]
    for _, writer in connections:
        writer.write(request_bytes(_LARGE, "load"))

    async def read(reader: asyncio.StreamReader) -> int:
        size, end = 0, time.monotonic() + 2 * _BEYOND_LIMITS_S
        # The server may end what it takes too long to send.
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < end:
                size += len(await reader.read(256))
                await asyncio.sleep(0.2)
        return size

    trial.notes["bytes read slowly"] = await asyncio.gather(*(read(reader) for reader, _ in connections))
    _close(connections)


async def _slow_writers(trial: Trial) -> None:
    """Clients that send a byte of their body every 0.2 s; the server ends them by its limit."""
    whole = request_bytes({**LOAD, "prompt": "x" * 2_000}, "load")
    begin = whole.index(b"\r\n\r\n") + 4
    connections = [await _connected(trial.server) for _ in range(_SLOW)]
    for _, writer in connections:
        writer.write(whole[:begin])
    # Read as they come: once the server has closed the connection, a write fails.
    lines = [asyncio.create_task(reader.readline()) for reader, _ in connections]
    end = time.monotonic() + _BEYOND_LIMITS_S
    at = begin
    while time.monotonic() < end:
        for line, (_, writer) in zip(lines, connections, strict=True):
            if not line.done():
                writer.write(whole[at : at + 1])
        at += 1
        await asyncio.sleep(0.2)
    statuses = Counter([(await line)[9:12].decode() for line in lines])
    trial.notes["statuses of slow writers"] = dict(statuses)
    trial.failures += [
        f"{n} slow writers got {status!r}" for status, n in statuses.items() if status != "408"
    ]
    _close(connections)


async def _silent(trial: Trial) -> None:
    """Clients that connect and send nothing are disconnected by the limit of the headers."""
    connections = [await _connected(trial.server) for _ in range(_SLOW)]
    await asyncio.sleep(_BEYOND_LIMITS_S)
    open_after = sum(not reader.at_eof() for reader, _ in connections)
    trial.notes["silent clients still connected"] = open_after
    trial.failures += [f"{open_after} silent clients are still connected"] if open_after else []
    _close(connections)


async def _has_token(stream: Connection) -> bool:
    """Whether a stream's first token came; its connection may have ended before."""
    with contextlib.suppress(asyncio.IncompleteReadError):
        await stream[0].readuntil(b"data: ")
        return True
    return False


async def _half_closed(trial: Trial) -> None:
    """Clients that close their sending side count as gone, after the request and during its stream.

    Their connections end without an answer or in the middle of it, and the streams' requests as aborted.
    """
    before = await asyncio.to_thread(trial.server.outcomes)
    connections = [await _connected(trial.server) for _ in range(_SLOW + _STREAMS)]
    streams, silent = connections[:_STREAMS], connections[_STREAMS:]
    for _, writer in streams:
        # So long that none ends before its client leaves.
        writer.write(request_bytes({**LOAD, "max_tokens": 800}, "load"))
    async with asyncio.timeout(30):
        # The others are rejected, since the machine may be too busy for all.
        begun = [stream for stream in streams if await _has_token(stream)]
        for _, writer in silent:
            writer.write(request_bytes(PROBE, "load"))
        for _, writer in silent + begun:
            writer.write_eof()
        statuses = Counter([(await reader.read())[9:12].decode() or "closed" for reader, _ in silent])
        whole = sum([b"[DONE]" in await reader.read() for reader, _ in begun])
    _close(connections)
    trial.notes |= {"statuses of half-closed clients": dict(statuses), "half-closed streams": len(begun)}
    trial.failures += [
        f"{n} half-closed clients got {how!r}" for how, n in statuses.items() if how != "closed"
    ]
    trial.failures += [f"{whole} half-closed streams went on to their end"] if whole else []
    trial.failures += [] if begun else ["no stream began, so none was half-closed"]
    async with asyncio.timeout(_BEYOND_LIMITS_S):
        while (await asyncio.to_thread(trial.server.outcomes) - before)["aborted"] < len(begun):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def _idle(trial: Trial) -> None:
    """Connections of which each had one request, and that then stay idle until the server closes them."""
    connections: list[Connection] = []
    request = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    for _ in range(_IDLE // _AT_ONCE):
        more = await asyncio.gather(*(_connected(trial.server) for _ in range(_AT_ONCE)))
        for _, writer in more:
            writer.write(request)
        for reader, _ in more:
            await reader.readuntil(b"\r\n\r\n")
        connections += more
    trial.notes["descriptors with idle connections"] = trial.server.descriptors()
    async with asyncio.timeout(30):
        await asyncio.gather(*(reader.read() for reader, _ in connections))
    _close(connections)


async def _disconnect_at_random(trial: Trial) -> None:
    """1,000 requests, half of them for embeddings, whose clients leave after up to half a second."""
    draw, slots = random.Random(trial.server.port), asyncio.Semaphore(_AT_ONCE)

    requests = (request_bytes(LOAD, "load"), request_bytes(TEXTS, "load", path=EMBEDDINGS))

    async def leave(number: int, after_s: float) -> None:
        async with slots:
            connection = await _connected(trial.server)
            connection[1].write(requests[number % 2])
            await asyncio.sleep(after_s)
            _close([connection])

    await asyncio.gather(*(leave(number, draw.uniform(0, 0.5)) for number in range(_DISCONNECTS)))


def _hostile(names: Sequence[str]) -> FaultRow:
    """Requests of `hostile_requests`, one after the other, from another tenant."""

    async def inject(trial: Trial) -> None:
        replies: dict[str, list[float]] = {}
        # While this process built a body of 32 MB, its clients would neither send nor read for seconds.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as attacker:
            for name in names:
                sending = asyncio.get_running_loop().run_in_executor(
                    attacker, _attack, trial.server.port, name
                )
                size, reply = await sending
                replies[name] = [reply.status, round(reply.seconds, 3)]
                # What is too large by its length is not read, and its reply may be lost with the connection.
                if reply.status == 500 or (reply.status == 0 and size <= _MAX_BODY):
                    trial.failures.append(f"{name}: status {reply.status}")
        trial.notes["status and seconds of each"] = replies

    return FaultRow(inject)


def _attack(port: int, name: str) -> tuple[int, hostile_requests.Reply]:
    """Sends a request of `hostile_requests`; its bytes and the reply."""
    request = hostile_requests.request_of(name, KEYS[hostile_requests.sender_of(name)])
    return len(request), hostile_requests.send(port, request)


async def _capacity(port: int) -> float:
    """Requests of the overload that the server completes per second with as many clients as fill it."""
    done, begin, request = 0, time.monotonic(), request_bytes(PROBE, "load")

    async def send() -> None:
        nonlocal done
        while time.monotonic() < begin + _CAPACITY_S:
            status, _ = await _new_connection(port, request, time.monotonic())
            done += status == "200"

    await asyncio.gather(*(send() for _ in range(_CAPACITY_CLIENTS)))
    return done / (time.monotonic() - begin)


async def _new_connection(port: int, request: bytes, due: float) -> tuple[str, float]:
    """Status, and seconds from when it was due until the first byte, of one request on a new connection."""
    try:
        async with asyncio.timeout(30):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            line = await reader.readline()
            waited = time.monotonic() - due
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()
    except (OSError, TimeoutError) as error:
        return f"{LOST}: {type(error).__name__}", time.monotonic() - due
    return line[9:12].decode() or f"{LOST}: closed", waited


async def _offer(port: int, rate: float) -> list[tuple[str, float]]:
    begin, sent = time.monotonic(), []
    # Batch requests have no objective, so that they wait as long as there is room.
    request = request_bytes({**PROBE, "stream": True}, "load", service_class="interactive")
    for number in range(round(rate * _OVERLOAD_S)):
        due = begin + number / rate
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        sent.append(asyncio.create_task(_new_connection(port, request, due)))
    return list(await asyncio.gather(*sent))


async def _measure_and_offer(port: int, factor: float) -> tuple[float, list[tuple[str, float]]]:
    capacity = await _capacity(port)
    return capacity, await _offer(port, factor * capacity)


def _overload_in_process(port: int, factor: float, results: "multiprocessing.Queue[Any]") -> None:
    results.put(uvloop.run(_measure_and_offer(port, factor)))


def _overload(factor: float) -> FaultRow:
    """New connections at `factor` times the capacity, from a process of its own."""

    async def inject(trial: Trial) -> None:
        context = multiprocessing.get_context("spawn")
        results: multiprocessing.Queue[Any] = context.Queue()
        client = context.Process(target=_overload_in_process, args=(trial.server.port, factor, results))
        client.start()
        found: list[tuple[str, float]]
        capacity, found = await asyncio.to_thread(results.get)
        await asyncio.to_thread(client.join)
        endings = Counter(status for status, _ in found)
        late = sum(waited > ANSWER_S for _, waited in found)
        trial.notes |= {
            "capacity, requests/s": round(capacity, 1),
            "offered requests/s": round(factor * capacity, 1),
            "offered": len(found),
            "statuses": dict(endings),
            "without an answer within 2 s": late,
            "longest answer, s": round(max(waited for _, waited in found), 3),
        }
        trial.lost += Counter({how: n for how, n in endings.items() if how.startswith(LOST)})
        trial.failures += [f"{late} without an answer within {ANSWER_S:g} s"] if late else []

    return FaultRow(inject)


BODIES: Mapping[str, FaultRow] = {"hostile bodies": _hostile(hostile_requests.BODIES)}
REAL: Mapping[str, FaultRow] = {
    "clients that read nothing": FaultRow(_slow_readers),
    "clients that read slowly": FaultRow(_slow_reading),
    "3 times the capacity": _overload(3.0),
    "10 times the capacity": _overload(10.0),
}
"""Faults that need real engines: their text and their speed."""
SIMULATED: Mapping[str, FaultRow] = {
    "clients that send slowly": FaultRow(_slow_writers),
    "clients that send nothing": FaultRow(_silent),
    "headers without end": _hostile(hostile_requests.HEADERS),
    "half-closed connections": FaultRow(_half_closed),
    "2,000 idle connections": FaultRow(_idle),
    "1,000 disconnects at random": FaultRow(_disconnect_at_random),
}
