"""Requests that ask for another protocol are served as any others, with their bodies."""

import pytest

from tests.controlplane.api.test_http_protocol import CHAT, GET, hosted, post, until

H2C = (b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"http2-settings: AAEAAEAAAAIAAAAA")
WEBSOCKET = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"


@pytest.mark.parametrize("cut", [None, "in the headers", "before the body"])
async def test_its_body_is_read_and_the_connection_serves_on(
    cut: str | None, caplog: pytest.LogCaptureFixture
):
    request = post(CHAT, *H2C)
    end = request.index(b"\r\n\r\n")
    async with hosted() as host, host.wire() as wire:
        state = host.server.server_state
        if cut == "in the headers":
            wire.send(request[: end - 9])
            await until(lambda: any(one._unparsed_bytes for one in state.connections))
            wire.send(request[end - 9 :])
        elif cut == "before the body":
            wire.send(request[: end + 4])
            await until(lambda: bool(state.tasks or state.total_requests))
            wire.send(request[end + 4 :])
        else:
            wire.send(request)
        assert (await wire.reply()).status == 200
        wire.send(post(CHAT, *H2C), WEBSOCKET, GET)
        assert [(await wire.reply()).status for _ in range(3)] == [200, 200, 200]
        assert len(host.stage.generator.runs) == 2
    assert caplog.messages == []


@pytest.mark.parametrize("upgrade", [H2C, (b"connection: upgrade", b"connection: keep-alive", b"upgrade: x")])
async def test_its_body_is_not_the_next_request(upgrade: tuple[bytes, ...]):
    """Another client of a proxy, which sends several requests on one connection, would get the response."""
    head = b"\r\n".join([b"POST /v1/chat/completions HTTP/1.1", b"host: x", b"content-length: %d" % len(GET)])
    async with hosted() as host, host.wire() as wire:
        wire.send(b"\r\n".join([head, *upgrade, b"", b""]))
        state = host.server.server_state
        await until(lambda: bool(state.tasks or state.total_requests))
        wire.send(GET)
        reply = await wire.reply()
        assert (reply.status, reply.error["code"]) == (400, "invalid_json")
        wire.send(post())
        assert b"chat.completion" in (await wire.reply()).body


async def test_connect_is_refused():
    async with hosted() as host, host.wire() as wire:
        wire.send(b"CONNECT example.com:80 HTTP/1.1\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n")
        assert (await wire.reply()).status == 400
        assert await wire.is_closed()
