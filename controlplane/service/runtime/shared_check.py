"""Checks backends once for all that ask at the same time, so that probes without a key cost them little."""

import asyncio
from collections.abc import Awaitable, Callable

# A result is as old as that at most; orchestrators ask every few seconds.
_KEPT_SECONDS = 1.0
# A backend that takes longer does not respond; one step of an engine takes less.
PATIENCE_SECONDS = 2.0


class SharedCheck:
    """Runs `check`, a round trip to the backends, at most once at a time and once a second.

    A round trip that has begun is not cancelled with those that wait for it.
    """

    def __init__(self, check: Callable[[], Awaitable[None]]) -> None:
        self._check = check
        self._running: asyncio.Future[None] | None = None
        self._begun = 0.0

    async def wait(self) -> None:
        """Returns if the latest round trip, or a new one, succeeds within two seconds of its begin.

        Raises what `check` raises, and TimeoutError.
        """
        now = asyncio.get_running_loop().time()
        if self._running is None or (self._running.done() and not self._is_fresh(self._running, now)):
            self._begun = now
            self._running = asyncio.ensure_future(self._check())
            self._running.add_done_callback(_mark_retrieved)
        async with asyncio.timeout_at(self._begun + PATIENCE_SECONDS):
            await asyncio.shield(self._running)

    def _is_fresh(self, done: "asyncio.Future[None]", now: float) -> bool:
        return not done.cancelled() and done.exception() is None and now < self._begun + _KEPT_SECONDS


def _mark_retrieved(done: "asyncio.Future[None]") -> None:
    """Marks the exception as retrieved: those that waited may have left."""
    if not done.cancelled():
        done.exception()
