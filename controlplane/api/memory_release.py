"""Returns memory to the system that large bodies have left in the allocator's free lists.

glibc keeps freed memory of less than 128 KiB a piece, so that the many small values of a body, and the tables
of its tokenization, would stay with the process.
"""

import asyncio
import ctypes
import logging
from collections.abc import Callable

log = logging.getLogger(__name__)

# A request with a large body may be followed by others.
_DELAY_SECONDS = 1.0


def _malloc_trim() -> Callable[[int], int] | None:
    """The function of glibc; other C libraries have none."""
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return found


class MemoryRelease:
    """Trims the allocator in a thread, a moment after `schedule`; calls meanwhile are one."""

    def __init__(self, trim: Callable[[int], int] | None = None) -> None:
        self._trim = trim or _malloc_trim()
        self._pending: asyncio.TimerHandle | None = None
        self._running: asyncio.Future[int] | None = None

    def schedule(self) -> None:
        """Trims once, soon; call it from the event loop."""
        if self._trim is not None and self._pending is None:
            self._pending = asyncio.get_running_loop().call_later(_DELAY_SECONDS, self._run, self._trim)

    def _run(self, trim: Callable[[int], int]) -> None:
        self._pending = None
        # ctypes releases the interpreter lock meanwhile.
        self._running = asyncio.get_running_loop().run_in_executor(None, trim, 0)
