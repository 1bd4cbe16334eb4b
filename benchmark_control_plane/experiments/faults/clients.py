"""Clients of the fault suite: well-behaved ones whose every request is accounted for, and probes."""

import asyncio
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import httpx

from benchmark_control_plane.common.machine_load import raise_session
from benchmark_control_plane.experiments.faults.server_under_test import (
    CHAT_MODEL,
    EMBED_MODEL,
    KEYS,
    ServerUnderTest,
)

COMPLETIONS, EMBEDDINGS = "/v1/completions", "/v1/embeddings"
LOAD = {"model": CHAT_MODEL, "prompt": "x" * 40, "max_tokens": 100, "stream": True, "ignore_eos": True}
TEXTS = {"model": EMBED_MODEL, "input": ["a text about queues"] * 4}
PROBE = {"model": CHAT_MODEL, "prompt": "hi", "max_tokens": 4, "ignore_eos": True}
DONE, ERROR_EVENT, NOT_CONNECTED, LOST = "done", "error event", "not connected", "lost"
_CHATS, _EMBEDDINGS = 8, 2
_TIMEOUT_S = 60.0
_PATIENCE_S = 15.0
# Clients pause before they send again what was rejected.
_PAUSE_S = 0.1
_PROBE_PERIOD_S = 0.05
_PROBE_NICENESS = -10


