"""Reloads the configuration file: on SIGHUP and SIGUSR1, and with `--watch` when its content changes.

Content is compared by its hash, so that the replacement of a symbolic link counts and a touched file does
not. A change is taken when two reads find the same content, since a file may be read while it is written.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager

from controlplane.api.early_signals import RELOADING
from controlplane.config import ConfigError
from controlplane.config.config_file import ConfigFile
from controlplane.core.errors import BackendDown, BackendFailed, Refused
from controlplane.service.service import Service

_log = logging.getLogger("tandem")

WATCH_SECONDS = 2.0


class ConfigReload:
    """Applies the file to the running service; a failure is logged and changes nothing.

    `file` None: the configuration came from no file, and signals are only logged.
    """

    def __init__(self, service: Service, file: ConfigFile | None) -> None:
        self._service = service
        self._file = file
        self._asked = asyncio.Event()
        self._digest = None if file is None else _digest_of(file)

    @contextmanager
    def on_signals(self, early: Collection[int] = ()) -> Iterator[None]:
        """Handles the signals, which would otherwise end the process; one before `running` is kept for it.

        `early` holds those received before this call (`early_signals`), which may still grow until then.
        """
        loop = asyncio.get_running_loop()
        for number in RELOADING:
            loop.add_signal_handler(number, self._asked.set)
        if early:
            self._asked.set()
        try:
            yield
        finally:
            for number in RELOADING:
                loop.remove_signal_handler(number)

    @asynccontextmanager
    async def running(self, watch_seconds: float | None = None) -> AsyncIterator[None]:
        """Reloads on signals, and on changes if `watch_seconds` is the interval of the reads."""
        tasks = [asyncio.create_task(self._serve_signals())]
        if watch_seconds is not None and self._file is not None:
            tasks.append(asyncio.create_task(self._watch(self._file, watch_seconds)))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve_signals(self) -> None:
        while True:
            await self._asked.wait()
            self._asked.clear()
            if self._file is None:
                _log.warning("no configuration file was given at the start; the signal changes nothing")
            else:
                digest = await asyncio.to_thread(_digest_of, self._file)
                if await self._reload(self._file, "signal"):
                    self._digest = digest

    async def _watch(self, file: ConfigFile, seconds: float) -> None:
        seen = self._digest
        while True:
            await asyncio.sleep(seconds)
            before, seen = seen, await asyncio.to_thread(_digest_of, file)
            if seen in (None, self._digest) or seen != before:
                continue
            # Also after an error: the same content would fail again, unless an engine is down for the moment.
            if await self._reload(file, "watch"):
                self._digest = seen

    async def _reload(self, file: ConfigFile, cause: str) -> bool:
        """Applies the file. False if it should be tried again although it has not changed."""
        source = f"{file.path} ({cause})"
        try:
            return await self._apply(file, source)
        except Exception as error:
            # A defect, for example of a plug-in: later reloads are made all the same.
            _log.exception("%s: the reload failed", source)
            self._service.reconfiguration.failed(error, source)
            return True

    async def _apply(self, file: ConfigFile, source: str) -> bool:
        versions = self._service.reconfiguration
        try:
            config = await asyncio.to_thread(file.load)
        except ConfigError as error:
            versions.failed(error, source)
            return True
        try:
            change = await versions.replace(config, source=source)
        except BackendDown:
            return False
        except (ConfigError, Refused, BackendFailed):
            # `versions` has logged it.
            return True
        if not change.plan.applied and not change.plan.needs_restart:
            _log.info("%s: no key changed", source)
        return True


def _digest_of(file: ConfigFile) -> str | None:
    """The digest of the file; None while it cannot be read, as between two steps of its replacement."""
    try:
        return file.digest()
    except ConfigError:
        return None
