"""What does one HTTP exchange cost its client? As little as can be: the server shares its cores.

HTTP/1.1 over kept connections, parsed by httptools; the body is handed on as it arrives. A server may close
a connection that rested just when it is used again: what broke there before the first byte of an answer is
sent once more, on a new one. No redirects, no compression, no proxies, no TLS: servers of this machine or
this network.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import httptools

OnBody = Callable[[bytes], None]


class IncompleteResponse(OSError):
    """The server closed before its answer was complete."""


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> "Address":
        host, _, port = url.removeprefix("http://").rstrip("/").rpartition(":")
        if not host:
            return cls(port, 80)
        return cls(host, int(port))


@dataclass(slots=True)
class Head:
    """Header names in lower case."""

    status: int
    headers: dict[str, str]


class _Connection(asyncio.Protocol):
    """One exchange at a time. `has_response_bytes` once there is something of its answer."""

    def __init__(self) -> None:
        self.is_usable = True
        self.has_response_bytes = False
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._headers: dict[str, str] = {}
        self._on_body: OnBody = lambda part: None
        self._done: asyncio.Future[Head] | None = None

    # --- of httptools ---------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, part: bytes) -> None:
        self._on_body(part)

    def on_message_complete(self) -> None:
        self.is_usable = self.is_usable and bool(self._parser.should_keep_alive())
        if self._done is not None and not self._done.done():
            self._done.set_result(Head(self._parser.get_status_code(), self._headers))

    # --- of asyncio -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are Transports in all but their class.
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
        """Raises ConnectionLost."""
        assert self._transport is not None
        self._parser, self._headers, self._on_body = httptools.HttpResponseParser(self), {}, on_body
        self.has_response_bytes = False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        finished = False
        try:
            head = await self._done
            finished = True
            return head
        finally:
            # Half an answer read: the connection is of no use to the next request.
            if not finished:
                self.close()

    def close(self) -> None:
        self.is_usable = False
        if self._transport is not None:
            self._transport.abort()


class Connections:
    """At most `limit` at once to one address; who finds none free waits."""

    def __init__(self, address: Address, limit: int) -> None:
        self._address = address
        self._free: list[_Connection] = []
        self._slots = asyncio.Semaphore(limit)

    async def exchange(
        self, request: bytes, on_body: OnBody, *, on_send: Callable[[], None] | None = None
    ) -> Head:
        """`on_send` is called when the request is first written. Raises OSError."""
        async with self._slots:
            kept = self._reusable()
            connection = kept or await self._open()
            if on_send is not None:
                on_send()
            try:
                head = await connection.exchange(request, on_body)
            except IncompleteResponse:
                if kept is None or kept.has_response_bytes:
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
        """The whole body. Raises OSError, and RuntimeError for any status but 200."""
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
            if (kept := self._free.pop()).is_usable:
                return kept
        return None

    async def _open(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(_Connection, self._address.host, self._address.port)
        return made

    def close(self) -> None:
        for connection in self._free:
            connection.close()
        self._free.clear()


@asynccontextmanager
async def connections(address: Address, limit: int) -> AsyncIterator[Connections]:
    opened = Connections(address, limit)
    try:
        yield opened
    finally:
        opened.close()


def request_bytes(
    address: Address, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"host: {address.host}:{address.port}"]
    if body:
        lines += ["content-type: application/json", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
