"""Answers of the OpenAI-compatible endpoints and of Anthropic's, for /openapi.json.

Responses are built without these models, which would cost more than their encoding; a test compares them.
"""

from typing import Any, Literal

from pydantic import Field

from controlplane.api.protocol.requests import CachedTokens, ErrorObject, OutputTokenDetails, Usage
from controlplane.api.protocol.types import Described, ToolCall


class ErrorResponse(Described):
    """Every answer that is not a success."""

    error: ErrorObject
    message: str | None = Field(
        None, description="The message of `error` again, on Cohere's paths only, as its clients expect"
    )
    type: Literal["error"] | None = Field(
        None, description="Only on /v1/messages, as Anthropic's clients expect"
    )


class TokenEntry(Described):
    """The log probability of a token."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChosenToken(TokenEntry):
    """The token at a position, with the likeliest ones."""

    top_logprobs: list[TokenEntry]


class ChatLogprobs(Described):
    """Log probabilities of a chat choice."""

    content: list[ChosenToken]
    refusal: None = None


class AnswerMessage(Described):
    """The message of a chat choice; `content` is null beside calls or reasoning only."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None


class AnswerChoice(Described):
    """How a choice ended."""

    index: int
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: str | int | None = None


class ChatAnswerChoice(AnswerChoice):
    """A choice of a chat completion."""

    message: AnswerMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(Described):
    """Answer of /v1/chat/completions; a stream sends `chat.completion.chunk` events and [DONE]."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatAnswerChoice]
    usage: Usage


class TextLogprobs(Described):
    """Log probabilities of a text completion."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(AnswerChoice):
    """A choice of a text completion."""

    text: str
    logprobs: TextLogprobs | None


class TextCompletion(Described):
    """Answer of /v1/completions; a stream sends events of the same shape and [DONE]."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class EmbeddingVector(Described):
    """One vector, or its little-endian float32 values in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(Described):
    """Answer of /v1/embeddings."""

    id: str
    object: Literal["list"]
    created: int
    data: list[EmbeddingVector]
    model: str
    usage: Usage


class OutputPart(Described):
    """Text of an item; `annotations` and `logprobs` belong to `output_text`."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[ChosenToken] | None = None


class ResponseItem(Described):
    """An item of a response; which members it has depends on its type."""

    type: Literal["message", "reasoning", "function_call"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] | None = None
    content: list[OutputPart] | None = None
    summary: list[Any] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class InputTokenDetails(CachedTokens):
    """Details of the input tokens."""

    cache_write_tokens: int


class ResponseUsage(Described):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokenDetails
    output_tokens: int
    output_tokens_details: OutputTokenDetails
    total_tokens: int


class ResponseObject(Described):
    """Answer of /v1/responses, and what its stream ends with."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete"]
    incomplete_details: dict[str, str] | None
    error: None
    model: str
    output: list[ResponseItem]
    usage: ResponseUsage | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, str | None]
    service_tier: Literal["default"]
    store: Literal[False]
    background: Literal[False]
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int | None
    top_p: float | None
    truncation: Literal["disabled"]
    user: str | None


class AnswerBlock(Described):
    """A block of a message; which members it has depends on its type."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None


class MessageUsage(Described):
    """Token counts of a message; cached tokens are not among `input_tokens`."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicMessage(Described):
    """Answer of /v1/messages; a stream sends Anthropic's events."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Described):
    """Answer of /v1/messages/count_tokens."""

    input_tokens: int


class InputTokenCount(Described):
    """Answer of /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class ModelEntry(Described):
    """A model at /v1/models; an adapter has the name of its model as `parent`."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["tandem"]
    root: str
    parent: str | None
    kind: Literal["generate", "embed", "rerank"]
    max_model_len: int


class ModelList(Described):
    """Answer of GET /v1/models."""

    object: Literal["list"]
    data: list[ModelEntry]


class AnthropicModel(Described):
    """A chat model at /v1/models for requests with the header `anthropic-version`."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int


class AnthropicModelList(Described):
    """Answer of GET /v1/models with the header `anthropic-version`, all models on one page."""

    data: list[AnthropicModel]
    first_id: str | None
    last_id: str | None
    has_more: Literal[False]


class ServerVersion(Described):
    """Answer of /version."""

    version: str


class Liveness(Described):
    """Answer of /health, while the process runs."""

    status: Literal["alive"]


class ReadyAnswer(Described):
    """Answer of /ready once every engine responds."""

    status: Literal["ready"]
    impaired: dict[str, str] | None = Field(
        None, description="The parts that fail while requests are still served, each with the kind of fault"
    )
