"""Runs uvicorn and starts the service; on SIGTERM and SIGINT drains the running requests within a time.

The server listens before a model loads, and answers what it can until the service has started. While
draining, new and waiting requests are rejected, so that clients try another server; running requests may
finish within `server.drain_ms`, or until a second signal. If the service cannot start, the process exits.
"""

import asyncio
import gc
import logging
import os
import resource
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from controlplane.api import listening_sockets
from controlplane.api.access_log import ShedLines
from controlplane.api.app import create_app
from controlplane.api.config_reload import ConfigReload
from controlplane.api.early_signals import ENDING
from controlplane.api.http_pipelining import PipeliningProtocol
from controlplane.api.load_shedding import LoadShedder
from controlplane.api.openapi import model_schemas
from controlplane.api.operations.health_listener import HealthListener
from controlplane.api.settings import ApiSettings, SettingsSource, live_settings
from controlplane.api.shed_answer import shed_answer
from controlplane.api.unread_responses import UnreadResponses
from controlplane.config import Config, ConfigError
from controlplane.config.active_mechanisms import mechanisms
from controlplane.config.config_file import ConfigFile
from controlplane.core.errors import BackendDown
from controlplane.core.request import Kind
from controlplane.log_output import update_logging
from controlplane.service.runtime.start_progress import StartProgress
from controlplane.service.service import Service
from controlplane.start_key import StartKey

_log = logging.getLogger("tandem")

# libuv accepts one connection per listening handle and iteration of the loop. With one handle and iterations
# of 20 ms, 250 new connections per second waited for up to 13 s. A handle takes 3 us of each new connection.
_LISTENING_HANDLES = 16
# Open files, most of them connections. Many systems allow 1,024 unless a program asks for more.
_MOST_DESCRIPTORS = 65_536
# After a second signal a request that was read but has not reached the gate is still answered in this time.
_LAST_ANSWERS_SECONDS = 1.0
# How long a thread keeps the interpreter lock from the event loop, which waits for it several times to answer
# one request. Python's 5 ms are for programs that compute in threads; ours parse large bodies.
_SWITCH_SECONDS = 0.0002
# More than the live objects of the requests in flight, so that they hardly ever trigger a collection.
_GC_THRESHOLD = 10_000


class _Server(uvicorn.Server):
    """A uvicorn server that starts the service once it listens, and whose signal handler drains it.

    `run_service` starts the service and returns the exit status once the server is to end; None for a service
    that runs already. `connections` were accepted before, and are served, too.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        run_service: "Callable[[_Server], Coroutine[Any, Any, int]] | None" = None,
        connections: Sequence[socket.socket] = (),
    ) -> None:
        super().__init__(config)
        self._connections = connections
        self._service = service
        self._run_service = run_service
        self._running: asyncio.Task[int] | None = None
        self._draining: set[asyncio.Future[None]] = set()
        self._address: tuple[str, int] = ("", 0)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens with several handles on each socket, so that an iteration accepts several connections."""
        await super().startup(sockets)
        protocol, loop, backlog = self._protocol(), asyncio.get_running_loop(), self.config.backlog
        for listening in self._listening():
            for _ in range(_LISTENING_HANDLES - 1):
                copy = socket.socket(fileno=os.dup(listening.fileno()))
                self.servers.append(await loop.create_server(protocol, sock=copy, backlog=backlog))
        for connection in self._connections:
            await loop.connect_accepted_socket(protocol, connection)
        # Kept, because the sockets are closed if the server is stopped just as the start ends.
        self._address = self.servers[0].sockets[0].getsockname()[:2]
        if self._run_service is not None:
            self._running = asyncio.create_task(self._run_service(self))
            self._running.add_done_callback(lambda _: self._end())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops listening and waits for the responses; clients that have connected by then get one too.

        The kernel resets connections that wait to be accepted on a socket that is closed. A busy loop leaves
        some there, with the requests that they carry.
        """
        copies = [socket.socket(fileno=os.dup(listening.fileno())) for listening in self._listening()]
        for server in self.servers:
            server.close()
        waiting = [connection for copy in copies for connection in _accepted(copy)]
        loop = asyncio.get_running_loop()
        for connection in waiting:
            await loop.connect_accepted_socket(self._protocol(), connection)
        await super().shutdown(sockets)

    def _listening(self) -> list[Any]:
        return [listening for server in self.servers for listening in server.sockets]

    def _protocol(self) -> Callable[[], asyncio.Protocol]:
        http: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        return partial(
            http, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    def _end(self) -> None:
        self.should_exit = True

    async def status(self) -> int:
        """The exit status, after `serve` has returned. Raises what a defect raised during the start."""
        if self._running is None:
            return 0
        self._end_running()
        try:
            return await self._running
        except asyncio.CancelledError:
            return 0

    def _end_running(self) -> None:
        # Cancelled twice, the start would leave the processes behind that it is ending.
        if self._running is not None and not self._running.cancelling():
            self._running.cancel()

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._address
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    @property
    def port(self) -> int:
        """The TCP port on which it listens."""
        return self._address[1]

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replaces uvicorn's handler, which raises the signal again and exits before the engines stop.

        After the block a signal changes nothing until the event loop ends: it would end only this process,
        and leave the engines with the device's memory.
        """
        # A shell ignores SIGINT for background processes, but an explicit SIGINT is meant to stop the server.
        _handle(self.drain)
        try:
            yield
        finally:
            _handle(_tell_end)

    def _close_connections(self) -> None:
        self.force_exit = True

    def drain(self) -> None:
        """Drains and exits, or ends the start; a second call ends the running requests at once."""
        if not self._service.is_started:
            self._end_running()
            self.should_exit = True
            return
        is_second, self.should_exit = self.should_exit, True
        if is_second:
            asyncio.get_running_loop().call_later(_LAST_ANSWERS_SECONDS, self._close_connections)
        grace = 0.0 if is_second else self._service.config.server.drain_ms / 1_000
        self.config.timeout_graceful_shutdown = round(grace) + 1
        open_requests = len(self._service.gate.tickets())
        _log.info("draining: %d open requests; running ones may finish within %g s", open_requests, grace)
        self._draining.add(asyncio.ensure_future(self._service.drain(grace)))


