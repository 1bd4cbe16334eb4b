"""The description of the API at /openapi.json: models of requests and responses, and statuses of errors."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from controlplane.api.operations.explain import ExplainRequest
from controlplane.api.protocol.answers import (
    AnthropicMessage,
    AnthropicModel,
    AnthropicModelList,
    ChatCompletion,
    EmbeddingList,
    ErrorResponse,
    InputTokenCount,
    Liveness,
    ModelEntry,
    ModelList,
    ReadyAnswer,
    ResponseObject,
    ServerVersion,
    TextCompletion,
    TokenCount,
)
from controlplane.api.protocol.anthropic_messages import CountTokensRequest, MessagesRequest
from controlplane.api.protocol.cohere_answers import (
    CohereChatResponse,
    CohereEmbedResponse,
    CohereModel,
    CohereModelList,
    CohereText,
    CohereTokens,
)
from controlplane.api.protocol.cohere_messages import CohereChatRequest
from controlplane.api.protocol.cohere_texts import (
    CohereDetokenizeRequest,
    CohereEmbedRequest,
    CohereTokenizeRequest,
)
from controlplane.api.protocol.requests import (
    HEADER_RETRY_AFTER_MS,
    HEADER_SHOULD_RETRY,
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingRequest,
)
from controlplane.api.protocol.rerank_messages import (
    EitherRerankRequest,
    RankedText,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from controlplane.api.protocol.responses_messages import InputTokensRequest, ResponsesRequest
from controlplane.api.protocol.tei_messages import TeiEmbedRequest, TeiVector
from controlplane.api.protocol.tokenize_messages import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)

_SCHEMAS = "#/components/schemas/"

# An item of a list stands for an answer that is a bare list.
_Answer = type[BaseModel] | list[type[BaseModel]]
_BODIES: dict[str, tuple[type[BaseModel], list[_Answer]]] = {
    "/v1/chat/completions": (ChatCompletionRequest, [ChatCompletion]),
    "/v1/completions": (CompletionRequest, [TextCompletion]),
    "/v1/embeddings": (EmbeddingRequest, [EmbeddingList]),
    "/v1/responses": (ResponsesRequest, [ResponseObject]),
    "/v1/responses/input_tokens": (InputTokensRequest, [InputTokenCount]),
    "/v1/rerank": (RerankRequest, [RerankResponse]),
    "/v2/rerank": (RerankRequest, [RerankResponse]),
    "/rerank": (EitherRerankRequest, [RerankResponse, [RankedText]]),
    "/v1/score": (ScoreRequest, [ScoreResponse]),
    "/score": (ScoreRequest, [ScoreResponse]),
    "/v1/messages": (MessagesRequest, [AnthropicMessage]),
    "/v1/messages/count_tokens": (CountTokensRequest, [TokenCount]),
    "/v2/chat": (CohereChatRequest, [CohereChatResponse]),
    "/v2/embed": (CohereEmbedRequest, [CohereEmbedResponse]),
    "/embed": (TeiEmbedRequest, [[TeiVector]]),
    "/": (TeiEmbedRequest, [[TeiVector]]),
    "/v1/tokenize": (CohereTokenizeRequest, [CohereTokens]),
    "/v1/detokenize": (CohereDetokenizeRequest, [CohereText]),
    "/tokenize": (TokenizeRequest, [TokenizeResponse]),
    "/detokenize": (DetokenizeRequest, [DetokenizeResponse]),
}


_ERRORS: Mapping[int, str] = {
    400: "The request is not valid, or can never be served; `error.param` names the field.",
    401: "No key, or an unknown one.",
    403: "The key opens another part of the server, or not this service class.",
    404: "No such model, request or file.",
    408: "The headers or the body did not arrive within `server.limits`.",
    412: "Another version of the configuration is in force than `If-Match` states.",
    413: "The body exceeds `server.limits`.",
    415: "The body is compressed; it must be sent as it is.",
    429: "Rejected because of load or of a rate limit; `Retry-After` says when to send it again.",
    431: "The request line and headers exceed `server.limits`.",
    500: "A defect of the server or of an engine; the log has its cause.",
    503: "The engine is not running or the server is shutting down, or the status that "
    "`server.overload_status` states for load.",
}
"""The statuses of errors, each with the error object as its body."""
_EVERYWHERE = (400, 408, 431, 500)
_WITH_BODY = (413, 415)
_OF_MODELS = (*_EVERYWHERE, *_WITH_BODY, 401, 403, 404, 429, 503)
_OF_ADMIN = (*_EVERYWHERE, 401, 403)
_OPERATIONS: Mapping[tuple[str, str], tuple[int, ...]] = {
    ("/v1/models", "get"): (*_EVERYWHERE, 401),
    ("/v1/models/{model_id}", "get"): (*_EVERYWHERE, 401, 404),
    ("/version", "get"): _EVERYWHERE,
    ("/health", "get"): _EVERYWHERE,
    ("/ready", "get"): (*_EVERYWHERE, 503),
    ("/metrics", "get"): (*_EVERYWHERE, 401),
    ("/admin/state", "get"): _OF_ADMIN,
    ("/admin/live", "get"): _OF_ADMIN,
    ("/admin/load", "get"): _OF_ADMIN,
    ("/admin/drain", "post"): _OF_ADMIN,
    ("/admin/config", "get"): _OF_ADMIN,
    ("/admin/config", "put"): (*_OF_ADMIN, *_WITH_BODY, 412, 503),
    ("/admin/config/rollback", "post"): (*_OF_ADMIN, 412, 503),
    ("/admin/explain", "post"): (*_OF_ADMIN, *_WITH_BODY, 404, 429, 503),
    ("/admin/explain/{request_id}", "get"): (*_OF_ADMIN, 404),
}
"""Statuses of the errors of each operation that serves no model."""
_ANSWERS: Mapping[str, list[_Answer]] = {
    "/v1/models": [ModelList, AnthropicModelList, CohereModelList],
    "/v1/models/{model_id}": [ModelEntry, AnthropicModel, CohereModel],
    "/version": [ServerVersion],
    "/health": [Liveness],
    "/ready": [ReadyAnswer],
}
"""Answers of the GET endpoints that have a model; those of /admin are written for people."""
_MEDIA_TYPES = {"/metrics": "text/plain"}
_ANY = {"schema": {"type": "object"}}
_ADMIN_BODIES: Mapping[tuple[str, str], dict[str, Any]] = {
    ("/admin/config", "put"): {"application/json": _ANY, "application/yaml": _ANY},
    ("/admin/explain", "post"): {"application/json": {"schema": {"$ref": f"{_SCHEMAS}ExplainRequest"}}},
}
_RETRY_HEADERS = {
    "retry-after": {
        "description": "Seconds after which to send the request again; absent if that cannot help.",
        "schema": {"type": "integer", "minimum": 1},
    },
    HEADER_RETRY_AFTER_MS: {
        "description": "The same in milliseconds.",
        "schema": {"type": "integer", "minimum": 1},
    },
    HEADER_SHOULD_RETRY: {
        "description": "`false` if sending the request again cannot help.",
        "schema": {"type": "string"},
    },
}
_HEADERS: Mapping[int, dict[str, Any]] = {
    401: {"www-authenticate": {"description": "The scheme of the key.", "schema": {"type": "string"}}},
    415: {"accept-encoding": {"description": "The coding to send.", "schema": {"type": "string"}}},
    429: _RETRY_HEADERS,
    503: _RETRY_HEADERS,
}


@cache
def model_schemas() -> dict[str, Any]:
    """The JSON schemas of all bodies, by name. Building them takes 0.15 s."""
    described: list[_Answer] = [ErrorResponse, ExplainRequest]
    for answers in _ANSWERS.values():
        described += answers
    for body, answers in _BODIES.values():
        described += [body, *answers]
    models = dict.fromkeys(each[0] if isinstance(each, list) else each for each in described)
    _, definitions = models_json_schema(
        [(model, "validation") for model in models], ref_template=_SCHEMAS + "{model}"
    )
    return definitions["$defs"]  # type: ignore[no-any-return]


def describe_bodies(app: FastAPI) -> None:
    """Adds the models of requests and responses, and all statuses, to /openapi.json.

    The routes parse and build bodies themselves, which is faster than FastAPI's way but hides the models.
    """
    without_bodies = app.openapi

    def with_bodies() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = without_bodies()
            components = schema.setdefault("components", {})
            components.setdefault("schemas", {}).update(model_schemas())
            components["responses"] = {f"Error{status}": _error(status) for status in _ERRORS}
            for (path, method), statuses in _OPERATIONS.items():
                _describe(schema["paths"][path][method], (path, method), statuses)
            schema["paths"] |= {path: {"post": _operation(*bodies)} for path, bodies in _BODIES.items()}
        return app.openapi_schema or {}

    app.openapi = with_bodies  # type: ignore[method-assign]


def _describe(operation: dict[str, Any], key: tuple[str, str], statuses: Sequence[int]) -> None:
    """Completes what FastAPI states about an operation."""
    media_type = _MEDIA_TYPES.get(key[0], "application/json")
    schema = _either(_ANSWERS.get(key[0], ()))
    success = {"description": "Successful Response", "content": {media_type: {"schema": schema}}}
    operation["responses"] = {"200": success, **_errors(statuses)}
    if key in _ADMIN_BODIES:
        operation["requestBody"] = {"required": True, "content": _ADMIN_BODIES[key]}


def _operation(body: type[BaseModel], answers: Sequence[_Answer]) -> dict[str, Any]:
    success = {"description": "Successful Response", **_content(_either(answers))}
    if "stream" in body.model_fields:
        # OpenAPI cannot describe the events of a stream.
        success["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "requestBody": {"required": True, **_content(_schema(body))},
        "responses": {"200": success, **_errors(_OF_MODELS)},
    }


def _errors(statuses: Sequence[int]) -> dict[str, Any]:
    return {str(status): {"$ref": f"#/components/responses/Error{status}"} for status in sorted(statuses)}


def _error(status: int) -> dict[str, Any]:
    headers = {"headers": _HEADERS[status]} if status in _HEADERS else {}
    return {"description": _ERRORS[status], **headers, **_content(_schema(ErrorResponse))}


def _schema(model: _Answer) -> dict[str, Any]:
    if isinstance(model, list):
        return {"type": "array", "items": _schema(model[0])}
    return {"$ref": _SCHEMAS + model.__name__}


def _either(models: Sequence[_Answer]) -> dict[str, Any]:
    """The schema of one of several answers; empty if none is described."""
    schemas = [_schema(model) for model in models]
    return {"anyOf": schemas} if len(schemas) > 1 else schemas[0] if schemas else {}


def _content(schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}
