"""Runs uvicorn; on SIGTERM, SIGINT and SIGHUP waits for running requests within the drain time.

While draining, new and waiting requests are rejected, so that clients try another server; running requests
may finish within `server.drain_ms`, or until a second signal. If the service cannot start, the process exits.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import uvicorn
import uvloop

from controlplane.api.app import create_app
from controlplane.api.errors import LogRateLimiter, overload_failure
from controlplane.api.http_protocol import BoundedHttpProtocol, raw_response
from controlplane.api.load_shedding import LoadShedder
from controlplane.api.operations.health_listener import HealthListener
from controlplane.api.settings import ApiKey, ApiSettings, BodyLimits, ConnectionLimits
from controlplane.config import Config, ConfigError
from controlplane.core.clock import milliseconds
from controlplane.core.errors import BackendDown
from controlplane.service.request_jobs import Caller
from controlplane.service.service import Service

_log = logging.getLogger("tandem")
# uvicorn logs a line for each malformed request.
logging.getLogger("uvicorn.error").addFilter(LogRateLimiter())

# Without handlers these signals would end only this process, and the engine would keep the device's memory.
_SIGNALS = (signal.SIGINT, signal.SIGTERM)

# libuv accepts one connection per listening handle and iteration of the loop. With one handle and iterations
# of 20 ms, 250 new connections per second waited for up to 13 s. A handle takes 3 us of each new connection.
_LISTENING_HANDLES = 16
# More than the live objects of the requests in flight, so that they hardly ever trigger a collection.
_GC_THRESHOLD = 10_000


def settings_of(config: Config, *, context_tokens: int) -> ApiSettings:
    """The HTTP layer's part of a configuration; `context_tokens`: of the chat model, 0 without one."""
    limits = config.server.limits
    keys = tuple(
        ApiKey(digest, Caller(name, None if tenant.classes is None else frozenset(tenant.classes)))
        for name, tenant in config.tenants.items()
        for digest in tenant.api_keys_sha256
    )
    return ApiSettings(
        api_keys=keys,
        admin_key_sha256=config.server.admin_key_sha256,
        metrics_key_sha256=config.server.metrics_key_sha256,
        router_key_sha256=config.server.router_key_sha256,
        limits=BodyLimits(
            max_body=limits.body_bytes(context_tokens),
            inline_body=limits.inline_body,
            max_depth=limits.max_depth,
            max_members=limits.max_members,
            max_values=limits.body_values(context_tokens),
            max_name=limits.max_name,
        ),
        overload_status=config.server.overload_status,
    )


def _connection_limits(config: Config) -> ConnectionLimits:
    limits = config.server.limits
    return ConnectionLimits(
        max_header_bytes=limits.max_header_bytes,
        max_headers=limits.max_headers,
        header_timeout=limits.header_timeout_ms / 1_000,
        body_timeout=limits.body_timeout_ms / 1_000,
        stalled_client=config.server.stalled_client_ms / 1_000,
    )


class _Server(uvicorn.Server):
    """A uvicorn server whose signal handler drains the service."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._draining: set[asyncio.Future[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens with several handles on each socket, so that an iteration accepts several connections."""
        await super().startup(sockets)
        options, loop = self.config, asyncio.get_running_loop()
        http: Callable[..., asyncio.Protocol] = options.http_protocol_class
        protocol = partial(
            http, config=options, server_state=self.server_state, app_state=self.lifespan.state
        )
        for listening in [listening for server in self.servers for listening in server.sockets]:
            for _ in range(_LISTENING_HANDLES - 1):
                copy = socket.socket(fileno=os.dup(listening.fileno()))
                self.servers.append(await loop.create_server(protocol, sock=copy, backlog=options.backlog))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replaces uvicorn's handler, which raises the signal again and exits before the engines stop."""
        with _on_signal(self.drain):
            yield

    def drain(self) -> None:
        """Drains and exits; a second call ends the running requests at once."""
        is_second = self.should_exit
        self.should_exit, self.force_exit = True, is_second
        grace = 0.0 if is_second else self._service.config.server.drain_ms / 1_000
        open_requests = len(self._service.gate.tickets())
        _log.info("draining: %d open requests; running ones may finish within %g s", open_requests, grace)
        self._draining.add(asyncio.ensure_future(self._service.drain(grace)))


