"""The client reads what servers send, by length and by chunks, and keeps its connections."""

import asyncio

import pytest

from benchmark_control_plane.http_load import Connections


async def serving(answers: list[bytes], seen: list[bytes]):
    """A server that gives these answers, one a request, over however many connections."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(b"connected")
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                seen.append(head + await reader.readexactly(size))
                writer.write(answers.pop(0))
        except asyncio.IncompleteReadError:
            writer.close()

    return await asyncio.start_server(talk, "127.0.0.1", 0)


LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
CHUNKS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
FAILURE = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nlate"


async def test_bodies_by_length_and_by_chunks_over_one_connection():
    seen: list[bytes] = []
    server = await serving([LENGTH, CHUNKS, LENGTH], seen)
    async with server, Connections(server.sockets[0].getsockname()[1]) as connections:
        async with connections.one() as connection:
            assert await connection.post("/a", b"{}", {"x-one": "1"}) == b"hi"
        async with connections.one() as connection:
            assert [part async for part in connection.stream("/b", b"{}")] == [b"abc", b"de"]
            assert await connection.post("/c", b"[]") == b"hi"
    assert seen.count(b"connected") == 1
    assert b"POST /a HTTP/1.1" in seen[1]
    assert b"x-one: 1\r\n" in seen[1]


async def test_a_failure_is_told_and_its_connection_is_not_used_again():
    seen: list[bytes] = []
    server = await serving([FAILURE, LENGTH], seen)
    async with server, Connections(server.sockets[0].getsockname()[1]) as connections:
        with pytest.raises(RuntimeError, match="429 Too Many Requests: late"):
            async with connections.one() as connection:
                await connection.post("/a", b"{}")
        async with connections.one() as connection:
            assert await connection.post("/b", b"{}") == b"hi"
    assert seen.count(b"connected") == 2
