"""Keeps the tasks that take requests out of an engine, and logs those that fail."""

import asyncio
import logging
from collections.abc import Coroutine

from controlplane.core.errors import BackendDown

log = logging.getLogger(__name__)


class Departures:
    """The tasks under way; a request that waits for one of them awaits it itself."""

    def __init__(self) -> None:
        # The event loop alone does not keep a task alive.
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, preemption: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Starts a preemption; the task ends when the engine has freed the blocks."""
        task = asyncio.create_task(preemption)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        # A dead engine has freed all blocks.
        if task.cancelled() or isinstance(error := task.exception(), BackendDown | None):
            return
        log.error("a request whose lease is closed may go on in its engine: %r", error, exc_info=error)
