"""Tests of the HTTP client: body framing, connection reuse, and retry on a lost idle connection."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from benchmark_control_plane.common.http_client import Address, IncompleteResponse, connections

LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
CHUNKS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
FAILURE = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nlate"
HALF = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nh"
NOTHING = b""


@asynccontextmanager
async def asking(*answers: bytes):
    """Connections to a server that gives these responses, one per request, over any number of connections.

    The server closes a connection after a truncated response. Yields the connections and the requests seen.
    """
    seen: list[bytes] = []
    left = list(answers)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(b"connected")
        answer = LENGTH
        while answer not in (HALF, NOTHING):
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            seen.append(head + await reader.readexactly(size))
            answer = left.pop(0)
            writer.write(answer)
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server, connections(Address(*server.sockets[0].getsockname()), limit=4) as opened:
        yield opened, seen


async def test_bodies_by_length_and_by_chunks_over_one_connection():
    parts: list[bytes] = []
    async with asking(LENGTH, CHUNKS, LENGTH) as (opened, seen):
        assert await opened.post("/a", b"{}", {"x-one": "1"}) == b"hi"
        assert await opened.post("/b", b"{}", on_body=parts.append) == b"abcde"
        assert await opened.post("/c", b"[]") == b"hi"
    assert parts == [b"abc", b"de"]
    assert seen.count(b"connected") == 1
    assert b"POST /a HTTP/1.1" in seen[1]
    assert b"x-one: 1\r\n" in seen[1]


async def test_a_request_beyond_the_limit_waits_for_a_connection():
    async with asking(LENGTH, LENGTH) as (unlimited, seen), connections(unlimited._address, 1) as opened:
        assert await asyncio.gather(opened.post("/a", b"{}"), opened.post("/b", b"{}")) == [b"hi", b"hi"]
    assert seen.count(b"connected") == 1


async def test_error_status_is_raised():
    async with asking(FAILURE) as (opened, _):
        with pytest.raises(RuntimeError, match="/a: 429: late"):
            await opened.post("/a", b"{}")


async def test_request_lost_on_a_reused_connection_is_sent_again():
    async with asking(LENGTH, NOTHING, LENGTH) as (opened, seen):
        await opened.post("/a", b"{}")
        assert await opened.post("/b", b"{}") == b"hi"
    assert seen.count(b"connected") == 2
    assert sum(b"POST /b" in line for line in seen) == 2


async def test_a_server_that_accepts_no_connection_does_not_make_the_client_late():
    """The client began to send, and the connection is refused after that."""
    began: list[bool] = []
    async with await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0) as server:
        address = Address(*server.sockets[0].getsockname())
    async with connections(address, None) as opened:
        with pytest.raises(OSError):
            await opened.exchange(b"", lambda part: None, on_send=lambda: began.append(True))
    assert began == [True]


@pytest.mark.parametrize("answers", [[NOTHING], [LENGTH, NOTHING, NOTHING], [LENGTH, HALF]])
async def test_request_lost_elsewhere_is_not_sent_again(answers: list[bytes]):
    async with asking(*answers) as (opened, seen):
        for _ in answers[1:2]:
            await opened.post("/a", b"{}")
        with pytest.raises(IncompleteResponse):
            await opened.post("/b", b"{}")
    assert sum(b"POST" in line for line in seen) == len(answers)
