"""What holds for every request, whatever it asks? An id, a bounded body, and an answer even to our faults.

Plain ASGI: it costs a few dictionary look-ups a request and one call a message.
"""

import re
from collections.abc import Iterable
from secrets import token_hex

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controlplane.api.errors import Problem, error_response, failure_of
from controlplane.api.wire import HEADER_REQUEST_ID

_ID_HEADER = HEADER_REQUEST_ID.encode()
_VALID_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class Door:
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
        given = next((value for name, value in headers if name == _ID_HEADER), None)
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
            await self._app(scope, self._bounded(receive, _declared_length(headers)), labelled)
        except Exception as error:
            if has_begun:
                raise
            await error_response(failure_of(error, overload_status=500))(scope, receive, labelled)

    def _bounded(self, receive: Receive, declared_bytes: int) -> Receive:
        seen_bytes = 0

        async def bounded() -> Message:
            nonlocal seen_bytes
            if declared_bytes > self._max_body_bytes:
                raise self._too_large()
            message = await receive()
            if message["type"] == "http.request":
                seen_bytes += len(message.get("body", b""))
                if seen_bytes > self._max_body_bytes:
                    raise self._too_large()
            return message

        return bounded

    def _too_large(self) -> Problem:
        return Problem(
            413,
            f"the body is larger than server.max_body={self._max_body_bytes}; send less or raise it",
            code="request_too_large",
        )


def _declared_length(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """0 when the body comes in chunks: it is then measured as it arrives."""
    given = next((value for name, value in headers if name == b"content-length"), b"0")
    return int(given) if given.isdigit() else 0


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
