"""The admin key of one start: for a server that only this machine reaches and whose configuration has none.

The server keeps it in a file that only its user reads, where commands of the same user find it. On a terminal
it also prints the dashboard's address with the key behind `#`, the part that a browser sends to no server.
"""

import logging
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from urllib.parse import urlsplit

from controlplane.config.server_and_tenants import ServerSection

_log = logging.getLogger("tandem")

_BYTES = 24
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class StartKey:
    """A random key; what the server compares with is its digest."""

    key: str = field(default_factory=lambda: secrets.token_urlsafe(_BYTES), repr=False)

    @property
    def sha256(self) -> str:
        """SHA-256 (hex) of the key."""
        return sha256(self.key.encode()).hexdigest()

    @contextmanager
    def kept(self, port: int) -> Iterator[Path | None]:
        """Keeps the key in the file of the port while the block runs; yields None if it cannot be written."""
        try:
            path = _file_of(port)
            path.parent.mkdir(parents=True, exist_ok=True)
            # A killed server may have left one. A new file has the stated mode from its first byte on.
            path.unlink(missing_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(self.key)
        except (OSError, RuntimeError) as error:
            # A full disk must not end the start.
            _log.warning("the admin key of this start is in no file: %s", error)
            yield None
            return
        try:
            yield path
        finally:
            with suppress(OSError):
                path.unlink()

    def show(self, url: str) -> None:
        """Prints the address that opens the dashboard, on a terminal only: elsewhere it would be in a log."""
        if sys.stdout.isatty():
            sys.stdout.write(f"open the dashboard: {url}/dashboard/#key={self.key}\n")
            sys.stdout.flush()


def kept_key(url: str) -> str:
    """The key of the server that this user has started at an address of this machine; empty without one."""
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS[parts.scheme]
        if not (parts.hostname and ServerSection(host=parts.hostname).is_local()):
            return ""
        return _file_of(port).read_text(encoding="ascii")
    except (OSError, RuntimeError, ValueError, KeyError):
        # No such file, no home folder, or no address of a server, which the call itself reports.
        return ""


def _file_of(port: int) -> Path:
    """In the folder of built models. Raises RuntimeError if the user has no home folder."""
    stated = os.environ.get("TANDEM_CACHE")
    if stated:
        return Path(stated) / f"admin-key-{port}"
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "tandem" / f"admin-key-{port}"
