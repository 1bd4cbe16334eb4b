"""The client that waits in the event loop."""

import asyncio
from collections.abc import AsyncIterator
from itertools import count
from types import TracebackType
from typing import Self, Unpack

import httpx

from controlplane.sdk.errors import ConnectionLost, TandemError, api_error
from controlplane.sdk.protocol import (
    CHAT,
    EMBEDDINGS,
    ChatOptions,
    ChatReply,
    Embeddings,
    Inputs,
    Messages,
    Objective,
    Streamed,
    chat_body,
    chat_reply,
    embed_body,
    embeddings,
    http_options,
)
from controlplane.sdk.retries import DEFAULT_RETRIES, RETRIED, Retries


class AsyncTextStream(Streamed):
    """Pieces of text as they come. Closing it early aborts the request."""

    async def __aiter__(self) -> AsyncIterator[str]:
        try:
            async for received in self._answer.aiter_bytes():
                for text in self._events.read(received):
                    yield text
        except httpx.TransportError as error:
            raise self._events.lost(str(error)) from error
        finally:
            await self.aclose()
        self._events.end()

    async def aclose(self) -> None:
        await self._answer.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class AsyncTandem:
    """Holds connections: close it, or use it in `async with`. What its methods raise is a TandemError."""

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        retries: Retries = DEFAULT_RETRIES,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._retries = retries
        self._http = httpx.AsyncClient(**http_options(base_url, api_key, timeout_s), transport=transport)

    async def chat(self, messages: Messages, *, model: str, **options: Unpack[ChatOptions]) -> ChatReply:
        """A plain string is one message of the user."""
        return chat_reply(await self._whole(CHAT, chat_body(model, messages, options, is_streamed=False)))

    async def stream(
        self, messages: Messages, *, model: str, **options: Unpack[ChatOptions]
    ) -> AsyncTextStream:
        """Returns when the answer has begun."""
        body = chat_body(model, messages, options, is_streamed=True)
        return AsyncTextStream(await self._begun(CHAT, body))

    async def embed(
        self, inputs: Inputs, *, model: str, dimensions: int | None = None, **objective: Unpack[Objective]
    ) -> Embeddings:
        body = embed_body(model, inputs, dimensions, objective)
        return embeddings(await self._whole(EMBEDDINGS, body))

    async def aclose(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _whole(self, path: str, body: bytes) -> httpx.Response:
        answer = await self._begun(path, body)
        try:
            await answer.aread()
        except httpx.TransportError as error:
            raise ConnectionLost(f"{path}: the answer was cut off: {error!r}") from error
        finally:
            await answer.aclose()
        return answer

    async def _begun(self, path: str, body: bytes) -> httpx.Response:
        """The head of a successful answer, after as many attempts as are due."""
        request = self._http.build_request("POST", path, content=body)
        for attempt in count():
            answer: httpx.Response | None = None
            try:
                answer = await self._http.send(request, stream=True)
                if answer.is_success:
                    return answer
                content = await answer.aread()
                failure: TandemError = api_error(answer.status_code, content, answer.headers)
            except httpx.TransportError as error:
                failure = ConnectionLost(f"{path}: no answer: {error!r}")
                if not isinstance(error, RETRIED):
                    raise failure from error
            wait_s = self._retries.wait_s(attempt, answer)
            if wait_s is None:
                raise failure
            await asyncio.sleep(wait_s)
        raise AssertionError("an endless count has ended")
