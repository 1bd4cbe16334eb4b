"""Sends planned requests to OpenAI-compatible servers and records their responses.

Prompts are random token ids of the planned length, so only planned prefixes are shared and the server does
not tokenise; or random words, for a server that accepts no ids. Request bodies are built before the run. A
streamed chunk with output is time stamped when its bytes arrive. The number of tokens is the server's
`usage`, without it that of the chunks; a response with fewer tokens or embeddings than requested is a
failure.
"""

import random
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson

from benchmark_control_plane.common.http_client import (
    Address,
    Connections,
    Head,
    connections,
    request_bytes,
)
from benchmark_control_plane.judge.prompts import input_ids, input_text, prompt_ids, prompt_text
from benchmark_control_plane.judge.records import PartialResponse, loss_of
from benchmark_control_plane.judge.system_schema import Endpoint
from benchmark_control_plane.judge.workload import PlannedRequest
from controlplane.api.protocol.requests import HEADER_DECISION, HEADER_SERVICE_CLASS
from controlplane.core.decision import Outcome
from controlplane.core.request import Kind

_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_EMBEDDINGS = "/v1/embeddings"
_NO_CHOICE = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_VECTOR = b'"embedding":'
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_END_TO_END = "x-slo-e2e-ms"
_DROPPED = "x-llm-d-request-dropped-reason"


@dataclass(frozen=True, slots=True)
class Dialect:
    """Encoding of a request's class and tenant for one server.

    Attributes:
        names_classes: the server is Tandem; send x-service-class, and drawn token ids as they are.
        priorities: vLLM's `priority` by class; lower is served first.
        tenant_keys: API key by tenant.
        written: turns token ids into text, for a server that should tokenise.
    """

    names_classes: bool = False
    priorities: Mapping[str, int] | None = None
    tenant_keys: Mapping[str, str] = field(default_factory=dict)
    written: Callable[[list[int]], str] | None = None


@dataclass(slots=True)
class _Stream:
    """Incremental parser of a response body."""

    answer: PartialResponse
    is_stream: bool
    rest: bytes = b""
    is_done: bool = False
    failure: bytes | None = None

    def take(self, part: bytes) -> None:
        if not self.is_stream:
            self.rest += part
            return
        *events, self.rest = (self.rest + part).split(b"\n\n")
        for event in events:
            self._event(event)

    def _event(self, event: bytes) -> None:
        if event == b"data: [DONE]":
            self.is_done = True
        elif event.startswith(b"data: ") and b'"choices"' in event:
            if _USAGE.search(event) is not None:
                usage = orjson.loads(event[6:])["usage"]
                self.answer.output_tokens = usage["completion_tokens"]
            if _NO_CHOICE.search(event) is None and not _has_role_only(event):
                self.answer.tokens.append(time.perf_counter())
        elif event and not event.startswith(b":"):
            self.rest, self.failure = b"", event.partition(b"data: ")[2]


def _has_role_only(event: bytes) -> bool:
    """Whether a chunk of chat carries no output; some servers send one before the first token."""
    if b'"role"' not in event:
        return False
    delta = orjson.loads(event[6:])["choices"][0].get("delta")
    return delta is not None and not any(value for key, value in delta.items() if key != "role")


