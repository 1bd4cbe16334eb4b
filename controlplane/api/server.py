"""How does the service meet the network? uvicorn, with an orderly way out.

On SIGTERM, SIGINT or a hang-up nothing new is admitted and what waits is rejected at once, so that clients
move on; what runs may finish within the drain time, or until a second signal. A service that cannot start
ends the process.
"""

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
import uvloop

from controlplane.api.app import create_app
from controlplane.api.settings import ApiKey, ApiSettings
from controlplane.config import Config, ConfigError
from controlplane.core.errors import BackendDown
from controlplane.service.jobs import Caller
from controlplane.service.service import Service

_log = logging.getLogger("tandem")

# Unheard, these and a hang-up would end this process alone, and leave the engine's behind with the device's
# memory.
_ORDERS = (signal.SIGINT, signal.SIGTERM)

# Longer than clients and load balancers do, which give up an unused connection after 5 to 60 seconds: the end
# that closes first must be theirs, or a request meets a connection that has just been closed.
_KEPT_OPEN_S = 75
# More than what is live of the requests under way: then hardly any collection begins among them.
_NEW_OBJECTS = 10_000


def settings_of(config: Config) -> ApiSettings:
    keys = tuple(
        ApiKey(digest, Caller(name, None if tenant.classes is None else frozenset(tenant.classes)))
        for name, tenant in config.tenants.items()
        for digest in tenant.api_keys_sha256
    )
    return ApiSettings(
        api_keys=keys,
        admin_key_sha256=config.server.admin_key_sha256,
        max_body_bytes=config.server.max_body,
        overload_status=config.server.overload_status,
        stalled_client_s=config.server.stalled_client_ms / 1_000,
    )


class _Server(uvicorn.Server):
    """uvicorn with the way out above."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._draining: set[asyncio.Future[None]] = set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own raises the signal again after serving: that would end us before the engines."""
        with _on_signal(self._leave):
            yield

    def _leave(self) -> None:
        is_second = self.should_exit
        self.should_exit, self.force_exit = True, is_second
        grace = 0.0 if is_second else self._service.config.server.drain_ms / 1_000
        here = len(self._service.gate.tickets())
        _log.info("told to end: of %d requests here, those that run may go on for %g s", here, grace)
        self._draining.add(asyncio.ensure_future(self._service.drain(grace)))


@contextmanager
def _on_signal(act: Callable[[], object]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    heard = [*_ORDERS]
    # Whoever starts a process with nohup wants it to outlive the terminal. A shell that starts one in the
    # background has it ignore SIGINT as well, but who sends that to a server means it.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        heard.append(signal.SIGHUP)
    for number in heard:
        loop.add_signal_handler(number, act)
    try:
        yield
    finally:
        for number in heard:
            loop.remove_signal_handler(number)


def check_address(host: str, port: int) -> None:
    """Before engines are loaded, which takes minutes. Raises ConfigError."""
    if not host:
        raise ConfigError(
            "server.host='': asyncio takes that for every address; say 0.0.0.0 if that is meant"
        )
    try:
        for family, _, _, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            _bind_once(family, address)
    except (OSError, ValueError) as error:
        # Of a text that can be no name, socket says so as a ValueError.
        cause = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"server.host={host}, server.port={port}: {cause}; stop what listens there, or choose "
            "another address (--host, --port; port 0 is any free one)"
        ) from None


def _bind_once(family: int, address: Any) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As the server will: connections of one that has just ended do not keep it out.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        probe.bind(address)


def host_forever(service: Service, config: Config) -> int:
    """Until a signal. 1 if the service could not start or be reached, 2 if not as configured."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_host(service, config))


async def _host(service: Service, config: Config) -> int:
    starting = asyncio.ensure_future(service.start())
    try:
        with _on_signal(starting.cancel):
            await starting
    except asyncio.CancelledError:
        _log.info("told to end before it had started")
        return 0
    except (BackendDown, ConfigError, ValueError) as error:
        _log.error("%s", error)
        return 1 if isinstance(error, BackendDown) else 2
    try:
        server = _Server(_options(service, config), service)
        _collect_seldom()
        await server.serve()
    except SystemExit:
        # uvicorn's way to say, after it has told the log, that it cannot listen: somebody else does by now.
        return 1
    finally:
        await service.stop()
    return 0


def _collect_seldom() -> None:
    """What lives as long as the service need not be looked through again: the engine's modules alone are so
    many objects that one full collection holds the loop for a tenth of a second. Nor is it worth looking for
    cycles at every 700 objects that requests under way have made: what they make is freed with them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS)


def _options(service: Service, config: Config) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(service, settings_of(config), owns_service=False),
        host=config.server.host,
        port=config.server.port,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=_KEPT_OPEN_S,
        timeout_graceful_shutdown=round(config.server.drain_ms / 1_000) + 1,
    )
