"""One request from body to answer: who asks for what, and is the caller still there?

One scope covers waiting, running and sending: a caller that leaves at any of them takes its work along.
"""

import asyncio
import logging
from codecs import BOM_UTF8
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Self, TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from controlplane.api.auth import caller_of
from controlplane.api.errors import Problem, invalid_body
from controlplane.api.middleware import request_id_of
from controlplane.api.protocol.requests import (
    HEADER_DECISION,
    HEADER_PREDICTED_TTFT_MS,
    HEADER_QUEUE_MS,
    Objectives,
)
from controlplane.api.settings import ApiSettings
from controlplane.api.slo_headers import hints_of
from controlplane.service.jobs import Caller, RequestHints
from controlplane.service.ticket import Ticket

log = logging.getLogger(__name__)

Body = TypeVar("Body", bound=Objectives)
RawHeaders = list[tuple[bytes, bytes]]

_SEVEREST_LAST = ("ADMIT", "ADMIT_WITH_PREEMPTION", "DEFER")


@dataclass(frozen=True, slots=True)
class ParsedRequest(Generic[Body]):
    """What one request asks, checked. `request_id` is the caller's or the door's; it may come twice."""

    request_id: str
    caller: Caller
    body: Body
    hints: RequestHints


Reply = Callable[[ParsedRequest[Body], Send], Awaitable[None]]
"""Does what is asked, and sends what comes of it."""


class EndpointFactory:
    """Takes requests in."""

    def __init__(self, settings: ApiSettings) -> None:
        self.settings = settings

    def route(self, path: str, model: type[Body], reply: Reply[Body]) -> Route:
        """`path` takes such bodies."""
        return Route(path, _Exchange(self, model, reply), methods=["POST"])

    async def ask(self, request: Request, model: type[Body]) -> ParsedRequest[Body]:
        """Raises Problem."""
        caller = caller_of(request.headers, self.settings.api_keys)
        request_id = request_id_of(request)
        try:
            body = model.model_validate_json((await request.body()).removeprefix(BOM_UTF8))
        except ValidationError as error:
            raise invalid_body(error, model) from None
        except ClientDisconnect:
            raise Problem(400, "the body ended early; send all of it", code="incomplete_body") from None
        return ParsedRequest(request_id, caller, body, hints_of(request.scope["headers"], body))


@dataclass(frozen=True, slots=True)
class _Exchange(Generic[Body]):
    """Replies while the caller is present. Plain ASGI: what a framework puts around a function costs more."""

    reception: EndpointFactory
    model: type[Body]
    reply: Reply[Body]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What is raised before anything is sent becomes an error answer."""
        ask = await self.reception.ask(Request(scope, receive), self.model)
        stalled_after_s = self.reception.settings.stalled_client_s
        try:
            async with DisconnectWatch(receive, send, stalled_after_s=stalled_after_s) as presence:
                await self.reply(ask, presence.send)
        except ClientDisconnected:
            log.info("request %s: its caller left", ask.request_id)


def ticket_headers(tickets: list[Ticket]) -> RawHeaders:
    """Of several tickets the severest decision and the longest times."""
    decision = max((ticket.decision for ticket in tickets), key=_SEVEREST_LAST.index)
    queue_ms = max(ticket.queue_ms for ticket in tickets)
    headers = {HEADER_DECISION: decision, HEADER_QUEUE_MS: f"{queue_ms:.3f}"}
    predicted = [ms for ticket in tickets if (ms := ticket.predicted_ttft_ms) is not None]
    if predicted:
        headers[HEADER_PREDICTED_TTFT_MS] = f"{max(predicted):.3f}"
    return raw_headers(headers)


def raw_headers(headers: Mapping[str, str]) -> RawHeaders:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


async def send_json(send: Send, body: bytes, headers: RawHeaders) -> None:
    fixed = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": fixed + headers})
    await send({"type": "http.response.body", "body": body})


# FOLDED presence.py:
# Is the caller still there? While it is, work goes on; when it leaves, the work is cancelled.
#
# A caller that takes nothing for `stalled_after_s` counts as gone: what it holds is others' memory.


class ClientDisconnected(Exception):
    """Nobody is left to answer."""


class DisconnectWatch:
    """Cancels the body of its `async with` and turns that into CallerGone when the caller leaves.

    The request's body must have been read: from then on `receive` tells only of the disconnect.
    """

    def __init__(self, receive: Receive, send: Send, *, stalled_after_s: float) -> None:
        self._receive = receive
        self._send = send
        self._stalled_after_s = stalled_after_s
        self._sending_since: float | None = None
        self._is_gone = False

    async def send(self, message: Message) -> None:
        self._sending_since = asyncio.get_running_loop().time()
        await self._send(message)
        self._sending_since = None

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("Presence is entered inside a task")
        self._task = task
        self._earlier_cancels = task.cancelling()
        self._watch = asyncio.create_task(self._watch_caller())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.cancel()
        # The frame in which it ends refers to this, which else would live until a collection of garbage.
        del self._watch
        if not self._is_gone:
            return
        is_only_ours = self._task.uncancel() <= self._earlier_cancels
        if is_only_ours and kind is asyncio.CancelledError:
            raise ClientDisconnected from error

    async def _watch_caller(self) -> None:
        while not self._is_stalled():
            try:
                async with asyncio.timeout(self._stalled_after_s):
                    message = await self._receive()
            except TimeoutError:
                continue
            if message["type"] == "http.disconnect":
                break
        self._is_gone = True
        self._task.cancel()

    def _is_stalled(self) -> bool:
        since = self._sending_since
        return since is not None and asyncio.get_running_loop().time() - since >= self._stalled_after_s
