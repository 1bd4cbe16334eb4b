"""Lets scripts of web pages call the API and read its answers (CORS)."""

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from controlplane.api.protocol.requests import RESPONSE_HEADERS


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """`app`, whose answers scripts of these origins (`server.cors`) may read; unchanged without any."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=RESPONSE_HEADERS,
    )
