"""The ASGI application: all routes, the exception handlers and the lifespan of the service."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from controlplane import __version__
from controlplane.api.anthropic import anthropic_routes
from controlplane.api.auth import is_router_key
from controlplane.api.error_dialects import response_of
from controlplane.api.errors import Problem, failure_of
from controlplane.api.middleware import RequestMiddleware
from controlplane.api.openai.chat import chat_route
from controlplane.api.openai.completions import completion_route
from controlplane.api.openai.embeddings import embedding_route
from controlplane.api.openai.responses import responses_route
from controlplane.api.operations.admin import admin_routes
from controlplane.api.operations.configuration import config_routes
from controlplane.api.operations.dashboard import dashboard_routes
from controlplane.api.operations.explain import explain_routes
from controlplane.api.operations.health import status_routes
from controlplane.api.post_endpoint import EndpointFactory
from controlplane.api.protocol.answers import (
    AnthropicMessage,
    ChatCompletion,
    EmbeddingList,
    ErrorResponse,
    ResponseObject,
    TextCompletion,
    TokenCount,
)
from controlplane.api.protocol.anthropic_messages import CountTokensRequest, MessagesRequest
from controlplane.api.protocol.requests import (
    RESPONSE_HEADERS,
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
from controlplane.api.protocol.responses_messages import ResponsesRequest
from controlplane.api.protocol.tokenize_messages import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from controlplane.api.reranking import rerank_routes
from controlplane.api.settings import ApiSettings, SettingsSource, live_settings, settings_for
from controlplane.api.tokenize_routes import tokenize_routes
from controlplane.core.errors import BackendDown, BackendFailed, Refused
from controlplane.service.service import Service
from controlplane.service.ticket import Rejected

# An item of a list stands for an answer that is a bare list.
_Answer = type[BaseModel] | list[type[BaseModel]]
_BODIES: dict[str, tuple[type[BaseModel], list[_Answer]]] = {
    "/v1/chat/completions": (ChatCompletionRequest, [ChatCompletion]),
    "/v1/completions": (CompletionRequest, [TextCompletion]),
    "/v1/embeddings": (EmbeddingRequest, [EmbeddingList]),
    "/v1/responses": (ResponsesRequest, [ResponseObject]),
    "/v1/rerank": (RerankRequest, [RerankResponse]),
    "/v2/rerank": (RerankRequest, [RerankResponse]),
    "/rerank": (EitherRerankRequest, [RerankResponse, [RankedText]]),
    "/v1/score": (ScoreRequest, [ScoreResponse]),
    "/score": (ScoreRequest, [ScoreResponse]),
    "/v1/messages": (MessagesRequest, [AnthropicMessage]),
    "/v1/messages/count_tokens": (CountTokensRequest, [TokenCount]),
    "/tokenize": (TokenizeRequest, [TokenizeResponse]),
    "/detokenize": (DetokenizeRequest, [DetokenizeResponse]),
}


def create_app(
    service: Service, settings: SettingsSource | None = None, *, owns_service: bool = True
) -> FastAPI:
    """Builds the application. With `owns_service` its lifespan starts and stops the service.

    `settings` replaces those that follow from the service's configuration.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if owns_service:
            await service.start()
        try:
            yield
        finally:
            if owns_service:
                await service.stop()

    app = FastAPI(
        title="Tandem",
        version=__version__,
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url="/docs",
        redoc_url=None,
    )

    def load_header(router_key: bytes, settings: ApiSettings) -> bytes | None:
        return service.load_reporter.text().encode() if is_router_key(router_key, settings) else None

    app.add_middleware(
        RequestMiddleware, settings=settings or live_settings(service), load_header=load_header
    )
    if origins := service.config.server.cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=RESPONSE_HEADERS,
        )
    _add_exception_handlers(app)
    endpoints = EndpointFactory()
    app.router.routes += [
        route(service, endpoints)
        for route in (chat_route, completion_route, responses_route, embedding_route)
    ]
    app.router.routes += rerank_routes(service, endpoints) + tokenize_routes(service, endpoints)
    app.router.routes += anthropic_routes(service, endpoints)
    for routes in (
        status_routes(service),
        admin_routes(service),
        config_routes(service),
        explain_routes(service),
        dashboard_routes(),
    ):
        app.include_router(routes)
    _describe_bodies(app)
    return app


def _add_exception_handlers(app: FastAPI) -> None:
    async def handle(request: Request, error: Exception) -> Response:
        overload_status = settings_for(request).overload_status
        return response_of(failure_of(error, overload_status=overload_status), request.scope["path"])

    # The middleware handles any other exception: it is a defect of the server.
    for kind in (Problem, Rejected, Refused, BackendDown, BackendFailed, HTTPException):
        app.add_exception_handler(kind, handle)


def _describe_bodies(app: FastAPI) -> None:
    """Adds the models of requests and responses to /openapi.json.

    The routes parse and build bodies themselves, which is faster than FastAPI's way but hides the models.
    """
    without_bodies = app.openapi

    def with_bodies() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = without_bodies()
            described: list[_Answer] = [ErrorResponse]
            for body, answers in _BODIES.values():
                described += [body, *answers]
            models = dict.fromkeys(each[0] if isinstance(each, list) else each for each in described)
            _, definitions = models_json_schema(
                [(model, "validation") for model in models],
                ref_template="#/components/schemas/{model}",
            )
            schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
            schema["paths"] |= {path: {"post": _operation(*bodies)} for path, bodies in _BODIES.items()}
        return app.openapi_schema or {}

    app.openapi = with_bodies  # type: ignore[method-assign]


def _operation(body: type[BaseModel], answers: Sequence[_Answer]) -> dict[str, Any]:
    success = {"description": "Successful Response", **_content(*map(_schema, answers))}
    if "stream" in body.model_fields:
        # OpenAPI cannot describe the events of a stream.
        success["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    failure = {"description": "Error", **_content(_schema(ErrorResponse))}
    return {
        "requestBody": {"required": True, **_content(_schema(body))},
        "responses": {"200": success, "default": failure},
    }


def _schema(model: _Answer) -> dict[str, Any]:
    if isinstance(model, list):
        return {"type": "array", "items": _schema(model[0])}
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def _content(*schemas: dict[str, Any]) -> dict[str, Any]:
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}
    return {"content": {"application/json": {"schema": schema}}}
