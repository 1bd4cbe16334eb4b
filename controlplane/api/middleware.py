"""Middleware for every request: request id, body limit, and an error response for unexpected exceptions.

Plain ASGI: it costs a few dictionary look-ups per request and one call per message.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from secrets import token_hex

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controlplane.api.access_log import AccessLog, AccessRecord
from controlplane.api.error_dialects import response_of, speaks_anthropic
from controlplane.api.errors import Problem, failure_of
from controlplane.api.protocol.requests import HEADER_ANTHROPIC_ID, HEADER_REQUEST_ID, HEADER_ROUTER_KEY
from controlplane.api.settings import SETTINGS, ApiSettings, SettingsSource
from controlplane.fleet.load_report import HEADER_LOAD
from controlplane.service.request_trace import TRACE, trace_of

_ID_HEADER = HEADER_REQUEST_ID.encode()
_ANTHROPIC_ID = HEADER_ANTHROPIC_ID.encode()
_ROUTER_KEY = HEADER_ROUTER_KEY.encode()
_LOAD = HEADER_LOAD.encode()
_TRACEPARENT = b"traceparent"
_IDENTITY = b"identity"
_MAX_LENGTH_DIGITS = 18
_VALID_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


Headers = Sequence[tuple[bytes, bytes]]


class RequestMiddleware:
    """Stores `request_id` in the scope and the response headers, and limits the body while it is read.

    Responses of Anthropic's protocol carry the id in `request-id` too. The settings in force when a request
    begins are stored in its scope. The access log gets a line at its end. Responses to a router of the fleet
    carry the load of the box.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: SettingsSource,
        load_header: Callable[[bytes, ApiSettings], bytes | None],
        access_log: AccessLog,
    ) -> None:
        """`load_header` gives the load report for a router with this key, or None for any other key."""
        self._app = app
        self._settings = settings
        self._load_header = load_header
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            # Health checks send HEAD; uvicorn drops the body of the response.
            scope = {**scope, "method": "GET"}
        headers = scope["headers"]
        given = _value(headers, _ID_HEADER)
        request_id = given if given is not None and _VALID_ID.fullmatch(given) else token_hex(8).encode()
        state = scope.setdefault("state", {})
        settings = state[SETTINGS] = self._settings()
        state["request_id"] = request_id.decode()
        state["has_bad_id"] = given is not None and given is not request_id
        id_names = (_ID_HEADER, _ANTHROPIC_ID) if speaks_anthropic(scope) else (_ID_HEADER,)

        router_key = _value(headers, _ROUTER_KEY)
        has_begun = False
        record = AccessRecord(scope)
        share, trace = settings.trace_share, None
        if share is not None and scope["method"] == "POST":
            trace = trace_of(_value(headers, _TRACEPARENT), scope["path"], share)
        # Set also to None: a caller in this process may serve several requests in one context.
        TRACE.set(trace)

        async def send_with_id(message: Message) -> None:
            nonlocal has_begun
            record.sent(message)
            if message["type"] == "http.response.start":
                has_begun = True
                message["headers"] = [*message["headers"], *((name, request_id) for name in id_names)]
                if trace is not None:
                    message["headers"].append((_TRACEPARENT, trace.header()))
                if router_key is not None and (load := self._load_header(router_key, settings)) is not None:
                    message["headers"].append((_LOAD, load))
            await send(message)

        with record.logged(self._access_log) if settings.has_access_log else nullcontext():
            try:
                await self._app(scope, _bounded(receive, headers, settings.limits.max_body), send_with_id)
            except Exception as error:
                if has_begun:
                    raise
                response = response_of(failure_of(error, overload_status=500), scope)
                await response(scope, receive, send_with_id)


def _bounded(receive: Receive, headers: Headers, most_bytes: int) -> Receive:
    header_error = _header_error(headers, most_bytes)
    seen_bytes = 0

    async def bounded() -> Message:
        nonlocal seen_bytes
        if header_error is not None:
            raise header_error
        message = await receive()
        if message["type"] == "http.request":
            seen_bytes += len(message.get("body", b""))
            if seen_bytes > most_bytes:
                raise _too_large(most_bytes)
        return message

    return bounded


def _header_error(headers: Headers, most_bytes: int) -> Problem | None:
    """Returns the error that the headers alone show: a compressed body, or one that is too large.

    A chunked body has no length; it is measured while it arrives.
    """
    coding = _value(headers, b"content-encoding") or _IDENTITY
    if coding.lower() != _IDENTITY:
        return Problem(
            415,
            f"content-encoding={coding[:80].decode('latin-1')!r}: compressed bodies are not "
            "supported; send the body uncompressed, without this header",
            param="content-encoding",
            code="unsupported_content_encoding",
            headers={"accept-encoding": _IDENTITY.decode()},
        )
    length = (_value(headers, b"content-length") or b"").lstrip(b"0")
    # Python refuses to convert thousands of digits.
    is_huge = len(length) > _MAX_LENGTH_DIGITS
    return _too_large(most_bytes) if length.isdigit() and (is_huge or int(length) > most_bytes) else None


def _too_large(most_bytes: int) -> Problem:
    return Problem(
        413,
        f"the body is larger than server.limits.max_body={most_bytes}; send less or raise the limit",
        code="request_too_large",
    )


def _value(headers: Headers, wanted: bytes) -> bytes | None:
    return next((value for name, value in headers if name == wanted), None)


def request_id_of(request: Request) -> str:
    """Returns the client's request id, or a generated one.

    Raises Problem (400) if the client's id has characters that a header must not echo.
    """
    if request.state.has_bad_id:
        raise Problem(
            400,
            f"{HEADER_REQUEST_ID}: should be 1 to 128 of A-Z a-z 0-9 . _ : -; change it or leave it out",
            param=HEADER_REQUEST_ID,
            code="invalid_value",
        )
    found: str = request.state.request_id
    return found
