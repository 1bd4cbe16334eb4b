"""Answers of Cohere's endpoints, for /openapi.json; built without these models, like those of `answers`."""

from typing import Literal

from controlplane.api.protocol.types import Described, ToolCall

# CohereEmbeddings has a field of the name `float`.
VectorLists = list[list[float]]


class CohereTokenCounts(Described):
    """Tokens of the input and, where there is one, of the output."""

    input_tokens: int
    output_tokens: int | None = None


class CohereUsage(Described):
    """Token counts of a chat; every token is billed."""

    billed_units: CohereTokenCounts
    tokens: CohereTokenCounts
    cached_tokens: int


class CoherePart(Described):
    """A part of a message, which has the member of its type."""

    type: Literal["text", "thinking"]
    text: str | None = None
    thinking: str | None = None


class CohereAnswerMessage(Described):
    """The message of a chat."""

    role: Literal["assistant"]
    content: list[CoherePart] | None = None
    tool_plan: str | None = None
    tool_calls: list[ToolCall] | None = None


class CohereLogprobs(Described):
    """The log probability of a token of the text."""

    text: str
    token_ids: list[int]
    logprobs: list[float]


class CohereChatResponse(Described):
    """Answer of /v2/chat; a stream sends Cohere's events."""

    id: str
    message: CohereAnswerMessage
    finish_reason: Literal["COMPLETE", "STOP_SEQUENCE", "MAX_TOKENS", "TOOL_CALL"]
    usage: CohereUsage
    logprobs: list[CohereLogprobs] | None = None


class CohereVersion(Described):
    """The version of Cohere's protocol."""

    version: Literal["1", "2"]


class CohereMeta(Described):
    """`meta` of an answer."""

    api_version: CohereVersion
    billed_units: CohereTokenCounts | None = None


class CohereEmbeddings(Described):
    """The vectors by type; base64 holds little-endian float32."""

    float: VectorLists | None = None
    base64: list[str] | None = None


class CohereEmbedResponse(Described):
    """Answer of /v2/embed."""

    id: str
    embeddings: CohereEmbeddings
    texts: list[str]
    response_type: Literal["embeddings_by_type"]
    meta: CohereMeta


class CohereTokens(Described):
    """Answer of /v1/tokenize."""

    tokens: list[int]
    token_strings: list[str]
    meta: CohereMeta


class CohereText(Described):
    """Answer of /v1/detokenize."""

    text: str
    meta: CohereMeta


class CohereModel(Described):
    """A model at /v1/models for Cohere's clients."""

    name: str
    endpoints: list[Literal["chat", "embed", "rerank"]]
    finetuned: bool
    context_length: int


class CohereModelList(Described):
    """Answer of GET /v1/models to Cohere's clients, all models on one page."""

    models: list[CohereModel]