def _handle(act: Callable[[], object]) -> None:
    """Calls `act` on each signal that ends the server from now on."""
    loop = asyncio.get_running_loop()
    for number in ENDING:
        loop.add_signal_handler(number, act)


def _tell_end() -> None:
    _log.info("the server is ending, and the signal changes nothing")


def _accepted(listening: socket.socket) -> Iterator[socket.socket]:
    """Accepts the connections that wait on a socket, and closes it."""
    with listening:
        listening.setblocking(False)
        while True:
            try:
                connection, _ = listening.accept()
            except ConnectionAbortedError:
                # Its client has left; others may wait behind it.
                continue
            except OSError:
                # None waits, or the process has no descriptors left.
                return
            yield connection


@dataclass(frozen=True, slots=True)
class Hosting:
    """How to host a service.

    Attributes:
        file: reloaded on signals.
        watch_seconds: reads `file` in this interval and reloads it if it has changed.
        display: shows the progress of the start while its block runs.
        start_key: the admin key while the configuration has none.
        sockets: they listen already; by default the server binds its address itself.
        connections: were accepted on them before, and are served, too.
        signals: came before the event loop ran, and reload `file` once the service has started.
        probe_sockets: listen already on `server.health_port`; by default the server binds it itself.
    """

    file: ConfigFile | None = None
    watch_seconds: float | None = None
    display: Callable[[StartProgress], AbstractContextManager[object]] = nullcontext
    start_key: StartKey | None = None
    sockets: Sequence[socket.socket] = ()
    connections: Sequence[socket.socket] = ()
    signals: Sequence[int] = ()
    probe_sockets: Sequence[socket.socket] = ()

    def settings(self, service: Service) -> SettingsSource:
        """The settings of the HTTP layer, with the digest of the start's key."""
        return live_settings(service, None if self.start_key is None else self.start_key.sha256)


PLAIN = Hosting()


def host_forever(service: Service, config: Config, hosting: Hosting = PLAIN) -> int:
    """Listens, starts the service and serves until a signal.

    Returns the exit status: 0 after a drain, 1 if the service could not start or listen, or its LLM engine
    is dead and is not restarted, 2 if the configuration does not work here.
    """
    _raise_descriptor_limit()
    sys.setswitchinterval(_SWITCH_SECONDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_host(service, config, hosting))


