"""Servers that give scripted responses, for both clients."""

from base64 import b64encode
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import numpy as np
import orjson
import pytest

from controlplane import sdk

BOTH = pytest.mark.parametrize("is_async", [False, True])

# A response can be read once, so each is created when it is needed.
Answer = Callable[[], httpx.Response]


def error(status: int, code: str, **headers: str) -> Answer:
    content = {"error": {"message": "m", "type": "t", "param": None, "code": code}}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return partial(httpx.Response, status, json=content, headers=named)


GOOD = partial(
    httpx.Response,
    200,
    json={
        "choices": [{"message": {"content": "ok"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "total_tokens": 2},
    },
)


class Answers(httpx.MockTransport):
    """Returns the given responses in turn; an exception is raised."""

    def __init__(self, *answers: Answer | Exception) -> None:
        self.calls = 0
        self._answers = answers
        super().__init__(self._next)

    def _next(self, request: httpx.Request) -> httpx.Response:
        answer = self._answers[self.calls]
        self.calls += 1
        if isinstance(answer, Exception):
            raise answer
        return answer()


class Server(httpx.MockTransport):
    """Answers each request with `reply(path, body)`, an object or a response, and keeps the requests."""

    def __init__(self, reply: Callable[[str, Any], Any]) -> None:
        self.requests: list[httpx.Request] = []
        self._reply = reply
        super().__init__(self._serve)

    def _serve(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        found = self._reply(request.url.path, orjson.loads(request.content or b"null"))
        return found if isinstance(found, httpx.Response) else httpx.Response(200, json=found)

    @property
    def bodies(self) -> list[Any]:
        return [orjson.loads(request.content) for request in self.requests]


async def call(is_async: bool, transport: Any, method: str, *args: Any, **options: Any) -> Any:  # noqa: FBT001
    """The result of a method of the blocking or the asyncio client."""
    retries = sdk.Retries(most=0)
    if is_async:
        async with sdk.AsyncTandem(transport=transport, retries=retries) as tandem:
            return await getattr(tandem, method)(*args, **options)
    with sdk.Tandem(transport=transport, retries=retries) as blocking:
        return getattr(blocking, method)(*args, **options)


def chat_reply(
    content: str | None = None, *calls: tuple[str, str], finish_reason: str = "stop"
) -> dict[str, Any]:
    """A chat response with a text or with tool calls (name, arguments)."""
    asked = [
        {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": content, "tool_calls": asked}
    return {
        "choices": [{"message": message, "finish_reason": finish_reason}],
        "usage": {"prompt_tokens": 1, "total_tokens": 2},
    }


def vectors(rows: list[list[float]], tokens: int = 1) -> dict[str, Any]:
    """An embedding response with these vectors."""
    encoded = [{"embedding": b64encode(np.float32(row).tobytes()).decode()} for row in rows]
    return {"data": encoded, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
