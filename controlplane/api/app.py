"""The ASGI application: all routes, the middleware and the exception handlers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from controlplane import __version__
from controlplane.api.access_log import AccessLog
from controlplane.api.anthropic import anthropic_routes
from controlplane.api.auth import is_router_key
from controlplane.api.cohere import cohere_routes
from controlplane.api.cross_origin import with_cors
from controlplane.api.error_dialects import response_of
from controlplane.api.errors import Problem, failure_of
from controlplane.api.middleware import RequestMiddleware
from controlplane.api.openai.chat import chat_route
from controlplane.api.openai.completions import completion_route
from controlplane.api.openai.embeddings import embedding_route
from controlplane.api.openai.responses import responses_routes
from controlplane.api.openapi import describe_bodies, model_schemas
from controlplane.api.operations.admin import admin_routes
from controlplane.api.operations.configuration import config_routes
from controlplane.api.operations.dashboard import dashboard_routes
from controlplane.api.operations.explain import explain_routes
from controlplane.api.operations.health import status_routes
from controlplane.api.post_endpoint import EndpointFactory
from controlplane.api.reranking import rerank_routes
from controlplane.api.settings import ApiSettings, SettingsSource, live_settings, settings_for
from controlplane.api.startup import StartupMiddleware
from controlplane.api.tei import tei_routes
from controlplane.api.tokenize_routes import tokenize_routes
from controlplane.api.unknown_path import unknown_path
from controlplane.core.errors import BackendDown, BackendFailed, Refused
from controlplane.core.request import Kind
from controlplane.service.service import Service
from controlplane.service.ticket import Rejected


def create_app(service: Service, settings: SettingsSource | None = None) -> FastAPI:
    """Builds the application of a service, which its caller starts and stops.

    `settings` replaces those that follow from the service's configuration.
    """
    access_log = AccessLog()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        # The first GET of /openapi.json would keep the event loop from all other requests for as long.
        describing = asyncio.create_task(asyncio.to_thread(model_schemas))
        try:
            yield
        finally:
            await describing
            access_log.flush()

    app = FastAPI(
        title="Tandem",
        version=__version__,
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url="/docs",
        redoc_url=None,
    )

    _add_middleware(app, service, settings or live_settings(service), access_log)
    _add_exception_handlers(app)

    def count_shed(kind: Kind) -> None:
        # The status exists from the start of the service on.
        service.status.count_shed(kind)

    endpoints = EndpointFactory(count_shed)
    app.router.routes += [
        route(service, endpoints) for route in (chat_route, completion_route, embedding_route)
    ]
    app.router.routes += responses_routes(service, endpoints) + tei_routes(service, endpoints)
    app.router.routes += rerank_routes(service, endpoints) + tokenize_routes(service, endpoints)
    app.router.routes += anthropic_routes(service, endpoints) + cohere_routes(service, endpoints)
    for routes in (
        status_routes(service),
        admin_routes(service),
        config_routes(service),
        explain_routes(service),
        dashboard_routes(),
    ):
        app.router.routes += routes.routes
    describe_bodies(app)
    return app


def _add_middleware(app: FastAPI, service: Service, settings: SettingsSource, access_log: AccessLog) -> None:
    """Adds the middleware, from the innermost."""

    def load_header(router_key: bytes, current: ApiSettings) -> bytes | None:
        if not service.is_started or not is_router_key(router_key, current):
            return None
        report = service.load_reporter.header()
        return None if report is None else report.encode()

    app.add_middleware(StartupMiddleware, service=service)
    app.add_middleware(RequestMiddleware, settings=settings, load_header=load_header, access_log=access_log)
    app.add_middleware(with_cors, origins=service.config.server.cors)


def _add_exception_handlers(app: FastAPI) -> None:
    async def handle(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code == HTTPStatus.NOT_FOUND:
            served = [route.path for route in app.routes if isinstance(route, Route)]
            return response_of(unknown_path(request.scope["path"], served), request.scope)
        overload_status = settings_for(request).overload_status
        return response_of(failure_of(error, overload_status=overload_status), request.scope)

    # The middleware handles any other exception: it is a defect of the server.
    for kind in (Problem, Rejected, Refused, BackendDown, BackendFailed, HTTPException, ClientDisconnect):
        app.add_exception_handler(kind, handle)
