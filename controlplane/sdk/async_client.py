"""The asyncio client."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Unpack

import httpx

from controlplane.sdk.protocol import (
    ChatOptions,
    ChatReply,
    Embeddings,
    EmbedOptions,
    HttpCall,
    Inputs,
    Messages,
    Reply,
    Streamed,
    chat_call,
    embed_call,
    http_options,
)
from controlplane.sdk.retries import DEFAULT_RETRIES, Attempts, Retries


class AsyncTextStream(Streamed, AbstractAsyncContextManager["AsyncTextStream"]):
    """Iterates over the text of a streamed chat. Closing it early aborts the request.

    Iteration raises StreamLost if the stream breaks before the response is complete.
    """

    async def __aiter__(self) -> AsyncIterator[str]:
        try:
            async for received in self._response.aiter_bytes():
                for text in self._events.read(received):
                    yield text
        except httpx.TransportError as error:
            raise self._events.lost(str(error)) from error
        finally:
            await self.aclose()
        self._events.end()

    async def aclose(self) -> None:
        """Closes the connection, which aborts an unfinished request."""
        await self._response.aclose()

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()


class AsyncTandem(AbstractAsyncContextManager["AsyncTandem"]):
    """A client with a connection pool: close it, or use it in `async with`.

    Every method raises a subclass of TandemError.
    """

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
        """Returns a complete chat response; a plain string is one user message."""
        return await self._send_and_parse(chat_call(model, messages, options))

    async def stream(
        self, messages: Messages, *, model: str, **options: Unpack[ChatOptions]
    ) -> AsyncTextStream:
        """Returns a stream of text once the server sends the first token."""
        return AsyncTextStream(
            await self._open_response(chat_call(model, messages, options, is_streamed=True))
        )

    async def embed(self, inputs: Inputs, *, model: str, **options: Unpack[EmbedOptions]) -> Embeddings:
        """Returns one vector per input."""
        return await self._send_and_parse(embed_call(model, inputs, options))

    async def aclose(self) -> None:
        """Closes all connections."""
        await self._http.aclose()

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def _send_and_parse(self, call: HttpCall[Reply]) -> Reply:
        response = await self._open_response(call)
        try:
            await response.aread()
        except httpx.TransportError as error:
            raise call.cut_off(error) from error
        finally:
            await response.aclose()
        return call.reply(response)

    async def _open_response(self, call: HttpCall[Reply]) -> httpx.Response:
        """Sends the call, with retries, and returns the response before its body is read."""
        request = self._http.build_request("POST", call.path, content=call.body)
        attempts = Attempts(self._retries, call.path)
        while True:
            response: httpx.Response | None = None
            try:
                response = await self._http.send(request, stream=True)
                if response.is_success:
                    return response
                await response.aread()
                wait_s = attempts.after_refusal(response)
            except httpx.TransportError as error:
                wait_s = attempts.after_loss(error, response)
            await asyncio.sleep(wait_s)
