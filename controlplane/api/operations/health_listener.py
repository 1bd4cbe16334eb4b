"""Serves /health and /ready on a port and in a thread of their own, which load on the loop does not delay.

The event loop publishes the readiness once a second. The thread answers with what was published last, and
with 503 if that is too long ago: an event loop that does not run is neither alive nor ready.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus

import uvicorn
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from controlplane.api.errors import Failure, error_response, failure_of
from controlplane.api.http_protocol import BoundedHttpProtocol
from controlplane.api.operations.health import json_response, readiness
from controlplane.api.settings import SettingsSource
from controlplane.service.service import Service

_PERIOD_S = 1.0
# More than a check takes that times out.
_STALE_S = 10.0
_ALIVE = json_response({"status": "alive"})
_NO_SUCH_PATH = error_response(
    Failure(404, "no such path; this port serves /health and /ready", code="not_found")
)


class HealthListener:
    """The listener; `serving` runs it while the service runs."""

    def __init__(self, service: Service, settings: SettingsSource, *, host: str, port: int) -> None:
        self._service = service
        self._settings = settings
        self._published: tuple[float, Response] | None = None
        config = uvicorn.Config(
            self._respond,
            interface="asgi3",
            host=host,
            port=port,
            http=partial(BoundedHttpProtocol, settings=settings),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
        )
        self._server = uvicorn.Server(config)
        self._socket = config.bind_socket()
        self.port: int = self._socket.getsockname()[1]
        """Port on which it listens."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serves until the block ends."""
        await self._publish()
        thread = threading.Thread(target=self._server.run, args=([self._socket],), name="health", daemon=True)
        thread.start()
        publishing = asyncio.create_task(self._publish_forever())
        try:
            yield
        finally:
            publishing.cancel()
            self._server.should_exit = True
            await asyncio.to_thread(thread.join)

    async def _publish_forever(self) -> None:
        while True:
            await asyncio.sleep(_PERIOD_S)
            await self._publish()

    async def _publish(self) -> None:
        settings = self._settings()
        try:
            found = await readiness(self._service, settings.ready_timeout_s)
        except Exception as error:
            found = error_response(failure_of(error, overload_status=settings.overload_status))
        self._published = time.monotonic(), found

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._response(scope["path"])(scope, receive, send)

    def _response(self, path: str) -> Response:
        if path not in ("/health", "/ready"):
            return _NO_SUCH_PATH
        if self._published is None:
            raise RuntimeError("the listener serves before the first readiness was published")
        published_at, found = self._published
        silent_s = time.monotonic() - published_at
        if silent_s > _STALE_S:
            message = f"the event loop has not run for {silent_s:.0f} s"
            return error_response(Failure(HTTPStatus.SERVICE_UNAVAILABLE, message, code="event_loop_stalled"))
        return _ALIVE if path == "/health" else found
