"""How does a benchmark ask a server, at the least cost of its own? HTTP/1.1 over kept connections, by hand.

Client and servers share the machine that is measured, so a client that parses little disturbs little. It
speaks to the servers of these benchmarks only: JSON bodies, lengths or chunks, no redirects.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType


class Connection:
    """One request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def post(self, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
        """The whole body. Raises RuntimeError for any status but 200."""
        return b"".join([part async for part in self.stream(path, body, headers)])

    async def stream(
        self, path: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[bytes]:
        """Parts of the body as they arrive; exhaust it before the next request."""
        lines = [f"POST {path} HTTP/1.1", "host: bench", "content-type: application/json"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        lines += [f"content-length: {len(body)}", "", ""]
        self._writer.write("\r\n".join(lines).encode() + body)
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status, _, rest = head.partition("\r\n")
        fields = dict(line.lower().split(": ", 1) for line in rest.split("\r\n") if ": " in line)
        parts = self._chunks() if "chunked" in fields.get("transfer-encoding", "") else self._whole(fields)
        if " 200" not in status:
            told = b"".join([part async for part in parts]).decode(errors="replace")
            raise RuntimeError(f"{path}: {status}: {told[:500]}")
        async for part in parts:
            yield part

    async def _whole(self, fields: Mapping[str, str]) -> AsyncGenerator[bytes]:
        yield await self._reader.readexactly(int(fields.get("content-length", "0")))

    async def _chunks(self) -> AsyncGenerator[bytes]:
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            yield (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readexactly(2)

    def close(self) -> None:
        self._writer.close()


class Connections:
    """As many to one port as are in use at once, each kept for the next request."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._free: list[Connection] = []

    @asynccontextmanager
    async def one(self) -> AsyncGenerator[Connection]:
        """A connection whose request failed is not used again."""
        connection = self._free.pop() if self._free else await self._opened()
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        self._free.append(connection)

    async def _opened(self) -> Connection:
        return Connection(*await asyncio.open_connection("127.0.0.1", self._port, limit=2**24))

    async def __aenter__(self) -> "Connections":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._free:
            connection.close()
