"""Results of the calls, and the parsers of their responses."""

from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's message, to be appended to the conversation."""
        stated = self.raw["choices"][0]["message"].items()
        return {"role": "assistant", **{key: value for key, value in stated if value not in (None, [])}}


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The vectors of an embedding call: float32 [inputs, dimensions]."""

    vectors: npt.NDArray[np.float32]
    usage: Usage
    decision: Decision


@dataclass(frozen=True, slots=True)
class Completion:
    """The first choice of a text completion; `raw` is the whole response."""

    text: str
    finish_reason: str | None
    usage: Usage
    decision: Decision
    raw: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ScoredDocument:
    """One document of a rerank call: its position in the given documents, its relevance and its text."""

    index: int
    score: float
    text: str


@dataclass(frozen=True, slots=True)
class RerankedDocuments:
    """The documents of a rerank call, the most relevant first; `usage` is None if the server states none."""

    results: Sequence[ScoredDocument]
    usage: Usage | None
    decision: Decision

    @property
    def texts(self) -> list[str]:
        """The documents alone, the most relevant first."""
        return [result.text for result in self.results]


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """The token ids of a text or a conversation; `token_strs` only if they were asked for."""

    count: int
    tokens: Sequence[int]
    token_strs: Sequence[str] | None
    max_model_len: int | None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model of the server; `kind` is `generate`, `embed` or another one that the server states."""

    id: str
    kind: str | None
    max_model_len: int | None


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether every engine answers; true or false in a condition.

    `reason` says why the server is not ready. `impaired` names the parts that fail while requests are still
    served.
    """

    is_ready: bool
    reason: str | None = None
    impaired: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.is_ready


def decision(headers: Mapping[str, str]) -> Decision:
    """Reads the decision from the response headers."""
    return Decision(
        headers.get(HEADER_REQUEST_ID),
        headers.get(HEADER_DECISION),
        _number(headers.get(HEADER_QUEUE_MS)),
        _number(headers.get(HEADER_PREDICTED_TTFT_MS)),
    )


def _number(text: str | None) -> float | None:
    """The number of a header; None without one, or if a proxy has made it something else."""
    return float(text) if text is not None and text.replace(".", "", 1).isdecimal() else None


def chat_reply(response: httpx.Response) -> ChatReply:
    """Parses a buffered chat response."""
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


def embeddings(response: httpx.Response) -> Embeddings:
    """Parses an embedding response."""
    raw = orjson.loads(response.content)
    rows = [np.frombuffer(b64decode(row["embedding"]), dtype="<f4") for row in raw["data"]]
    return Embeddings(
        np.stack(rows).astype(np.float32), Usage.model_validate(raw["usage"]), decision(response.headers)
    )


def completion(response: httpx.Response) -> Completion:
    """Parses a buffered text completion."""
    raw = orjson.loads(response.content)
    choice = raw["choices"][0]
    return Completion(
        text=choice["text"],
        finish_reason=choice["finish_reason"],
        usage=Usage.model_validate(raw["usage"]),
        decision=decision(response.headers),
        raw=raw,
    )


def reranked(documents: Sequence[str], response: httpx.Response) -> RerankedDocuments:
    """Parses a rerank response; `documents` are those of the request."""
    raw = orjson.loads(response.content)
    usage = raw.get("usage") or {}
    return RerankedDocuments(
        [
            ScoredDocument(one["index"], one["relevance_score"], documents[one["index"]])
            for one in raw["results"]
        ],
        # Some servers count only total_tokens here.
        Usage.model_validate({"prompt_tokens": usage.get("total_tokens"), **usage}) if usage else None,
        decision(response.headers),
    )


def tokenized(response: httpx.Response) -> TokenizedText:
    """Parses a tokenize response."""
    raw = orjson.loads(response.content)
    return TokenizedText(raw["count"], raw["tokens"], raw.get("token_strs"), raw.get("max_model_len"))


def served_models(response: httpx.Response) -> list[ServedModel]:
    """Parses the list of models."""
    found = orjson.loads(response.content)["data"]
    return [ServedModel(one["id"], one.get("kind"), one.get("max_model_len")) for one in found]


def readiness(response: httpx.Response) -> Readiness:
    """Parses the response of a server that is ready."""
    return Readiness(is_ready=True, impaired=orjson.loads(response.content).get("impaired") or {})
