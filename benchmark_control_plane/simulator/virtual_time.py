"""An asyncio event loop in virtual time: its clock jumps to the next timer when no callback is ready.

While any callback is ready, the clock does not advance. If there is no timer either, the pending tasks would
wait forever, and `StuckLoop` names them. Threads run in real time, so `run_in_executor` raises RuntimeError.
Runs are deterministic; timers of the same instant run in a fixed order, which is not the order in which they
were set.
"""

import asyncio
import gc
import math
import selectors
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple, Unpack

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")

_RESOLUTION_SECONDS = 1e-9
_POLL_EVERY = 64
"""Jumps of the clock between two polls of a loop without open files."""
_COLLECT_AFTER = 50_000
"""New objects after which young ones are searched for reference cycles, of which a run makes few."""


class StuckLoop(RuntimeError):
    """Tasks are pending, but no callback is ready and no timer is set."""


class _JumpingSelector(selectors.DefaultSelector):
    """Selector that never sleeps: it calls `on_idle` with the timeout, None for no timeout."""

    on_idle: Callable[[float | None], None]
    _jumps = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout == 0:
            # Callbacks are ready. Files and signals are polled before the clock advances.
            return []
        self._jumps += 1
        # Polling makes a system call, and most loops have no file but their own pipe, for signals.
        must_poll = timeout is None or self._jumps % _POLL_EVERY == 0 or len(self.get_map()) > 1
        ready = super().select(0) if must_poll else []
        if not ready:
            self.on_idle(timeout)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Event loop in virtual time that starts at 0 seconds."""

    def __init__(self) -> None:
        selector = _JumpingSelector()
        selector.on_idle = self._jump
        super().__init__(selector)
        self._set_time(0.0)

    def time(self) -> float:
        """Virtual seconds."""
        return self._now

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Arguments]], Result], *args: *Arguments
    ) -> asyncio.Future[Result]:
        """Raises RuntimeError: threads run in real time."""
        raise RuntimeError(
            f"{func!r} cannot run in a thread on a virtual-time loop: threads take real time; "
            "await it on the loop or use a real loop"
        )

    def _jump(self, timeout: float | None) -> None:
        if timeout is None:
            pending = sorted(_describe(task) for task in asyncio.all_tasks(self))
            raise StuckLoop(
                f"at {self._now:g} s no callback is ready and no timer set, but {len(pending)} tasks wait: "
                + "; ".join(pending)
            )
        self._set_time(self._now + timeout)

    def _set_time(self, now: float) -> None:
        self._now = now
        # asyncio runs timers due before now + resolution; below the spacing of floats none would be due.
        self._clock_resolution = max(_RESOLUTION_SECONDS, 2 * math.ulp(now))


def _describe(task: "asyncio.Task[Any]") -> str:
    stack = task.get_stack(limit=1)
    where = f"{stack[0].f_code.co_filename}:{stack[0].f_lineno}" if stack else "its end"
    return f"{task.get_name()} at {where}"


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """Runs `main` in virtual time and returns its result; raises StuckLoop instead of hanging."""
    # A run allocates much, and each full garbage collection would visit all imported modules again.
    gc.freeze()
    thresholds = gc.get_threshold()
    gc.set_threshold(_COLLECT_AFTER, *thresholds[1:])
    try:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            results: list[Result] = []
            runner.run(_store(main, results))
            return results[0]
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


async def _store(main: Coroutine[Any, Any, Result], results: list[Result]) -> None:
    # The runner formats the task with its result when it restores the signal handler: all records of a run.
    results.append(await main)


class LoopTimers:
    """Periodic jobs on the clock of the running event loop."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    def schedule_periodic(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        """Calls `work` every so many seconds until `stop`."""

        async def repeat() -> None:
            while True:
                await asyncio.sleep(seconds)
                await work()

        self._tasks.append(asyncio.create_task(repeat()))

    def stop(self) -> None:
        """Ends all jobs."""
        for task in self._tasks:
            task.cancel()
