"""Builds requests and parses responses, without I/O, for both clients."""

from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypedDict, TypeVar

import httpx
import numpy as np
import numpy.typing as npt
import orjson

from controlplane.api.protocol.requests import (
    HEADER_DECISION,
    HEADER_PREDICTED_TTFT_MS,
    HEADER_QUEUE_MS,
    HEADER_REQUEST_ID,
    Usage,
)
from controlplane.sdk.errors import ConnectionLost, StreamLost, api_error

Messages = str | Sequence[Mapping[str, Any]]
Inputs = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]

Reply = TypeVar("Reply")

_SLO_PARTS = ("ttft_ms", "tpot_ms", "e2e_ms", "gap_ms")


class SloHints(TypedDict, total=False):
    """Service class and objectives of one call, in milliseconds."""

    service_class: str
    ttft_ms: float
    tpot_ms: float
    e2e_ms: float
    gap_ms: float


class ChatOptions(SloHints, total=False):
    """Options of a chat call; `extra` holds any further fields of the request body."""

    max_tokens: int
    temperature: float
    top_p: float
    stop: str | Sequence[str]
    seed: int
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    response_format: Mapping[str, Any]
    extra: Mapping[str, Any]


class EmbedOptions(SloHints, total=False):
    """Options of an embedding call.

    `truncate_prompt_tokens` of -1 keeps as many tokens as the model takes; `extra` as in ChatOptions.
    """

    dimensions: int
    prompt_name: str
    truncate_prompt_tokens: int
    truncation_side: Literal["left", "right"]
    extra: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision of the gate: ADMIT, ADMIT_WITH_PREEMPTION or DEFER, and the time in the queue."""

    request_id: str | None
    decision: str | None
    queue_ms: float | None
    predicted_ttft_ms: float | None


@dataclass(frozen=True, slots=True)
class ChatReply:
    """The first choice of a response; `raw` is the whole response.

    `reasoning` is empty unless the server separates it from the text.
    """

    text: str
    reasoning: str
    tool_calls: Sequence[Mapping[str, Any]]
    finish_reason: str | None
    usage: Usage
    decision: Decision
    raw: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The vectors of an embedding call: float32 [inputs, dimensions]."""

    vectors: npt.NDArray[np.float32]
    usage: Usage
    decision: Decision


@dataclass(frozen=True, slots=True)
class HttpCall(Generic[Reply]):
    """Path and body of a POST request, and the parser of its response."""

    path: str
    body: bytes
    reply: Callable[[httpx.Response], Reply]

    def cut_off(self, error: httpx.TransportError) -> ConnectionLost:
        """The exception for a response whose body did not arrive completely."""
        return ConnectionLost(f"{self.path}: the connection closed within the response: {error!r}")


def chat_call(
    model: str, messages: Messages, options: ChatOptions, *, is_streamed: bool = False
) -> HttpCall[ChatReply]:
    """The request of a chat, buffered or streamed."""
    turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    body = {"model": model, "messages": turns} | _with_slo(options)
    if is_streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return HttpCall("/v1/chat/completions", orjson.dumps(body), _chat_reply)


def embed_call(model: str, inputs: Inputs, options: EmbedOptions) -> HttpCall[Embeddings]:
    """The request of an embedding call."""
    given = inputs if isinstance(inputs, str) else list(inputs)
    body = {"model": model, "input": given} | _with_slo(options) | {"encoding_format": "base64"}
    return HttpCall("/v1/embeddings", orjson.dumps(body), _embeddings)


def _with_slo(options: Mapping[str, Any]) -> dict[str, Any]:
    body = {key: value for key, value in options.items() if key not in (*_SLO_PARTS, "extra")}
    slo = {part: options[part] for part in _SLO_PARTS if options.get(part) is not None}
    return body | ({"slo": slo} if slo else {}) | dict(options.get("extra") or {})


def decision(headers: Mapping[str, str]) -> Decision:
    """Reads the decision from the response headers."""
    queue_ms, predicted = headers.get(HEADER_QUEUE_MS), headers.get(HEADER_PREDICTED_TTFT_MS)
    return Decision(
        headers.get(HEADER_REQUEST_ID),
        headers.get(HEADER_DECISION),
        None if queue_ms is None else float(queue_ms),
        None if predicted is None else float(predicted),
    )


