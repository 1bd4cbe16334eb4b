"""Base of the POST endpoints: authentication, body parsing, and abort when the client disconnects.

One scope covers waiting, running and sending, so that a disconnect in any phase aborts the request.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Self, TypeVar

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from controlplane.api.auth import caller_of
from controlplane.api.body_memory import BodyMemory, MemoryAccount
from controlplane.api.body_parsing import BodyParser
from controlplane.api.memory_release import MemoryRelease
from controlplane.api.middleware import request_id_of
from controlplane.api.protocol.path_kinds import KIND_OF_PATH
from controlplane.api.protocol.requests import (
    HEADER_DECISION,
    HEADER_PREDICTED_TTFT_MS,
    HEADER_QUEUE_MS,
    Objectives,
)
from controlplane.api.settings import ARRIVAL, ApiSettings, settings_for
from controlplane.api.slo_headers import hints_of
from controlplane.core.request import Kind
from controlplane.service.request_jobs import RequestOrigin
from controlplane.service.ticket import Ticket

log = logging.getLogger(__name__)

Body = TypeVar("Body", bound=Objectives)
RawHeaders = list[tuple[bytes, bytes]]

_DECISIONS_BY_SEVERITY = ("ADMIT", "ADMIT_WITH_PREEMPTION", "DEFER")


@dataclass(frozen=True, slots=True)
class ParsedRequest(Generic[Body]):
    """A validated request.

    `origin` has the id that the client or the middleware gave it, which need not be unique, and the time at
    which its first bytes reached the host, if the HTTP server knows it. `settings` are those it began with.
    `headers` have lower-case names. `memory` counts what the request holds until it ends.
    """

    origin: RequestOrigin
    body: Body
    settings: ApiSettings
    headers: RawHeaders
    memory: MemoryAccount


Reply = Callable[[ParsedRequest[Body], Send], Awaitable[None]]
"""Serves one parsed request and sends the response."""


# Trimming blocks the allocator, so only answers of more than this multiple of `inline_body` cause it.
_LARGE_ANSWER = 16


class EndpointFactory:
    """Creates the routes that share authentication and parsing."""

    def __init__(self, on_shed: Callable[[Kind], None]) -> None:
        """`on_shed` is called for each request that is rejected because of the memory of bodies."""
        self.release = MemoryRelease()
        """Returns the memory of large requests and answers to the system."""
        self._bodies = BodyParser(self.release)
        self._memory = BodyMemory(on_shed)

    def route(self, path: str, model: type[Body], reply: Reply[Body]) -> Route:
        """Returns the POST route at `path` for bodies of type `model`."""
        return Route(path, _Endpoint(self, model, reply), methods=["POST"])

    async def parse(self, request: Request, model: type[Body]) -> ParsedRequest[Body]:
        """Authenticates and validates a request. Raises Problem with a 4xx or the overload status."""
        settings = settings_for(request)
        caller = caller_of(request.headers, settings)
        kind = KIND_OF_PATH.get(request.scope["path"], Kind.GENERATE)
        account = self._memory.account(caller.tenant, kind, settings)
        headers = request.scope["headers"]
        try:
            content = await _content(request, account)
            body, size = await self._bodies.parse(content, model, settings.limits, tenant=caller.tenant)
            account.hold_body(size)
            arrival = request.scope["state"].get(ARRIVAL)
            origin = RequestOrigin(request_id_of(request), caller, hints_of(headers, body), arrival)
        except BaseException:
            account.free()
            raise
        return ParsedRequest(origin, body, settings, headers, account)


async def _content(request: Request, account: MemoryAccount) -> bytes:
    """Reads the body. Raises Problem, and ClientDisconnect if it ends too early."""
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        account.grow(size)
        chunks.append(chunk)
    return b"".join(chunks)


@dataclass(frozen=True, slots=True)
class _Endpoint(Generic[Body]):
    """ASGI application of one route; plain ASGI is faster than a framework's function wrapper."""

    endpoints: EndpointFactory
    model: type[Body]
    reply: Reply[Body]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request. An exception before the first byte becomes an error response."""
        parsed = await self.endpoints.parse(Request(scope, receive), self.model)
        watch = DisconnectWatch(receive, send)
        try:
            async with watch:
                await self.reply(parsed, watch.send)
        except ClientDisconnected:
            message = "request %s: client disconnected after %d chunks; request aborted"
            log.debug(message, parsed.origin.request_id, watch.chunks)
        finally:
            # Templates, tokens and log probabilities are free by now, but the allocator keeps their memory.
            large = _LARGE_ANSWER * parsed.settings.limits.inline_body
            if parsed.memory.is_counted or watch.sent_bytes > large:
                self.endpoints.release.schedule()
            parsed.memory.free()


def ticket_headers(tickets: list[Ticket]) -> RawHeaders:
    """Response headers of one or more tickets: the most severe decision and the longest times."""
    decision = max((ticket.decision for ticket in tickets), key=_DECISIONS_BY_SEVERITY.index)
    queue_ms = max(ticket.queue_ms for ticket in tickets)
    headers = {HEADER_DECISION: decision, HEADER_QUEUE_MS: f"{queue_ms:.3f}"}
    predicted = [ms for ticket in tickets if (ms := ticket.predicted_ttft_ms) is not None]
    if predicted:
        headers[HEADER_PREDICTED_TTFT_MS] = f"{max(predicted):.3f}"
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


async def send_json(send: Send, body: bytes, headers: RawHeaders) -> None:
    """Sends a complete JSON response with status 200."""
    fixed = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": fixed + headers})
    await send({"type": "http.response.body", "body": body})


class ClientDisconnected(Exception):
    """The client closed the connection, or the server did because the client stopped reading."""


class DisconnectWatch:
    """Async context manager that cancels its body and raises ClientDisconnected when the client leaves.

    Enter the context after the request body was read; from then on `receive` only reports the disconnect.
    """

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._is_gone = False
        self.chunks = self.sent_bytes = 0
        """Parts of the response body that were sent, and their bytes."""

    async def send(self, message: Message) -> None:
        """Sends an ASGI message and counts the parts of the body."""
        await self._send(message)
        if message["type"] == "http.response.body":
            self.chunks += 1
            self.sent_bytes += len(message["body"])

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._earlier_cancels = task.cancelling()
        self._watch = asyncio.create_task(self._watch_client())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.cancel()
        # The task's frame refers to this object; the cycle would live until the next garbage collection.
        del self._watch
        if not self._is_gone:
            return
        is_only_ours = self._task.uncancel() <= self._earlier_cancels
        if is_only_ours and kind is asyncio.CancelledError:
            raise ClientDisconnected from error

    async def _watch_client(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._is_gone = True
        self._task.cancel()
