"""Requests that a client sends ahead wait unread, and each is answered in its turn."""

import asyncio
import socket
import struct

import pytest

from controlplane.api import http_pipelining
from tests.controlplane.api.scripted_server import until
from tests.controlplane.api.test_http_protocol import CHAT, GET, Host, hosted, post

MANY = 5_000


def deepest(host: Host) -> int:
    (connection,) = host.server.server_state.connections
    return len(connection.pipeline)


async def test_all_requests_that_a_client_sends_ahead_are_answered_in_their_order():
    """Those for unknown models name them, so that each answer tells its request."""
    bodies = [CHAT | {"model": f"m{number}"} for number in range(200)]
    async with hosted(is_stepped=True) as host, host.wire() as wire:
        wire.send(post(), *map(post, bodies))
        await host.stage.generator.until_runs(1)
        host.stage.generator.allow(3)
        assert (await wire.reply()).status == 200
        for body in bodies:
            reply = await wire.reply()
            assert reply.status == 404 and body["model"] in reply.error["message"]
        wire.send(GET)
        assert (await wire.reply()).status == 200


@pytest.mark.parametrize("sent", [GET * MANY, post(path=b"/none") * 1_000], ids=["short", "bodies"])
async def test_few_of_the_requests_that_are_sent_ahead_are_parsed(sent: bytes):
    async with hosted(is_stepped=True) as host, host.wire() as wire:
        wire.send(post(), sent)
        await host.stage.generator.until_runs(1)
        await until(lambda: deepest(host) >= http_pipelining._MAX_AHEAD)
        for _ in range(1_000):
            await asyncio.sleep(0)
            assert deepest(host) <= http_pipelining._MAX_AHEAD + http_pipelining._PIECE_BYTES // 18
        (connection,) = host.server.server_state.connections
        assert len(connection._unread) <= 2**18
        host.stage.generator.allow(3)
        for _ in range(1 + sent.count(b"HTTP/1.1")):
            assert (await wire.reply()).headers["content-type"].startswith("application/json")
            assert deepest(host) <= http_pipelining._MAX_AHEAD + http_pipelining._PIECE_BYTES // 18


async def test_requests_that_wait_unread_have_no_time_limit():
    """The client has sent them; the limits begin when the server reads on."""
    limits = {"header_timeout_ms": 50, "body_timeout_ms": 50, "idle_timeout_ms": 50}
    async with hosted(is_stepped=True, limits=limits) as host, host.wire() as wire:
        wire.send(post(), post(path=b"/none") * 300)
        await host.stage.generator.until_runs(1)
        await asyncio.sleep(0.3)
        host.stage.generator.allow(3)
        for status in [200, *[404] * 300]:
            assert (await wire.reply()).status == status
        assert await wire.is_closed()


async def test_requests_that_were_sent_ahead_are_not_shed_for_the_time_of_those_before_them():
    """The last one is still being received, as if it had been delayed itself."""
    async with hosted(is_stepped=True, limits={"max_queue_delay_ms": 20}) as host, host.wire() as wire:
        wire.send(post() * 8, post()[:-5])
        for number in range(1, 9):
            async with asyncio.timeout(5):
                await host.stage.generator.until_runs(number)
            await asyncio.sleep(0.05)
            host.stage.generator.allow(3)
            assert (await wire.reply()).status == 200


@pytest.mark.parametrize("leave", ["close", "reset", "half"])
async def test_a_client_that_leaves_unread_requests_is_noticed(leave: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_pipelining, "_LOOK_S", 0.05)
    async with hosted(is_stepped=True) as host, host.wire() as wire:
        wire.send(post(), GET * MANY)
        await host.stage.generator.until_runs(1)
        (connection,) = host.server.server_state.connections
        await until(lambda: bool(connection._unread))
        match leave:
            case "close":
                wire.writer.close()
            case "reset":
                linger = struct.pack("ii", 1, 0)
                wire.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                wire.writer.transport.abort()
            case _:
                wire.writer.write_eof()
        await until(lambda: not host.server.server_state.tasks)
        assert not connection._unread
        assert host.stage.generator.runs[0].end == "aborted"


CHUNKED = b"POST /none HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("faulty", "status"),
    [
        (b"not HTTP\r\n\r\n", 400),
        (b"GET http://[ HTTP/1.1\r\n\r\n", 400),
        (CHUNKED + b"not a number\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 101 + b"\r\n", 431),
        (post()[:-5], 408),
        (b"GET / HT", 408),
        (b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 99, 408),
    ],
    ids=["text", "address", "chunk", "headers", "slow body", "slow headers", "slow long headers"],
)
@pytest.mark.parametrize("between", [0, 3, 200])
async def test_the_requests_before_a_refused_one_are_answered(faulty: bytes, status: int, between: int):
    limits = {"header_timeout_ms": 100, "body_timeout_ms": 100}
    async with hosted(is_stepped=True, limits=limits) as host, host.wire() as wire:
        wire.send(post(), GET * between, faulty)
        await host.stage.generator.until_runs(1)
        await asyncio.sleep(0.2)
        host.stage.generator.allow(3)
        replies = [await wire.reply() for _ in range(between + 2)]
        assert [reply.status for reply in replies] == [*[200] * (between + 1), status]
        assert replies[-1].headers["connection"] == "close"
        assert await wire.is_closed()