def _chat_reply(response: httpx.Response) -> ChatReply:
    raw = orjson.loads(response.content)
    choice = raw["choices"][0]
    message = choice["message"]
    return ChatReply(
        text=message["content"] or "",
        reasoning=message.get("reasoning") or "",
        tool_calls=message.get("tool_calls") or (),
        finish_reason=choice["finish_reason"],
        usage=Usage.model_validate(raw["usage"]),
        decision=decision(response.headers),
        raw=raw,
    )


def _embeddings(response: httpx.Response) -> Embeddings:
    raw = orjson.loads(response.content)
    rows = [np.frombuffer(b64decode(row["embedding"]), dtype="<f4") for row in raw["data"]]
    return Embeddings(
        np.stack(rows).astype(np.float32), Usage.model_validate(raw["usage"]), decision(response.headers)
    )


class ChatEvents:
    """Parses the server-sent events of one chat.

    Lines are split at LF only, because JSON may contain U+2028.
    """

    def __init__(self, response: httpx.Response) -> None:
        self._headers = response.headers
        self._rest = b""
        self._seen: list[str] = []
        self._is_done = False
        self.decision = decision(response.headers)
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        self._calls: dict[int, dict[str, Any]] = {}
        self._thoughts: list[str] = []

    def read(self, received: bytes) -> Iterator[str]:
        """Parses received bytes and yields their text. Raises StreamLost for an error event."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (text := self._chunk(line[5:].strip())):
                self._seen.append(text)
                yield text

    def end(self) -> None:
        """Call at the end of the connection. Raises StreamLost if [DONE] was not received."""
        if not self._is_done:
            raise self.lost("the connection closed")

    def lost(self, why: str) -> StreamLost:
        """The exception for a broken stream, with the text received so far."""
        return StreamLost(f"the stream ended before the response was complete: {why}", "".join(self._seen))

    def _chunk(self, content: bytes) -> str:
        if content == b"[DONE]":
            self._is_done = True
            return ""
        chunk = orjson.loads(content)
        if "error" in chunk:
            error = api_error(500, content, self._headers)
            raise self.lost(error.message) from error
        if chunk.get("usage"):
            self.usage = Usage.model_validate(chunk["usage"])
        text = ""
        for choice in chunk["choices"]:
            if choice.get("index"):
                continue
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            text += choice["delta"].get("content") or ""
            self._thoughts.append(choice["delta"].get("reasoning") or "")
            for piece in choice["delta"].get("tool_calls") or ():
                self._add_to_call(**piece)
        return text

    def _add_to_call(self, index: int, function: Mapping[str, Any] | None = None, **named: Any) -> None:
        """Adds a piece of a tool call: the first has id, type and name; the arguments come in any number."""
        empty = {"id": None, "type": "function", "function": {"name": None, "arguments": ""}}
        call, piece = self._calls.setdefault(index, empty), function or {}
        call |= {key: value for key, value in named.items() if value}
        called = call["function"]
        called["name"] = piece.get("name") or called["name"]
        called["arguments"] += piece.get("arguments") or ""

    @property
    def tool_calls(self) -> Sequence[Mapping[str, Any]]:
        """The tool calls received so far, in order."""
        return [self._calls[index] for index in sorted(self._calls)]

    @property
    def reasoning(self) -> str:
        """The reasoning received so far."""
        return "".join(self._thoughts)


class Streamed:
    """Properties of the first choice that both kinds of stream share.

    `usage`, `finish_reason` and `tool_calls` are complete at the end of the stream, `reasoning` when the text
    begins.
    """

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self._events = ChatEvents(response)

    @property
    def decision(self) -> Decision:
        """The decision of the gate."""
        return self._events.decision

    @property
    def usage(self) -> Usage | None:
        """Token counts; None before the end."""
        return self._events.usage

    @property
    def finish_reason(self) -> str | None:
        """Finish reason of the response; None before the end."""
        return self._events.finish_reason

    @property
    def tool_calls(self) -> Sequence[Mapping[str, Any]]:
        """The tool calls received so far, in order."""
        return self._events.tool_calls

    @property
    def reasoning(self) -> str:
        """The reasoning received so far."""
        return self._events.reasoning


def http_options(base_url: str, api_key: str | None, timeout_s: float) -> dict[str, Any]:
    """Constructor arguments of the httpx client."""
    headers = {"content-type": "application/json", "user-agent": "tandem-sdk"}
    if api_key is not None:
        headers["authorization"] = f"Bearer {api_key}"
    # OpenAI's client is configured with a URL that ends in /v1; accept the same URL.
    root = base_url.rstrip("/").removesuffix("/v1")
    return {"base_url": root, "headers": headers, "timeout": httpx.Timeout(timeout_s, connect=10.0)}