def new_client(server: ServerUnderTest) -> httpx.AsyncClient:
    """A client with a new connection for each request, so that no request meets an idle one being closed."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=server.url, timeout=_TIMEOUT_S, limits=limits)


async def ask(
    http: httpx.AsyncClient,
    path: str,
    body: Mapping[str, Any],
    tenant: str,
    has_begun: asyncio.Event | None = None,
) -> str:
    """How one request ended for its client: an answer, an error, a status, or a text that begins with LOST.

    Sets `has_begun` at the first bytes of an answer with status 200.
    """
    parts: list[bytes] = []
    try:
        headers = {"authorization": f"Bearer {KEYS[tenant]}"}
        async with http.stream("POST", path, json=body, headers=headers) as answer:
            async for part in answer.aiter_bytes():
                parts.append(part)
                if has_begun is not None and answer.status_code == 200:
                    has_begun.set()
    except httpx.ConnectError:
        return NOT_CONNECTED
    except httpx.HTTPError as error:
        return f"{LOST}: {type(error).__name__} after {sum(map(len, parts))} bytes"
    if answer.status_code != 200:
        return str(answer.status_code)
    whole = b"".join(parts)
    if not body.get("stream") or whole.endswith(b"data: [DONE]\n\n"):
        return DONE
    is_error = b"event: error" in whole or b'data: {"error"' in whole
    return ERROR_EVENT if is_error else f"{LOST}: the stream stopped after {len(whole)} bytes"


class BackgroundLoad:
    """Closed-loop clients: streamed completions and embeddings, until the block of `running` ends."""

    def __init__(self, server: ServerUnderTest) -> None:
        self.endings: Counter[str] = Counter()
        self._server = server
        self._end = asyncio.Event()
        self._has_begun = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Begins with the first token of an answer; ends when every request that was sent has ended."""
        async with new_client(self._server) as http:
            bodies = [(COMPLETIONS, LOAD)] * _CHATS + [(EMBEDDINGS, TEXTS)] * _EMBEDDINGS
            clients = [asyncio.create_task(self._send(http, *body)) for body in bodies]
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    await self._has_begun.wait()
                yield
            finally:
                self._end.set()
                await asyncio.gather(*clients)

    async def _send(self, http: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> None:
        while not self._end.is_set():
            has_begun = self._has_begun if path == COMPLETIONS else None
            ending = await ask(http, path, body, "load", has_begun)
            self.endings[ending] += 1
            if ending != DONE:
                await asyncio.sleep(_PAUSE_S)


async def status_of(port: int, path: str) -> int:
    """The status of a GET on a new connection; 0 without an answer."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
                line = await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return 0
    return int(line.split()[1]) if line.startswith(b"HTTP/1.1 ") else 0


def before_others() -> None:
    """Raises this process's priority where that is permitted: a probe must not wait for a core itself.

    Linux divides a core among sessions before the niceness of their processes counts, and among the session's
    share the other clients of the benchmark would be.
    """
    with suppress(PermissionError):
        os.setsid()
    raise_session(os.getpid(), _PROBE_NICENESS)
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _PROBE_NICENESS)


def watch_health(ports: Sequence[int], pipe: Connection) -> None:
    """Asks each port for /health until a message comes, then sends the waits of each port in seconds.

    It is for a process of its own: beside the clients of the load it would measure how long they compute.
    """
    before_others()
    pipe.send(None)
    pipe.send(asyncio.run(_health_waits(ports, pipe)))


async def _health_waits(ports: Sequence[int], pipe: Connection) -> list[list[float]]:
    end = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), end.set)
    return list(await asyncio.gather(*(waits_of(port, end) for port in ports)))


async def waits_of(port: int, end: asyncio.Event) -> list[float]:
    """Waits of /health on one port until `end`, in seconds."""
    waits: list[float] = []
    while not end.is_set():
        start = time.monotonic()
        # Without a connection the server has ended, which is no wait.
        if await status_of(port, "/health"):
            waits.append(time.monotonic() - start)
        await asyncio.sleep(_PROBE_PERIOD_S)
    return waits


class Probes:
    """Another tenant's view: waits of /health on both ports and of short chats, and changes of /ready.

    The waits of /health are known after the block of `running`.
    """

    def __init__(self, server: ServerUnderTest) -> None:
        self.health_s: list[float] = []
        self.health_port_s: list[float] = []
        self.chat_s: list[float] = []
        self.chats: Counter[str] = Counter()
        self.readiness: list[tuple[float, int]] = []
        """(time, number of ports on which /ready is 200) at each change."""
        self._server = server
        self._end = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Probes until the block ends."""
        async with new_client(self._server) as http, self._health_watched():
            tasks = [asyncio.create_task(self._watch_ready()), asyncio.create_task(self._chat(http))]
            try:
                yield
            finally:
                self._end.set()
                await asyncio.gather(*tasks)

    @asynccontextmanager
    async def _health_watched(self) -> AsyncIterator[None]:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        ports = (self._server.port, self._server.health_port)
        process = context.Process(target=watch_health, args=(ports, theirs), daemon=True)
        process.start()
        theirs.close()
        await asyncio.to_thread(ours.recv)
        try:
            yield
        finally:
            ours.send(None)
            self.health_s, self.health_port_s = await asyncio.to_thread(ours.recv)
            await asyncio.to_thread(process.join)
            ours.close()

    async def _watch_ready(self) -> None:
        while not self._end.is_set():
            ports = (self._server.port, self._server.health_port)
            statuses = await asyncio.gather(*(status_of(port, "/ready") for port in ports))
            found = sum(status == 200 for status in statuses)
            if not self.readiness or self.readiness[-1][1] != found:
                self.readiness.append((time.monotonic(), found))
            await asyncio.sleep(_PROBE_PERIOD_S)

    async def _chat(self, http: httpx.AsyncClient) -> None:
        while not self._end.is_set():
            start = time.monotonic()
            ending = await ask(http, COMPLETIONS, PROBE, "other")
            self.chats[ending] += 1
            if ending == DONE:
                self.chat_s.append(time.monotonic() - start)
            await asyncio.sleep(_PROBE_PERIOD_S)

    def seconds_until(self, *, is_ready: bool, after: float) -> float | None:
        """Seconds from `after` until /ready was so on both ports; None if it did not become so.

        0 if it was so then: a process may be killed again while /ready still states its first death.
        """
        ports, seconds = 2 if is_ready else 0, None
        for at, found in self.readiness:
            if at < after:
                seconds = 0.0 if found == ports else None
            elif found == ports and seconds is None:
                seconds = at - after
        return seconds
