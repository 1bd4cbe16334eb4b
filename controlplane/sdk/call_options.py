"""Keyword options of the calls, as typed dictionaries for both clients."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

Messages = str | Sequence[Mapping[str, Any]]
"""A conversation in OpenAI's format; a plain string is one user message."""
Inputs = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
"""A text, several texts, token ids, or several lists of token ids."""


Options = Mapping[str, Any]
"""Any of the following dictionaries, where they are only passed on."""


class CallOptions(TypedDict, total=False):
    """Options of every call.

    `timeout` is the longest time in seconds without a byte from the server; it replaces the client's.
    `traceparent` continues a trace (W3C Trace Context); without it OpenTelemetry's current span is passed on,
    where it is installed.
    """

    timeout: float
    traceparent: str


class ModelOptions(CallOptions, total=False):
    """Options of every call that runs a model: service class, end-to-end objective in milliseconds.

    `extra` holds any further fields of the request body.
    """

    service_class: str
    e2e_ms: float
    extra: Mapping[str, Any]


class GenerationOptions(ModelOptions, total=False):
    """Options of every call that generates text; the other objectives in milliseconds."""

    ttft_ms: float
    tpot_ms: float
    gap_ms: float
    max_tokens: int
    temperature: float
    top_p: float
    stop: str | Sequence[str]
    seed: int


class ToolOptions(GenerationOptions, total=False):
    """Options of a chat that calls Python functions."""

    tool_choice: str | Mapping[str, Any]


class ChatOptions(ToolOptions, total=False):
    """Options of a chat call."""

    tools: Sequence[Mapping[str, Any]]
    response_format: Mapping[str, Any]


class EmbedOptions(ModelOptions, total=False):
    """Options of an embedding call.

    `truncate_prompt_tokens` of -1 keeps as many tokens as the model takes.
    """

    dimensions: int
    prompt_name: str
    truncate_prompt_tokens: int
    truncation_side: Literal["left", "right"]


class RerankOptions(ModelOptions, total=False):
    """Options of a rerank call: with `top_n` only the best are returned."""

    top_n: int


class TokenizeOptions(CallOptions, total=False):
    """Options of a tokenize call.

    `add_special_tokens` applies to texts and is true by default; a conversation has those of the chat
    template. `extra` holds any further fields of the request body.
    """

    add_special_tokens: bool
    return_token_strs: bool
    extra: Mapping[str, Any]
