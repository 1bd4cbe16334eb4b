"""Builds the requests of all calls, without I/O, for both clients."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import httpx
import orjson

from controlplane.sdk.call_options import Inputs, Messages, Options
from controlplane.sdk.deadline import CallDeadline, current_deadline, ended_by
from controlplane.sdk.errors import MALFORMED, ConnectionLost, InvalidResponse, TandemError
from controlplane.sdk.replies import (
    ChatReply,
    Completion,
    Embeddings,
    Readiness,
    RerankedDocuments,
    ServedModel,
    TokenizedText,
    chat_reply,
    completion,
    embeddings,
    readiness,
    reranked,
    served_models,
    tokenized,
)
from controlplane.sdk.trace_context import trace_headers

Reply = TypeVar("Reply")

HEADER_E2E_MS = "x-slo-e2e-ms"
_SLO_PARTS = ("ttft_ms", "tpot_ms", "gap_ms")
# Not part of the body: e2e_ms is a header, because what remains of a deadline changes with each attempt.
_OUTSIDE = (*_SLO_PARTS, "e2e_ms", "extra", "timeout", "traceparent")
_CONNECT_S = 10.0


@dataclass(frozen=True, slots=True)
class HttpCall(Generic[Reply]):
    """One call: what is sent, how long it may take, and the parser of its response.

    `deadline` and the trace are those of the block in which the call was built, so that a stream or a batch
    that is sent later keeps them. Of what remains of the deadline the call states `stated_part` as its
    objective; it may take all of it.
    """

    path: str
    reply: Callable[[httpx.Response], Reply]
    body: bytes | None
    headers: Mapping[str, str]
    e2e_ms: float | None
    timeout: float | None
    deadline: CallDeadline | None
    stated_part: float = 1.0

    def request(self, http: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        """The request of one attempt. Raises DeadlineExceeded, and sends nothing, if no time remains."""
        limits = http.timeout if self.timeout is None else read_timeout(self.timeout)
        objectives = [] if self.e2e_ms is None else [self.e2e_ms]
        if self.deadline is not None:
            remaining_s = self.deadline.check(self.path)
            objectives.append(max(self.stated_part * remaining_s * 1000, 0.001))
            each = limits.as_dict().items()
            limits = httpx.Timeout(**{part: min(limit or remaining_s, remaining_s) for part, limit in each})
        headers = dict(self.headers)
        if objectives:
            headers[HEADER_E2E_MS] = f"{min(objectives):.3f}".rstrip("0").rstrip(".")
        method = "GET" if self.body is None else "POST"
        return http.build_request(method, self.path, content=self.body, headers=headers, timeout=limits)

    def result(self, response: httpx.Response) -> Reply:
        """The result of a successful response. Raises InvalidResponse if it has another format."""
        try:
            return self.reply(response)
        except MALFORMED as error:
            raise InvalidResponse(
                f"{self.path}: no response of this API ({error!r}): {response.content[:100]!r}; "
                "does base_url name the server?"
            ) from error

    def cut_off(self, error: httpx.TransportError) -> TandemError:
        """The exception for a response whose body did not arrive completely."""
        return ended_by(self.deadline, error, self.path) or ConnectionLost(
            f"{self.path}: the connection closed within the response: {error!r}"
        )


def chat_call(
    model: str, messages: Messages, options: Options, *, is_streamed: bool = False
) -> HttpCall[ChatReply]:
    """The request of a chat, buffered or streamed."""
    fields: dict[str, Any] = {"model": model, "messages": message_list(messages)}
    if is_streamed:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return _call("/v1/chat/completions", chat_reply, fields, options)


def completion_call(model: str, prompt: str | Sequence[int], options: Options) -> HttpCall[Completion]:
    """The request of a text completion."""
    given = prompt if isinstance(prompt, str) else list(prompt)
    return _call("/v1/completions", completion, {"model": model, "prompt": given}, options)


def embed_call(model: str, inputs: Inputs, options: Options) -> HttpCall[Embeddings]:
    """The request of an embedding call."""
    given = inputs if isinstance(inputs, str) else list(inputs)
    fields = {"model": model, "input": given, "encoding_format": "base64"}
    return _call("/v1/embeddings", embeddings, fields, options)


def rerank_call(
    model: str, query: str, documents: Sequence[str], options: Options
) -> HttpCall[RerankedDocuments]:
    """The request of a rerank call; the caller has the documents, so they are not sent back."""
    texts = [documents] if isinstance(documents, str) else list(documents)
    fields = {"model": model, "query": query, "documents": texts, "return_documents": False}
    return _call("/v1/rerank", partial(reranked, texts), fields, options)


def tokenize_call(model: str, text: Messages, options: Options) -> HttpCall[TokenizedText]:
    """The request of a tokenize call, for a text or for a conversation in the model's chat template."""
    what = {"prompt": text} if isinstance(text, str) else {"messages": list(text)}
    return _call("/tokenize", tokenized, {"model": model, **what}, options)


def models_call(options: Options) -> HttpCall[Sequence[ServedModel]]:
    """The request for the served models."""
    return _call("/v1/models", served_models, None, options)


def ready_call(options: Options) -> HttpCall[Readiness]:
    """The request for the server's readiness; a server that is not ready answers with an error."""
    return _call("/ready", readiness, None, options)


def message_list(messages: Messages) -> list[Mapping[str, Any]]:
    """The messages of a conversation."""
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)


def _call(
    path: str,
    reply: Callable[[httpx.Response], Reply],
    fields: Mapping[str, Any] | None,
    options: Options,
) -> HttpCall[Reply]:
    """Builds a call in the deadline and the trace of the caller; without `fields` it is a GET."""
    body: bytes | None = None
    if fields is not None:
        more = {key: value for key, value in options.items() if key not in _OUTSIDE}
        slo = {part: options[part] for part in _SLO_PARTS if options.get(part) is not None}
        extra = dict(options.get("extra") or {})
        body = orjson.dumps({**fields, **more, **({"slo": slo} if slo else {}), **extra})
    return HttpCall(
        path,
        reply,
        body,
        trace_headers(options.get("traceparent")),
        options.get("e2e_ms"),
        options.get("timeout"),
        current_deadline(),
    )


def read_timeout(timeout: float) -> httpx.Timeout:
    """Limits of one exchange with the server, in seconds; connecting takes at most ten."""
    return httpx.Timeout(timeout, connect=min(timeout, _CONNECT_S))


def http_options(base_url: str, api_key: str | None, timeout: float) -> dict[str, Any]:
    """Constructor arguments of the httpx client."""
    headers = {"content-type": "application/json", "user-agent": "tandem-sdk"}
    if api_key is not None:
        headers["authorization"] = f"Bearer {api_key}"
    # OpenAI's client is configured with a URL that ends in /v1; accept the same URL.
    root = base_url.rstrip("/").removesuffix("/v1")
    # The server's queue orders the requests; httpx's default of 100 connections would queue them here
    # instead.
    pool = httpx.Limits(max_connections=1000, max_keepalive_connections=100)
    return {"base_url": root, "headers": headers, "timeout": read_timeout(timeout), "limits": pool}
