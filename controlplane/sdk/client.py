"""The blocking client."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
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


class TextStream(Streamed, AbstractContextManager["TextStream"]):
    """Iterates over the text of a streamed chat. Closing it early aborts the request.

    Iteration raises StreamLost if the stream breaks before the response is complete.
    """

    def __iter__(self) -> Iterator[str]:
        try:
            for received in self._response.iter_bytes():
                yield from self._events.read(received)
        except httpx.TransportError as error:
            raise self._events.lost(str(error)) from error
        finally:
            self.close()
        self._events.end()

    def close(self) -> None:
        """Closes the connection, which aborts an unfinished request."""
        self._response.close()

    def __exit__(self, *error: object) -> None:
        self.close()


class Tandem(AbstractContextManager["Tandem"]):
    """A client with a connection pool: close it, or use it in `with`.

    Every method raises a subclass of TandemError.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        retries: Retries = DEFAULT_RETRIES,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._retries = retries
        self._http = httpx.Client(**http_options(base_url, api_key, timeout_s), transport=transport)

    def chat(self, messages: Messages, *, model: str, **options: Unpack[ChatOptions]) -> ChatReply:
        """Returns a complete chat response; a plain string is one user message."""
        return self._send_and_parse(chat_call(model, messages, options))

    def stream(self, messages: Messages, *, model: str, **options: Unpack[ChatOptions]) -> TextStream:
        """Returns a stream of text once the server sends the first token."""
        return TextStream(self._open_response(chat_call(model, messages, options, is_streamed=True)))

    def embed(self, inputs: Inputs, *, model: str, **options: Unpack[EmbedOptions]) -> Embeddings:
        """Returns one vector per input."""
        return self._send_and_parse(embed_call(model, inputs, options))

    def close(self) -> None:
        """Closes all connections."""
        self._http.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _send_and_parse(self, call: HttpCall[Reply]) -> Reply:
        response = self._open_response(call)
        try:
            response.read()
        except httpx.TransportError as error:
            raise call.cut_off(error) from error
        finally:
            response.close()
        return call.reply(response)

    def _open_response(self, call: HttpCall[Reply]) -> httpx.Response:
        """Sends the call, with retries, and returns the response before its body is read."""
        request = self._http.build_request("POST", call.path, content=call.body)
        attempts = Attempts(self._retries, call.path)
        while True:
            response: httpx.Response | None = None
            try:
                response = self._http.send(request, stream=True)
                if response.is_success:
                    return response
                response.read()
                wait_s = attempts.after_refusal(response)
            except httpx.TransportError as error:
                wait_s = attempts.after_loss(error, response)
            time.sleep(wait_s)
