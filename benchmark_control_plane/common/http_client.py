"""Minimal HTTP/1.1 client with low CPU cost, because load generator and server share the cores.

Connections are kept alive and responses are parsed by httptools; the body is passed on as it arrives. A
server may close an idle connection just as it is reused: a request that fails there before the first byte of
the response is sent once more on a new connection. There are no redirects, compression, proxies or TLS.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import httptools

OnBody = Callable[[bytes], None]


class IncompleteResponse(OSError):
    """The connection was lost, or the response is not HTTP, before the response was complete."""


@dataclass(frozen=True, slots=True)
class Address:
    """Host and port of a server."""

    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> "Address":
        """Parses `http://HOST[:PORT]`; the default port is 80."""
        host, _, port = url.removeprefix("http://").rstrip("/").rpartition(":")
        if not host:
            return cls(port, 80)
        return cls(host, int(port))


@dataclass(slots=True)
class Head:
    """Status and headers of a response; header names are in lower case."""

    status: int
    headers: dict[str, str]


class _Connection(asyncio.Protocol):
    """One connection, for one exchange at a time.

    `has_response_bytes` is True once any byte of the current response has arrived.
    """

    def __init__(self) -> None:
        self.is_usable = True
        self.has_response_bytes = False
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._headers: dict[str, str] = {}
        self._on_body: OnBody = lambda part: None
        self._done: asyncio.Future[Head] | None = None

    # --- callbacks of httptools ---------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, part: bytes) -> None:
        self._on_body(part)

    def on_message_complete(self) -> None:
        self.is_usable = self.is_usable and bool(self._parser.should_keep_alive())
        if self._done is not None and not self._done.done():
            self._done.set_result(Head(self._parser.get_status_code(), self._headers))

    # --- callbacks of asyncio -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the interface of Transport but not its class.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.has_response_bytes = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(IncompleteResponse(f"not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(IncompleteResponse(f"connection lost: {exc or 'closed by the server'}"))

    def _fail(self, error: Exception) -> None:
        self.is_usable = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

    async def exchange(self, request: bytes, on_body: OnBody) -> Head:
        """Sends a request and waits for the whole response; raises IncompleteResponse."""
        assert self._transport is not None
        self._parser, self._headers, self._on_body = httptools.HttpResponseParser(self), {}, on_body
        self.has_response_bytes = False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._done
        except BaseException:
            # After a partial response the connection cannot be reused.
            self.close()
            raise

    def close(self) -> None:
        self.is_usable = False
        if self._transport is not None:
            self._transport.abort()


class Connections:
    """Pool of connections to one address; with a `limit`, requests beyond it wait for a free one."""

    def __init__(self, address: Address, limit: int | None) -> None:
        self._address = address
        self._free: list[_Connection] = []
        self._slots: AbstractAsyncContextManager[None] = (
            nullcontext() if limit is None else asyncio.Semaphore(limit)
        )

    async def exchange(
        self, request: bytes, on_body: OnBody, *, on_send: Callable[[], None] | None = None
    ) -> Head:
        """Sends a request and passes the parts of the response's body to `on_body`.

        `on_send` is called when the client begins to send, before a connection is opened: how soon a server
        accepts one is the server's time. Raises OSError.
        """
        async with self._slots:
            if on_send is not None:
                on_send()
            reused = self._reusable()
            connection = reused or await self._open()
            try:
                head = await connection.exchange(request, on_body)
            except IncompleteResponse:
                if reused is None or reused.has_response_bytes:
                    raise
                connection = await self._open()
                head = await connection.exchange(request, on_body)
            if connection.is_usable:
                self._free.append(connection)
            else:
                connection.close()
            return head

    async def post(
        self, path: str, body: bytes, headers: Mapping[str, str] | None = None, on_body: OnBody | None = None
    ) -> bytes:
        """Posts JSON and returns the body; raises OSError, and RuntimeError for any status but 200."""
        parts: list[bytes] = []

        def take(part: bytes) -> None:
            parts.append(part)
            if on_body is not None:
                on_body(part)

        head = await self.exchange(request_bytes(self._address, "POST", path, body, headers), take)
        whole = b"".join(parts)
        if head.status != 200:
            raise RuntimeError(f"{path}: {head.status}: {whole[:500].decode(errors='replace')}")
        return whole

    def _reusable(self) -> _Connection | None:
        while self._free:
            if (free := self._free.pop()).is_usable:
                return free
        return None

    async def _open(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._address.host, self._address.port)
        return connection

    def close(self) -> None:
        """Closes all idle connections."""
        for connection in self._free:
            connection.close()
        self._free.clear()


@asynccontextmanager
async def connections(address: Address, limit: int | None) -> AsyncIterator[Connections]:
    """A connection pool, closed on leaving; None: without a limit."""
    pool = Connections(address, limit)
    try:
        yield pool
    finally:
        pool.close()


def request_bytes(
    address: Address, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> bytes:
    """An HTTP/1.1 request as bytes; a body is declared as JSON."""
    lines = [f"{method} {path} HTTP/1.1", f"host: {address.host}:{address.port}"]
    if body:
        lines += ["content-type: application/json", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
