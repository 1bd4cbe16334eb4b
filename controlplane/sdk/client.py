"""The client that waits in its thread."""

import time
from collections.abc import Iterator
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


class TextStream(Streamed):
    """Pieces of text as they come. Closing it early aborts the request."""

    def __iter__(self) -> Iterator[str]:
        try:
            for received in self._answer.iter_bytes():
                yield from self._events.read(received)
        except httpx.TransportError as error:
            raise self._events.lost(str(error)) from error
        finally:
            self.close()
        self._events.end()

    def close(self) -> None:
        self._answer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Tandem:
    """Holds connections: close it, or use it in `with`. What its methods raise is a TandemError."""

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
        """A plain string is one message of the user."""
        return chat_reply(self._whole(CHAT, chat_body(model, messages, options, is_streamed=False)))

    def stream(self, messages: Messages, *, model: str, **options: Unpack[ChatOptions]) -> TextStream:
        """Returns when the answer has begun."""
        body = chat_body(model, messages, options, is_streamed=True)
        return TextStream(self._begun(CHAT, body))

    def embed(
        self, inputs: Inputs, *, model: str, dimensions: int | None = None, **objective: Unpack[Objective]
    ) -> Embeddings:
        body = embed_body(model, inputs, dimensions, objective)
        return embeddings(self._whole(EMBEDDINGS, body))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _whole(self, path: str, body: bytes) -> httpx.Response:
        answer = self._begun(path, body)
        try:
            answer.read()
        except httpx.TransportError as error:
            raise ConnectionLost(f"{path}: the answer was cut off: {error!r}") from error
        finally:
            answer.close()
        return answer

    def _begun(self, path: str, body: bytes) -> httpx.Response:
        """The head of a successful answer, after as many attempts as are due."""
        request = self._http.build_request("POST", path, content=body)
        for attempt in count():
            answer: httpx.Response | None = None
            try:
                answer = self._http.send(request, stream=True)
                if answer.is_success:
                    return answer
                content = answer.read()
                failure: TandemError = api_error(answer.status_code, content, answer.headers)
            except httpx.TransportError as error:
                failure = ConnectionLost(f"{path}: no answer: {error!r}")
                if not isinstance(error, RETRIED):
                    raise failure from error
            wait_s = self._retries.wait_s(attempt, answer)
            if wait_s is None:
                raise failure
            time.sleep(wait_s)
        raise AssertionError("an endless count has ended")
