"""One box as a replica of Ray Serve: the service with its engines, and its API on the replica's own port."""

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controlplane.api.app import create_app
from controlplane.api.protocol.requests import HEADER_REQUEST_ID
from controlplane.config import ConfigError, parse
from controlplane.config.reconfigure import wanted_config
from controlplane.core.errors import BackendDown, BackendFailed, Refused
from controlplane.service.bootstrap import assemble

_log = logging.getLogger("tandem.fleet")
_USER_CONFIG = "user_config"

USE = "use"
"""The box's utilisation among what it records for autoscaling."""
_ID_HEADER = HEADER_REQUEST_ID.encode()


class Box:
    """The class of the deployment; Ray Serve calls its methods.

    Ray Serve starts a replica on GPUs of its own, keeps new requests from one that is to stop, waits for the
    others, and replaces one that is not healthy.
    """

    async def __init__(self, content: object, router_key: str) -> None:  # type: ignore[misc]
        """Starts the engines. `content` is that of the configuration file.

        Raises ConfigError or BackendDown.
        """
        digest = sha256(router_key.encode()).hexdigest()
        stated = parse(content, source="config")
        self._config = replace(stated, server=replace(stated.server, router_key_sha256=digest))
        self._service = assemble(self._config)
        # With another key the routers would get no reports, and the box no requests.
        self._service.reconfiguration.fixed = {"router_key_sha256": digest}
        await self._service.start()
        self._given_up = asyncio.ensure_future(self._service.until_given_up())

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The API, which Ray Serve binds to the port of the replica."""
        return at_root(without_request_id(create_app(self._service)))

    async def reconfigure(self, part: object) -> None:
        """Called by Ray Serve with `user_config`, after the start and whenever it changes.

        It is a whole configuration, or a part of one that is laid over the file. What cannot be applied is
        logged and leaves the former in force: after an exception Ray Serve would replace box after box.
        """
        versions = self._service.reconfiguration
        try:
            wanted, _ = wanted_config(self._config, part, source=_USER_CONFIG, fixed=versions.fixed)
        except ConfigError as error:
            versions.failed(error, _USER_CONFIG)
            return
        # `versions` logs these.
        with suppress(ConfigError, Refused, BackendDown, BackendFailed):
            change = await versions.replace(wanted, source=_USER_CONFIG)
            if change.plan.needs_restart:
                _log.warning("%s; change the file and deploy it under another name", change)

    async def check_health(self) -> None:
        """Raises RuntimeError if only a new box can serve again.

        An engine that is being restarted is not such a case: routers see by its report that it is down.
        """
        if self._given_up.done():
            raise RuntimeError("an LLM engine is dead and is not restarted")
        gate = self._service.gate
        if gate.is_closed and not gate.tickets():
            raise RuntimeError("the box was drained and accepts no requests")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Ray Serve for its autoscaling policy (`scaling_policy`); empty without a load report."""
        use = self._service.load_reporter.utilisation()
        return {} if use is None else {USE: use}

    async def __del__(self) -> None:
        """Stops the engines, after the last request."""
        self._given_up.cancel()
        await self._service.stop()


def at_root(app: ASGIApp) -> ASGIApp:
    """The application with paths that begin after that of its Ray Serve application."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        if prefix := scope.get("root_path", ""):
            path = scope["path"].removeprefix(prefix)
            scope = {**scope, "root_path": "", "path": path, "raw_path": quote(path).encode()}
        await app(scope, receive, send)

    return wrapped


def without_request_id(app: ASGIApp) -> ASGIApp:
    """The application without the request id in its answers, because Ray Serve adds the same."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [each for each in message["headers"] if each[0] != _ID_HEADER]
            await send(message)

        await app(scope, receive, send_without)

    return wrapped
