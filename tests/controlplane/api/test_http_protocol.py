"""Limits of a connection, errors of malformed HTTP, and the arrival of requests, on real sockets."""

import asyncio
import json
import logging
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from hashlib import sha256
from typing import Any

import orjson
import pytest

from backends.testing.scripted import Script
from controlplane.api import http_protocol
from controlplane.api.graceful_server import _options, _Server
from controlplane.api.settings import ANONYMOUS, ApiKey, ApiSettings
from tests.controlplane.api.scripted_server import CHAT_MODEL, EMBED_MODEL, RERANK_MODEL, Stage, staged, until

CHAT = {"model": CHAT_MODEL, "messages": [{"role": "user", "content": "hi"}]}
TICK_NS = 10_000_000
KEY = ApiKey(sha256(b"key").hexdigest(), ANONYMOUS)


class Reply:
    """One HTTP response."""

    def __init__(self, head: bytes, body: bytes) -> None:
        first, *lines = head.decode().split("\r\n")
        self.status = int(first.split()[1])
        self.headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines if line)}
        self.body = body

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)["error"]
        assert self.headers["content-type"] == "application/json"
        assert set(found) == {"message", "type", "param", "code"}
        return found


class Wire:
    """A raw connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, *parts: bytes) -> None:
        self.writer.write(b"".join(parts))

    async def reply(self) -> Reply:
        async with asyncio.timeout(10):
            head = await self.reader.readuntil(b"\r\n\r\n")
            found = Reply(head[:-4], b"")
            found.body = await self.reader.readexactly(int(found.headers["content-length"]))
        return found

    async def is_closed(self) -> bool:
        """Waits for the end of the connection; ConnectionResetError is one, too."""
        async with asyncio.timeout(10):
            try:
                return await self.reader.read() == b""
            except ConnectionResetError:
                return True


class Host:
    """A served stage."""

    def __init__(self, stage: Stage, server: _Server) -> None:
        self.stage, self.server = stage, server
        self.address = server.servers[0].sockets[0].getsockname()

    @asynccontextmanager
    async def wire(self) -> AsyncIterator[Wire]:
        reader, writer = await asyncio.open_connection(*self.address)
        try:
            yield Wire(reader, writer)
        finally:
            writer.close()


@asynccontextmanager
async def hosted(
    keys: tuple[ApiKey, ...] = (), *, is_stepped: bool = False, **server: Any
) -> AsyncIterator[Host]:
    settings = ApiSettings(api_keys=keys, admin_key_sha256=server.get("admin_key_sha256"))
    async with staged(settings, is_stepped=is_stepped, server={"port": 0, **server}) as stage:
        options = _options(stage.service, stage.service.config)
        options.app = stage.app
        running = _Server(options, stage.service)
        serving = asyncio.create_task(running.serve())
        await until(lambda: running.started or serving.done())
        yield Host(stage, running)
        running.should_exit = True
        await asyncio.wait_for(serving, 10)


def post(body: object = CHAT, *headers: bytes, path: bytes = b"/v1/chat/completions") -> bytes:
    content = orjson.dumps(body)
    lines = [b"POST %s HTTP/1.1" % path, b"host: x", b"content-length: %d" % len(content), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + content


GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


async def test_a_connection_serves_several_requests_and_pipelined_ones():
    async with hosted() as host, host.wire() as wire:
        wire.send(post())
        assert (await wire.reply()).status == 200
        wire.send(GET, post(), GET)
        assert [(await wire.reply()).status for _ in range(3)] == [200, 200, 200]


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nx-long: " + b"a" * 3_000,
        b"GET /health HTTP/1.1\r\n" + b"x-name: value\r\n" * 101 + b"\r\n",
        b"GET /health HTTP/1.1\r\n" + b"x-name: valuevaluevalue\r\n" * 90 + b"\r\n",
        b"GET /" + b"a" * 3_000,
        b"POST /v1/embeddings HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: " + b"a" * 2**20,
    ],
    ids=["unfinished", "count", "sum", "path", "trailer"],
)
async def test_long_headers_are_a_431(head: bytes):
    async with hosted(limits={"max_header_bytes": 2_048}) as host, host.wire() as wire:
        wire.send(head)
        reply = await wire.reply()
        assert (reply.status, reply.error["code"]) == (431, "headers_too_large")
        assert reply.headers["connection"] == "close"
        assert await wire.is_closed()


async def test_an_endless_header_is_refused_while_it_arrives():
    """The rest is discarded, so that the client can read the reply."""
    async with hosted() as host, host.wire() as wire:
        wire.send(b"GET / HTTP/1.1\r\nx: ")
        for _ in range(64):
            wire.send(b"a" * 2**20)
        assert (await wire.reply()).status == 431


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"this is not HTTP\r\n\r\n",
        b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
        b"POST /v1/embeddings HTTP/1.1\r\ncontent-length: " + b"9" * 5_001 + b"\r\n\r\n",
        b"POST /v1/embeddings HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/embeddings HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
    ids=["text", "header", "digits", "negative", "both lengths", "TLS"],
)
async def test_malformed_http_gets_an_error_object(request_bytes: bytes):
    async with hosted() as host, host.wire() as wire:
        wire.send(request_bytes)
        reply = await wire.reply()
        assert (reply.status, reply.error["code"]) == (400, "invalid_http")
        assert await wire.is_closed()


async def test_malformed_chunk_ends_the_request_that_waits_for_its_body():
    async with hosted() as host, host.wire() as wire:
        wire.send(b"POST /v1/chat/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
        await until(lambda: len(host.server.server_state.tasks) == 1)
        wire.send(b"not a number\r\n")
        assert (await wire.reply()).status == 400
        await until(lambda: not host.server.server_state.tasks)


async def test_slow_headers_are_a_408():
    async with hosted(limits={"header_timeout_ms": 50}) as host, host.wire() as wire:
        wire.send(b"GET /health HT")
        reply = await wire.reply()
        assert (reply.status, reply.error["code"]) == (408, "request_timeout")
        assert await wire.is_closed()


async def test_slow_headers_of_a_later_request_are_a_408():
    async with hosted(limits={"header_timeout_ms": 50}) as host, host.wire() as wire:
        wire.send(GET)
        assert (await wire.reply()).status == 200
        wire.send(b"\r\n")
        assert (await wire.reply()).status == 408


async def test_a_connection_without_a_request_is_closed():
    async with hosted(limits={"header_timeout_ms": 50}) as host, host.wire() as wire:
        assert await wire.is_closed()


async def test_an_idle_connection_is_closed():
    async with hosted(limits={"idle_timeout_ms": 50}) as host, host.wire() as wire:
        wire.send(GET)
        assert (await wire.reply()).status == 200
        assert await wire.is_closed()


async def test_a_slow_body_is_a_408_and_its_request_ends():
    async with hosted(limits={"body_timeout_ms": 50}) as host, host.wire() as wire:
        wire.send(b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 100\r\n\r\n{")
        reply = await wire.reply()
        assert (reply.status, reply.error["code"]) == (408, "request_timeout")
        await until(lambda: not host.server.server_state.tasks)


async def test_the_key_is_checked_before_the_body_is_read():
    async with hosted((KEY,)) as host, host.wire() as wire:
        wire.send(b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 4000000\r\n\r\n")
        assert (await wire.reply()).status == 401


async def test_a_body_that_goes_on_after_its_response_ends_with_its_time_limit():
    async with hosted((KEY,), limits={"body_timeout_ms": 100}) as host, host.wire() as wire:
        wire.send(b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 4000000\r\n\r\n{")
        assert (await wire.reply()).status == 401
        assert (await wire.reply()).status == 408


async def test_a_body_that_ends_after_its_response_leaves_the_idle_limit():
    async with hosted((KEY,), limits={"idle_timeout_ms": 50}) as host, host.wire() as wire:
        wire.send(b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 2\r\n\r\n{")
        assert (await wire.reply()).status == 401
        wire.send(b"}")
        assert await wire.is_closed()


async def end(host: Host) -> None:
    """Makes the server end, and returns once it does not listen."""
    host.server.drain()
    await until(lambda: not host.server.servers[0].is_serving())


def assert_is_last(reply: Reply) -> None:
    assert (reply.status, reply.error["code"]) == (503, "shutting_down")
    assert reply.headers["connection"] == "close"


async def test_a_rejection_by_a_draining_server_ends_its_connection():
    """After POST /admin/drain the server listens on; a later request would be lost when it ends."""
    async with hosted() as host, host.wire() as wire:
        wire.send(post())
        assert (await wire.reply()).status == 200
        await host.stage.service.drain(0.0)
        wire.send(post())
        assert_is_last(await wire.reply())
        assert await wire.is_closed()


@pytest.mark.parametrize("before", [post(), GET, b""], ids=["chat", "health", "new"])
async def test_a_request_on_an_open_connection_of_an_ending_server_is_answered(before: bytes, monkeypatch):
    monkeypatch.setattr(http_protocol, "_LAST_REQUEST_S", 10.0)
    async with hosted() as host, host.wire() as wire:
        if before:
            wire.send(before)
            assert (await wire.reply()).status == 200
        else:
            await until(lambda: bool(host.server.server_state.connections))
        await end(host)
        wire.send(post())
        assert_is_last(await wire.reply())
        assert await wire.is_closed()


async def test_a_request_after_a_stream_that_an_ending_server_has_finished_is_answered(monkeypatch):
    """The head of the stream, sent before, did not say that the connection ends."""
    monkeypatch.setattr(http_protocol, "_LAST_REQUEST_S", 10.0)
    async with hosted(is_stepped=True) as host, host.wire() as wire:
        wire.send(post(CHAT | {"stream": True}))
        await host.stage.generator.until_runs(1)
        host.stage.generator.allow(1)
        head = await wire.reader.readuntil(b"\r\n\r\n")
        assert b"200 OK" in head and b"connection: close" not in head
        await end(host)
        host.stage.generator.allow(2)
        async with asyncio.timeout(10):
            await wire.reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n")
        wire.send(post())
        assert_is_last(await wire.reply())
        assert await wire.is_closed()


async def test_idle_connections_do_not_keep_an_ending_server():
    async with hosted() as host, host.wire() as used, host.wire() as new:
        used.send(GET)
        assert (await used.reply()).status == 200
        host.server.drain()
        assert await used.is_closed() and await new.is_closed()


async def test_a_client_that_reads_nothing_is_disconnected():
    """The socket buffers fill; then the kernel ends the connection, and the request is aborted."""
    async with hosted(stalled_client_ms=300) as host:
        host.stage.generator.default = Script(tokens=200, words=("x" * 100_000,))
        with closing(socket.socket()) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            client.connect(host.address)
            client.sendall(post({**CHAT, "stream": True}))
            await host.stage.generator.until_runs(1)
            await asyncio.wait_for(host.stage.generator.runs[0].ended.wait(), 10)
            assert host.stage.generator.runs[0].end == "aborted"
            await until(lambda: not host.server.server_state.connections)


@pytest.mark.long
@pytest.mark.parametrize("connection", [b"keep-alive", b"close"])
async def test_a_client_that_reads_a_finished_response_too_slowly_is_disconnected(
    connection: bytes, monkeypatch: pytest.MonkeyPatch
):
    """It would keep megabytes for hours: the kernel ends only connections whose client reads nothing."""
    monkeypatch.setattr(http_protocol, "_LEAST_BYTES_PER_S", 20_000_000)
    loop = asyncio.get_running_loop()
    async with hosted(stalled_client_ms=500) as host:
        host.stage.generator.default = Script(tokens=200, words=("x" * 100_000,))
        with closing(socket.socket()) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 200_000)
            client.connect(host.address)
            client.sendall(post(CHAT, b"connection: " + connection))
            client.setblocking(False)
            with suppress(ConnectionResetError):
                async with asyncio.timeout(5):
                    # At most 1.5 MB/s of 20 MB; each read lets the kernel send on.
                    while await loop.sock_recv(client, 150_000):  # noqa: ASYNC110 - a client's pace
                        await asyncio.sleep(0.1)
            await until(lambda: not host.server.server_state.connections)


async def test_a_disconnect_logs_nothing(caplog):
    async with hosted(is_stepped=True) as host:
        for number, is_stream in enumerate((False, True), start=1):
            async with host.wire() as wire, asyncio.timeout(10):
                wire.send(post({**CHAT, "stream": is_stream}))
                await host.stage.generator.until_runs(number)
                host.stage.generator.allow(1)
                if is_stream:
                    await wire.reader.readuntil(b"data: ")
            await until(lambda: not host.server.server_state.tasks)
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(
    ("engine", "path", "body"),
    [
        ("generator", b"/v1/chat/completions", CHAT),
        ("embedder", b"/v1/embeddings", {"model": EMBED_MODEL, "input": "hi"}),
        ("reranker", b"/v1/rerank", {"model": RERANK_MODEL, "query": "hi", "documents": ["ho"]}),
    ],
)
async def test_arrival_is_when_the_kernel_received_the_request(engine: str, path: bytes, body: object):
    async with hosted() as host:
        backend = getattr(host.stage, engine)
        with closing(socket.create_connection(host.address)) as client:
            before = time.monotonic_ns()
            client.sendall(post(body, path=path))
            after = time.monotonic_ns()
            block(0.2)
            await backend.until_runs(1)
        arrival = backend.runs[0].request.arrival
        assert before - TICK_NS <= arrival <= after + TICK_NS


def block(seconds: float) -> None:
    """Makes the event loop late."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
