"""Binds the server's port before anything that takes time is imported."""

import socket
from typing import Any

from controlplane.config.fields import ConfigError

# Connections that the kernel keeps until they are accepted.
_BACKLOG = 2_048


def listening(host: str, port: int, *, key: str = "server.port") -> list[socket.socket]:
    """A socket that listens, for each address of the host. Raises ConfigError.

    Connections wait until the server answers, instead of being refused.
    """
    if not host:
        raise ConfigError(
            "server.host='': asyncio would listen on every address; write 0.0.0.0 if that is wanted"
        )
    found: list[socket.socket] = []
    try:
        known = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # A name may have an address twice.
        for family, address in dict.fromkeys((family, address) for family, *_, address in known):
            found.append(_listening(family, address))
    except (OSError, ValueError) as error:
        for one in found:
            one.close()
        # A malformed host name raises ValueError.
        cause = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"server.host={host}, {key}={port}: {cause}; stop the program that listens there, or "
            "choose another address (--host, --port; port 0 takes any free port)"
        ) from None
    return found


def _listening(family: int, address: Any) -> socket.socket:
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Like uvicorn: connections of a server that just exited do not block the port.
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        found.bind(address)
        found.listen(_BACKLOG)
    except BaseException:
        found.close()
        raise
    return found
