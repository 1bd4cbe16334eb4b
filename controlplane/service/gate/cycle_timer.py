"""Runs the gate's next scheduling cycle: soon, or at a time."""

import asyncio
from collections.abc import Callable

from controlplane.core.clock import Duration, Instant, to_seconds


class CycleTimer:
    """Calls `decide`, which runs a cycle and calls `cancel` first."""

    def __init__(self, decide: Callable[[], None]) -> None:
        self._decide = decide
        self._soon: asyncio.Handle | None = None
        self._later: asyncio.TimerHandle | None = None

    def run_soon(self) -> None:
        """Runs a cycle in the next iteration of the event loop."""
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_soon(self._decide)

    def run_at(self, *times: Instant | None) -> None:
        """Runs a cycle at the earliest of these times that is not None; call it once in a cycle."""
        if known := [time for time in times if time is not None]:
            due = to_seconds(Duration(min(known)))
            self._later = asyncio.get_running_loop().call_at(due, self._decide)

    def cancel(self) -> None:
        """Cancels the scheduled cycles; call it at the begin of each cycle, which replaces them."""
        for handle in (self._soon, self._later):
            if handle is not None:
                handle.cancel()
        self._soon = self._later = None
