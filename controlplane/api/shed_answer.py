"""Answers a request that is shed before its body is read."""

from collections.abc import Sequence
from functools import cache

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controlplane.api.cross_origin import with_cors
from controlplane.api.errors import overload_failure
from controlplane.api.settings import SettingsSource


def shed_answer(settings: SettingsSource, origins: Sequence[str]) -> ASGIApp:
    """An ASGI application that gives every request the overload status; its connection may be used again.

    Scripts of pages of these origins may read the answer: without that they would see a network error.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        for message in _messages(settings().overload_status):
            # A copy, to which headers are added.
            await send({**message})

    return with_cors(answer, origins)


@cache
def _messages(status: int) -> tuple[Message, Message]:
    failure = overload_failure(status)
    stated = {"content-type": "application/json", "content-length": str(len(failure.body)), **failure.headers}
    headers = [(name.encode(), value.encode("latin-1")) for name, value in stated.items()]
    return (
        {"type": "http.response.start", "status": failure.status, "headers": headers},
        {"type": "http.response.body", "body": failure.body},
    )
