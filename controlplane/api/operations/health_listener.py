"""Serves /health and /ready on `server.health_port` from a process of its own, which no load delays.

The event loop publishes four times a second that it runs, and once a second the readiness; the process
(`health_responder`) answers with what was published last. If that is too long ago the answer is a 503: an
event loop that does not run is not ready, and after a longer time not alive.
"""

import asyncio
import json
import logging
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from pathlib import Path

from starlette.responses import Response

from controlplane.api.early_probes import UNKNOWN_PATH
from controlplane.api.errors import Failure, failure_of
from controlplane.api.http_protocol import raw_response
from controlplane.api.operations import health_responder
from controlplane.api.operations.health import json_response, readiness
from controlplane.api.settings import SettingsSource
from controlplane.service.service import Service

log = logging.getLogger(__name__)

_BEAT_S = 0.25
_CHECK_S = 1.0
# An orchestrator that sees a 503 of /ready sends requests elsewhere, and one of /health ends the process.
_READY_STALE_S, _ALIVE_STALE_S = 3.0, 10.0
# Between the end of the process and the start of its successor.
_RESTART_S = 1.0


def _text(response: Response) -> str:
    """The bytes of a response that ends the connection, as text."""
    status, headers = response.status_code, response.headers.items()
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        *(f"{name}: {value}" for name, value in headers),
    ]
    return "\r\n".join([*lines, "connection: close", "", bytes(response.body).decode()])


def _stalled(seconds: float) -> str:
    message = f"the event loop has not run for {seconds:g} s"
    return raw_response(Failure(503, message, code="event_loop_stalled")).decode()


_ALIVE = _text(json_response({"status": "alive"}))
_UNKNOWN = raw_response(Failure(404, UNKNOWN_PATH, code="not_found")).decode()


class HealthListener:
    """The listener on `sockets`, which it closes; `serving` runs its process while the service runs."""

    def __init__(self, service: Service, settings: SettingsSource, sockets: Sequence[socket.socket]) -> None:
        self._service = service
        self._settings = settings
        self._sockets = sockets
        self._ready: str
        # Each start replaces it.
        self._feed = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process: asyncio.subprocess.Process

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serves until the block ends."""
        self._ready = await self._checked()
        self._process = await self._started()
        tasks = [asyncio.create_task(repeated()) for repeated in (self._beat, self._check, self._restart)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            # It keeps no state, and may have been stopped by a signal.
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            self._feed.close()
            for listening in self._sockets:
                listening.close()

    async def _started(self) -> asyncio.subprocess.Process:
        """Starts the process, which finds the first publication in its feed."""
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._feed.close()
        self._feed = ours
        self._publish()
        with theirs:
            descriptors = [one.fileno() for one in (*self._sockets, theirs)]
            return await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", str(Path(health_responder.__file__)), *map(str, descriptors),
                stdin=asyncio.subprocess.DEVNULL, pass_fds=descriptors,
            )  # fmt: skip

    async def _restart(self) -> None:
        while True:
            status = await self._process.wait()
            log.error(
                "the process that serves server.health_port ended with status %d; restarting it", status
            )
            await asyncio.sleep(_RESTART_S)
            try:
                self._process = await self._started()
            except OSError as error:
                log.error("the process that serves server.health_port does not start: %s", error)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_BEAT_S)
            self._publish()

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_S)
            self._ready = await self._checked()

    async def _checked(self) -> str:
        try:
            return _text(await readiness(self._service))
        except Exception as error:
            failure = failure_of(error, overload_status=self._settings().overload_status)
            return raw_response(failure).decode()

    def _publish(self) -> None:
        message: health_responder.Publication = {
            "at_ns": time.monotonic_ns(),
            "paths": {
                "/health": {
                    "response": _ALIVE, "stale_response": _stalled(_ALIVE_STALE_S), "stale_s": _ALIVE_STALE_S
                },
                "/ready": {
                    "response": self._ready,
                    "stale_response": _stalled(_READY_STALE_S),
                    "stale_s": _READY_STALE_S,
                },
            },
            "unknown": _UNKNOWN,
        }  # fmt: skip
        # The process has ended and is started again, or has not read for long; what it then answers is stale.
        with suppress(BlockingIOError, ConnectionError):
            self._feed.send(json.dumps(message).encode())
