"""What holds for every request, whatever it asks? An id, a bounded body, and an answer even to our faults.

Plain ASGI: it costs a few dictionary look-ups a request and one call a message.
"""

import re
from collections.abc import Sequence
from secrets import token_hex

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controlplane.api.errors import Problem, error_response, failure_of
from controlplane.api.protocol.requests import HEADER_REQUEST_ID

_ID_HEADER = HEADER_REQUEST_ID.encode()
_PLAIN = b"identity"
_VALID_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


Headers = Sequence[tuple[bytes, bytes]]


class RequestMiddleware:
    """Puts `request_id` into the scope's state and on the answer; bounds bodies as they are read."""

    def __init__(self, app: ASGIApp, *, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            # What watches a service asks so; the server below keeps the body back.
            scope = {**scope, "method": "GET"}
        headers = scope["headers"]
        given = _value(headers, _ID_HEADER)
        request_id = given if given is not None and _VALID_ID.fullmatch(given) else token_hex(12).encode()
        state = scope.setdefault("state", {})
        state["request_id"] = request_id.decode()
        state["has_bad_id"] = given is not None and given is not request_id

        has_begun = False

        async def labelled(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                message["headers"] = [*message["headers"], (_ID_HEADER, request_id)]
            await send(message)

        try:
            await self._app(scope, self._bounded(receive, self._refusal(headers)), labelled)
        except Exception as error:
            if has_begun:
                raise
            await error_response(failure_of(error, overload_status=500))(scope, receive, labelled)

    def _bounded(self, receive: Receive, refusal: Problem | None) -> Receive:
        seen_bytes = 0

        async def bounded() -> Message:
            nonlocal seen_bytes
            if refusal is not None:
                raise refusal
            message = await receive()
            if message["type"] == "http.request":
                seen_bytes += len(message.get("body", b""))
                if seen_bytes > self._max_body_bytes:
                    raise self._too_large()
            return message

        return bounded

    def _refusal(self, headers: Headers) -> Problem | None:
        """Of the body, for what is said of it before it is read. One that comes in chunks, without a length,
        is measured as it arrives."""
        coding = _value(headers, b"content-encoding") or _PLAIN
        if coding.lower() != _PLAIN:
            return Problem(
                415,
                f"content-encoding={coding[:80].decode('latin-1')!r}: a body is read as it is; send it "
                "uncompressed, without this header",
                param="content-encoding",
                code="unsupported_content_encoding",
                headers={"accept-encoding": _PLAIN.decode()},
            )
        length = _value(headers, b"content-length") or b""
        return self._too_large() if length.isdigit() and int(length) > self._max_body_bytes else None

    def _too_large(self) -> Problem:
        return Problem(
            413,
            f"the body is larger than server.max_body={self._max_body_bytes}; send less or raise it",
            code="request_too_large",
        )


def _value(headers: Headers, wanted: bytes) -> bytes | None:
    return next((value for name, value in headers if name == wanted), None)


def request_id_of(request: Request) -> str:
    """Raises Problem for an id that could not be echoed."""
    if request.state.has_bad_id:
        raise Problem(
            400,
            f"{HEADER_REQUEST_ID}: should be 1 to 128 of A-Z a-z 0-9 . _ : -; change it or leave it out",
            param=HEADER_REQUEST_ID,
            code="invalid_value",
        )
    found: str = request.state.request_id
    return found
