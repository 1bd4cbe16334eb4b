"""Bodies in chunks: many short ones cost the event loop more than all other bytes of a request."""

import orjson
import pytest

from controlplane.api.settings import ApiKey
from tests.controlplane.api.test_http_protocol import CHAT, KEY, hosted

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


def chunked(size: int, count: int) -> bytes:
    """A request whose body, the rest of it spaces, comes in `count` chunks of `size` bytes."""
    body = orjson.dumps(CHAT).ljust(size * count)
    chunks = (body[at : at + size] for at in range(0, len(body), size))
    return HEAD + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"


@pytest.mark.parametrize("keys", [(), (KEY,)], ids=["open", "without a key"])
async def test_a_body_of_many_short_chunks_is_refused(keys: tuple[ApiKey, ...]):
    async with hosted(keys) as host, host.wire() as wire:
        wire.send(chunked(1, 5_000))
        reply = await wire.reply()
        assert (reply.status, reply.error["code"]) == (400, "invalid_http")
        assert "chunks" in reply.error["message"]
        assert await wire.is_closed()


@pytest.mark.parametrize(("size", "count"), [(1, 4_000), (300, 5_000)], ids=["short", "many"])
async def test_chunks_that_are_few_or_long_are_read(size: int, count: int):
    async with hosted() as host, host.wire() as wire:
        for _ in range(2):
            wire.send(chunked(size, count))
            assert (await wire.reply()).status == 200