class HttpTarget:
    """Target over HTTP, with one endpoint for generation and one for embeddings."""

    def __init__(
        self,
        chat: tuple[Endpoint, Connections] | None,
        embeddings: tuple[Endpoint, Connections] | None,
        dialect: Dialect,
    ) -> None:
        self._at = {Kind.GENERATE: chat, Kind.EMBED: embeddings}
        self._dialect = dialect
        self._prepared: dict[str, bytes] = {}
        self._open = dict.fromkeys(self._at, 0)

    def prepare(self, plan: Sequence[PlannedRequest], seed: int) -> None:
        """Builds the bodies in advance, so that the run only sends them."""
        draw = random.Random(seed)
        self._prepared = {planned.id: self._body(planned, draw) for planned in plan}

    async def send(self, planned: PlannedRequest, answer: PartialResponse) -> None:
        """Sends a request and fills `answer` as the response arrives, or rejects it at the server's limit."""
        endpoint, pool = self._served(planned)
        if endpoint.max_concurrent is not None and self._open[planned.kind] >= endpoint.max_concurrent:
            answer.sent, answer.status, answer.loss = time.perf_counter(), 429, Outcome.REJECTED
            answer.error = f"{endpoint.max_concurrent} requests were at the server"
            return
        self._open[planned.kind] += 1
        try:
            await self._send(planned, answer, endpoint, pool)
        finally:
            self._open[planned.kind] -= 1

    async def _send(
        self, planned: PlannedRequest, answer: PartialResponse, endpoint: Endpoint, pool: Connections
    ) -> None:
        body = self._prepared.pop(planned.id, None) or self._body(planned, random.Random(planned.id))
        request = self._request(planned, endpoint, body)
        stream = _Stream(answer, is_stream=planned.kind is Kind.GENERATE)

        def on_send() -> None:
            answer.sent = time.perf_counter()

        try:
            head = await pool.exchange(request, stream.take, on_send=on_send)
        except OSError as error:
            answer.loss, answer.error = Outcome.FAILED, str(error)
            return
        _close(answer, head, stream, time.perf_counter(), planned)

    def _served(self, planned: PlannedRequest) -> tuple[Endpoint, Connections]:
        """The endpoint of a request; raises ValueError if there is none."""
        at = self._at[planned.kind]
        if at is None:
            raise ValueError(f"no endpoint serves {planned.kind} requests; add one or drop their streams")
        return at

    def _request(self, planned: PlannedRequest, endpoint: Endpoint, body: bytes) -> bytes:
        headers: dict[str, str] = {}
        if self._dialect.names_classes:
            headers[HEADER_SERVICE_CLASS] = planned.service_class
            if planned.e2e_ms is not None:
                headers[_END_TO_END] = f"{planned.e2e_ms:.3f}"
        if (key := self._dialect.tenant_keys.get(planned.tenant, endpoint.api_key)) is not None:
            headers["authorization"] = f"Bearer {key}"
        path = _EMBEDDINGS if planned.kind is Kind.EMBED else _PATHS[endpoint.api]
        return request_bytes(Address.of(endpoint.url), "POST", path, body, headers)

    def _body(self, planned: PlannedRequest, draw: random.Random) -> bytes:
        endpoint, _ = self._served(planned)
        if planned.kind is Kind.EMBED:
            body: dict[str, Any] = {
                "model": endpoint.model,
                "input": [(input_text if endpoint.text else input_ids)(n, draw) for n in planned.lengths],
                "encoding_format": "base64",
            }
            if self._dialect.names_classes and not endpoint.text:
                # Drawn ids lack the model's special tokens.
                body["token_ids"] = "as-given"
            return orjson.dumps(body)
        body = _generation(planned, endpoint, draw)
        if self._dialect.written is not None and isinstance(body.get("prompt"), list):
            body["prompt"] = self._dialect.written(body["prompt"])
        if self._dialect.priorities is not None:
            body["priority"] = self._dialect.priorities.get(planned.service_class, 0)
        return orjson.dumps(body)


@asynccontextmanager
async def http_target(
    chat: Endpoint | None,
    embeddings: Endpoint | None,
    dialect: Dialect,
) -> AsyncIterator[HttpTarget]:
    """A target with as many connections as requests are in flight, closed on leaving."""

    @asynccontextmanager
    async def opened(endpoint: Endpoint | None) -> AsyncIterator[tuple[Endpoint, Connections] | None]:
        if endpoint is None:
            yield None
            return
        async with connections(Address.of(endpoint.url), None) as pool:
            yield endpoint, pool

    async with opened(chat) as first, opened(embeddings) as second:
        yield HttpTarget(first, second, dialect)


def _generation(planned: PlannedRequest, endpoint: Endpoint, draw: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": endpoint.model,
        "max_tokens": planned.output_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if endpoint.api == "chat":
        return body | {"messages": [{"role": "user", "content": prompt_text(planned, draw)}]}
    return body | {"prompt": (prompt_text if endpoint.text else prompt_ids)(planned, draw)}


def _close(answer: PartialResponse, head: Head, stream: _Stream, now: float, planned: PlannedRequest) -> None:
    asked, inputs = planned.output_tokens, len(planned.lengths)
    answer.status = head.status
    answer.decision = head.headers.get(HEADER_DECISION)
    if head.status >= 400:
        _lose(answer, head.status, stream.rest or stream.failure or b"", head.headers.get(_DROPPED))
    elif stream.failure is not None:
        _lose(answer, head.status, stream.failure, None)
    elif stream.is_stream and not (stream.is_done and answer.tokens):
        answer.loss, answer.error = Outcome.FAILED, "the stream ended without [DONE] or without a token"
    elif stream.is_stream and (came := answer.output_tokens or len(answer.tokens)) < asked:
        need = "ignore_eos" if answer.output_tokens else "ignore_eos, and stream_options for the usage"
        answer.loss = Outcome.FAILED
        answer.error = f"{came} of {asked} tokens came; the server must support {need}"
    elif not stream.is_stream and (came := stream.rest.count(_VECTOR)) < inputs:
        answer.loss, answer.error = Outcome.FAILED, f"{came} of {inputs} embeddings came"
    else:
        answer.ended = now


def _lose(answer: PartialResponse, status: int, body: bytes, dropped: str | None) -> None:
    message, code = body[:200].decode("utf-8", "replace"), None
    try:
        error = orjson.loads(body)["error"]
        message, code = str(error["message"]), error.get("code")
    except (ValueError, KeyError, TypeError):
        # Not an OpenAI error object: the body itself is the message.
        pass
    answer.loss = loss_of(status, code if isinstance(code, str) else None, dropped)
    answer.error = message
