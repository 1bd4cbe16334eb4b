"""The ASGI application: all routes, the exception handlers and the lifespan of the service."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from controlplane import __version__
from controlplane.api.errors import Problem, error_response, failure_of
from controlplane.api.middleware import RequestMiddleware
from controlplane.api.openai.chat import chat_route
from controlplane.api.openai.completions import completion_route
from controlplane.api.openai.embeddings import embedding_route
from controlplane.api.operations.admin import admin_routes
from controlplane.api.operations.explain import explain_routes
from controlplane.api.operations.health import status_routes
from controlplane.api.post_endpoint import EndpointFactory
from controlplane.api.protocol.requests import ChatCompletionRequest, CompletionRequest, EmbeddingRequest
from controlplane.api.settings import ApiSettings
from controlplane.core.errors import BackendDown, BackendFailed, Refused
from controlplane.service.service import Service
from controlplane.service.ticket import Rejected

_BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
}


def create_app(service: Service, settings: ApiSettings, *, owns_service: bool = True) -> FastAPI:
    """Builds the application. With `owns_service` its lifespan starts and stops the service."""

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
        docs_url=None,
        redoc_url=None,
    )
    app.add_middleware(RequestMiddleware, max_body_bytes=settings.limits.max_body)
    _add_exception_handlers(app, overload_status=settings.overload_status)
    endpoints = EndpointFactory(settings)
    app.router.routes += [
        route(service, endpoints) for route in (chat_route, completion_route, embedding_route)
    ]
    for routes in (
        status_routes(service, settings),
        admin_routes(service, settings),
        explain_routes(service, settings),
    ):
        app.include_router(routes)
    _describe_bodies(app)
    return app


def _add_exception_handlers(app: FastAPI, *, overload_status: int) -> None:
    async def handle(_: Request, error: Exception) -> Response:
        return error_response(failure_of(error, overload_status=overload_status))

    # The middleware handles any other exception: it is a defect of the server.
    for kind in (Problem, Rejected, Refused, BackendDown, BackendFailed, HTTPException):
        app.add_exception_handler(kind, handle)


def _describe_bodies(app: FastAPI) -> None:
    """Adds the request models to /openapi.json.

    The routes parse their bodies themselves, which is faster than FastAPI's parsing but hides the models.
    """
    without_bodies = app.openapi

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = without_bodies()
            _, definitions = models_json_schema(
                [(model, "validation") for model in _BODIES.values()],
                ref_template="#/components/schemas/{model}",
            )
            schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
            for path, model in _BODIES.items():
                reference = {"$ref": f"#/components/schemas/{model.__name__}"}
                content = {"application/json": {"schema": reference}}
                schema["paths"][path] = {
                    "post": {
                        "requestBody": {"required": True, "content": content},
                        "responses": {"200": {"description": "Successful Response"}},
                    }
                }
        return app.openapi_schema or {}

    app.openapi = described  # type: ignore[method-assign]