def _raise_descriptor_limit() -> None:
    """Raises this process's limit of open files to what it may have without further rights."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


async def _host(service: Service, config: Config, hosting: Hosting = PLAIN) -> int:
    service.reconfiguration.listeners.append(lambda version: update_logging(version.config.log))
    if hosting.file is not None:
        service.reconfiguration.overrides = hosting.file.overrides
    reload = ConfigReload(service, hosting.file)
    with reload.on_signals(hosting.signals):
        server = _Server(
            _options(service, config, hosting),
            service,
            partial(_run_service, service, config, reload, hosting),
            hosting.connections,
        )
        try:
            async with _health_listener(service, config, hosting):
                await server.serve(list(hosting.sockets) or None)
                return await server.status()
        except SystemExit:
            # Raised, after a log line, if another process took a port in the meantime.
            return 1
        finally:
            await service.stop()
            _log.info("stopped")


async def _run_service(
    service: Service, config: Config, reload: ConfigReload, hosting: Hosting, server: _Server
) -> int:
    """Starts the service and returns the exit status once it has failed; cancelled by a drain."""
    # As the application's lifespan, which does not run here, does it.
    describing = asyncio.create_task(asyncio.to_thread(model_schemas))
    try:
        with hosting.display(service.progress):
            await service.start()
            await describing
    except asyncio.CancelledError:
        _log.info("the start was ended by a signal")
        raise
    except (BackendDown, ConfigError, ValueError) as error:
        _log.error("%s", error)
        return 1 if isinstance(error, BackendDown) else 2
    _reduce_garbage_collection()
    start_key = hosting.start_key
    with nullcontext() if start_key is None else start_key.kept(server.port) as key_file:
        _log.info("%s", _ready_line(service, config, server.url, key_file))
        if start_key is not None:
            start_key.show(server.url)
        async with reload.running(hosting.watch_seconds):
            await service.until_given_up()
    server.drain()
    return 1


def _ready_line(service: Service, config: Config, url: str, key_file: Path | None) -> str:
    """Says in one line where the service is and what it has; the dashboard only if its data can be read."""
    active = [each.name for each in mechanisms(config) if each.is_active]
    lists = {
        "models": [model.served_name for model in config.models.all()],
        "classes": list(config.service_classes()),
        "active": active,
    }
    parts = [f"{name} {', '.join(values)}" for name, values in lists.items() if values]
    # Its data comes from /admin/live, which is disabled without the key.
    if config.server.admin_key_sha256 is not None or key_file is not None:
        where = "" if key_file is None else f", its admin key in {key_file}"
        parts.append(f"dashboard {url}/dashboard/{where}")
    return f"ready after {service.progress.seconds:.1f} s at {url}: {'; '.join(parts)}"


def _reduce_garbage_collection() -> None:
    """Freezes long-lived objects and raises the threshold of the garbage collector.

    The engine's modules alone are so many objects that a full collection blocks the loop for 0.1 s. Objects
    of requests are freed by reference counting, so a search for cycles every 700 objects gains nothing.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)


def _health_listener(service: Service, config: Config, hosting: Hosting) -> AbstractAsyncContextManager[None]:
    """The listener on `server.health_port`, if there is one. Raises SystemExit if the port is taken."""
    host, port = config.server.host, config.server.health_port
    if port is None:
        return nullcontext()
    try:
        sockets = hosting.probe_sockets or listening_sockets.listening(host, port, key="server.health_port")
    except ConfigError as error:
        _log.error("%s", error)
        raise SystemExit(1) from None
    return HealthListener(service, hosting.settings(service), sockets).serving()


def _count_shed(service: Service, settings: Callable[[], ApiSettings], lines: ShedLines, kind: Kind) -> None:
    # Before the start there are no metrics, and every request of this kind gets a 503 in any case.
    if service.is_started:
        service.status.count_shed(kind)
    if settings().has_access_log:
        lines.add(kind)


def _options(service: Service, config: Config, hosting: Hosting = PLAIN) -> uvicorn.Config:
    settings = hosting.settings(service)
    return uvicorn.Config(
        create_app(service, settings),
        host=config.server.host,
        port=config.server.port,
        http=partial(  # type: ignore[arg-type]
            PipeliningProtocol,
            settings=settings,
            shedder=LoadShedder(partial(_count_shed, service, settings, ShedLines())),
            shed_answer=shed_answer(settings, config.server.cors),
            unread=UnreadResponses(),
        ),
        # A connection that became a websocket would be beyond these limits.
        ws="none",
        # Its lines go to the root logger, in the form that `log` states.
        log_config=None,
        # It would announce each step of the start in words of its own.
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=config.server.limits.idle_timeout_ms / 1_000,  # type: ignore[arg-type]
        timeout_graceful_shutdown=round(config.server.drain_ms / 1_000) + 1,
    )
