"""A refused client may send on for a while: a connection closed with unread bytes loses the response.

So may one whose body goes on after its response. What they send is read slowly, between others' requests.
"""

import pytest

from controlplane.api import http_protocol
from tests.controlplane.api.scripted_server import until
from tests.controlplane.api.test_http_protocol import KEY, hosted


@pytest.mark.parametrize(("total", "pause"), [(60.0, 0.1), (0.1, 60.0)])
async def test_it_ends_after_a_pause_and_after_a_total(total: float, pause: float, monkeypatch):
    monkeypatch.setattr(http_protocol, "_LINGER_S", total)
    monkeypatch.setattr(http_protocol, "_LINGER_PAUSE_S", pause)
    async with hosted() as host, host.wire() as wire:
        wire.send(b"no HTTP\r\n\r\n")
        assert (await wire.reply()).status == 400
        await until(lambda: not host.server.server_state.connections)


async def test_what_it_sends_later_does_not_lose_its_response(monkeypatch):
    monkeypatch.setattr(http_protocol, "_LINGER_PAUSE_S", 60.0)
    async with hosted() as host, host.wire() as wire:
        wire.send(b"no HTTP\r\n\r\n")
        await until(lambda: any(one._is_refused for one in host.server.server_state.connections))
        for _ in range(100):
            wire.send(b"x" * 100_000)
            await wire.writer.drain()
        assert (await wire.reply()).status == 400
        # An ending server does not wait for it.
        host.server.drain()
        await until(lambda: not host.server.server_state.connections)


async def served_between_reads(other, reads):
    """Asserts that `other` is served three times after the first of `reads` and before the second."""
    await until(lambda: reads)
    for _ in range(3):
        other.send(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await other.reply()).status == 200
    assert len(reads) == 1


async def test_others_are_served_between_two_reads_of_what_it_sends(monkeypatch):
    monkeypatch.setattr(http_protocol, "_LINGER_READ_S", 60.0)
    async with hosted() as host, host.wire() as wire, host.wire() as other:
        wire.send(b"no HTTP\r\n\r\n")
        await until(lambda: any(one._is_refused for one in host.server.server_state.connections))
        reads, linger = [], http_protocol.BoundedHttpProtocol._linger
        monkeypatch.setattr(
            http_protocol.BoundedHttpProtocol, "_linger", lambda one: (reads.append(one), linger(one))
        )
        wire.send(b"x" * 10_000_000)
        await served_between_reads(other, reads)
        assert (await wire.reply()).status == 400


LONG_BODY = b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 10000000\r\n\r\n"


async def test_others_are_served_between_two_reads_of_a_body_after_its_response(monkeypatch):
    monkeypatch.setattr(http_protocol, "_LINGER_READ_S", 60.0)
    reads, read = [], http_protocol.BoundedHttpProtocol.on_body
    monkeypatch.setattr(
        http_protocol.BoundedHttpProtocol, "on_body", lambda one, body: (reads.append(one), read(one, body))
    )
    async with hosted((KEY,)) as host, host.wire() as wire, host.wire() as other:
        wire.send(LONG_BODY)
        assert (await wire.reply()).status == 401
        wire.send(b"x" * 10_000_000)
        await served_between_reads(other, reads)
        # An ending server does not wait for the rest.
        host.server.drain()
        await until(lambda: not host.server.server_state.connections)


@pytest.mark.parametrize("head", [LONG_BODY, b"no HTTP\r\n\r\n"], ids=["answered", "refused"])
async def test_its_time_ends_although_bytes_wait_to_be_read(head: bytes, monkeypatch):
    """They wait because it is read slowly, and not because the event loop is late."""
    monkeypatch.setattr(http_protocol, "_LINGER_READ_S", 60.0)
    monkeypatch.setattr(http_protocol, "_LINGER_S", 0.1)
    async with hosted((KEY,), limits={"body_timeout_ms": 100}) as host, host.wire() as wire:
        wire.send(head)
        assert (await wire.reply()).status in (400, 401)
        wire.send(b"x" * 10_000_000)
        await until(lambda: not host.server.server_state.connections)
