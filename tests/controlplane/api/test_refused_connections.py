"""A refused client may send on for a while: a connection closed with unread bytes loses the response."""

import pytest

from controlplane.api import http_protocol
from tests.controlplane.api.scripted_server import until
from tests.controlplane.api.test_http_protocol import hosted


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
