"""Answers requests that arrive before the service has started, while models load.

Liveness, version, links, counters and the dashboard's files need no engine and are served as always.
Readiness names the stages with their seconds. Every other request gets a 503 with Retry-After.
"""

import orjson
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from controlplane.api.access_log import EXPECTED_FAILURE
from controlplane.api.error_dialects import response_of
from controlplane.api.errors import starting_failure
from controlplane.service.runtime.start_progress import StartProgress
from controlplane.service.service import Service

# A scraper takes a target without an answer for dead, and a model may load for minutes.
_SERVED = ("/", "/health", "/version", "/metrics", "/dashboard")
_SERVED_BELOW = "/dashboard/"


class StartupMiddleware:
    """Passes requests on once the service has started."""

    def __init__(self, app: ASGIApp, *, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one ASGI connection."""
        if self._service.is_started or scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, progress = scope["path"], self._service.progress
        scope["state"][EXPECTED_FAILURE] = True
        # A POST to / asks for vectors.
        if scope["method"] != "POST" and (path in _SERVED or path.startswith(_SERVED_BELOW)):
            await self._app(scope, receive, send)
        elif path == "/ready":
            await starting_response(progress)(scope, receive, send)
        else:
            await response_of(starting_failure(str(progress)), scope)(scope, receive, send)


def starting_response(progress: StartProgress) -> Response:
    """The response of /ready before the start has ended: the stages, and an error object."""
    failure = starting_failure(str(progress))
    body = {"status": "starting", **progress.to_json(), **orjson.loads(failure.body)}
    return Response(orjson.dumps(body), failure.status, failure.headers, media_type="application/json")