@contextmanager
def _on_signal(act: Callable[[], object]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    numbers = [*_SIGNALS]
    # nohup sets SIGHUP to be ignored; keep that. A shell also ignores SIGINT for background processes, but an
    # explicit SIGINT to the server is meant to stop it.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, act)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def check_address(host: str, port: int, *, key: str = "server.port") -> None:
    """Tests that the address can be bound, before engines load for minutes. Raises ConfigError."""
    if not host:
        raise ConfigError(
            "server.host='': asyncio would listen on every address; write 0.0.0.0 if that is wanted"
        )
    try:
        for family, _, _, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            _bind_once(family, address)
    except (OSError, ValueError) as error:
        # A malformed host name raises ValueError.
        cause = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"server.host={host}, {key}={port}: {cause}; stop the program that listens there, or "
            "choose another address (--host, --port; port 0 takes any free port)"
        ) from None


def _bind_once(family: int, address: Any) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Like uvicorn: connections of a server that just exited do not block the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        probe.bind(address)


def host_forever(service: Service, config: Config) -> int:
    """Serves until a signal.

    Returns the exit status: 0 after a drain, 1 if the service could not start or listen, or its LLM engine
    is dead and is not restarted, 2 if the configuration does not work here.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_host(service, config))


async def _host(service: Service, config: Config) -> int:
    starting = asyncio.ensure_future(service.start())
    try:
        with _on_signal(starting.cancel):
            await starting
    except asyncio.CancelledError:
        _log.info("stopped by a signal before the service had started")
        return 0
    except (BackendDown, ConfigError, ValueError) as error:
        _log.error("%s", error)
        return 1 if isinstance(error, BackendDown) else 2
    try:
        server = _Server(_options(service, config), service)
        _reduce_garbage_collection()
        failing = asyncio.ensure_future(service.until_given_up())
        failing.add_done_callback(lambda ended: None if ended.cancelled() else server.drain())
        async with _health_listener(service, config):
            await server.serve()
        has_failed = failing.done()
        failing.cancel()
    except SystemExit:
        # uvicorn logs and exits like this if another process took the port in the meantime.
        return 1
    finally:
        await service.stop()
    return int(has_failed)


def _reduce_garbage_collection() -> None:
    """Freezes long-lived objects and raises the threshold of the garbage collector.

    The engine's modules alone are so many objects that a full collection blocks the loop for 0.1 s. Objects
    of requests are freed by reference counting, so a search for cycles every 700 objects gains nothing.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)


def _health_listener(service: Service, config: Config) -> AbstractAsyncContextManager[None]:
    """The listener on `server.health_port`, if there is one. Raises SystemExit if the port is taken."""
    port = config.server.health_port
    if port is None:
        return nullcontext()
    settings = settings_of(config, context_tokens=service.status.context_tokens())
    limits, host = _connection_limits(config), config.server.host
    return HealthListener(service, settings, limits, host=host, port=port).serving()


def _options(service: Service, config: Config) -> uvicorn.Config:
    settings = settings_of(config, context_tokens=service.status.context_tokens())
    limits = config.server.limits
    shedder = LoadShedder(milliseconds(limits.max_queue_delay_ms), service.status.metrics.count_shed)
    return uvicorn.Config(
        create_app(service, settings, owns_service=False),
        host=config.server.host,
        port=config.server.port,
        http=partial(  # type: ignore[arg-type]
            BoundedHttpProtocol,
            limits=_connection_limits(config),
            shedder=shedder,
            overload_response=raw_response(overload_failure(settings.overload_status)),
        ),
        # A connection that became a websocket would be beyond these limits.
        ws="none",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=limits.idle_timeout_ms / 1_000,  # type: ignore[arg-type]
        timeout_graceful_shutdown=round(config.server.drain_ms / 1_000) + 1,
    )
