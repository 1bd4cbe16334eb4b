"""What would happen, without waiting for it? An asyncio event loop whose clock jumps to the next timer.

Rule: while anything is ready it runs and time stands still; when nothing is, time jumps to the next
timer. With no timer either, whatever is still pending would wait for ever: `StuckLoop` names it. Threads
run in real time, so handing work to one is refused. The same program takes the same course every
time; timers of one instant run in a fixed order, but not in that of their setting.
"""

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple, Unpack

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")

_RESOLUTION_SECONDS = 1e-9


class StuckLoop(RuntimeError):
    """Nothing is ready and no timer is set, but something is pending."""


class _JumpingSelector(selectors.DefaultSelector):
    """Where a loop would sleep, `on_idle` is told for how long instead; None means for ever."""

    on_idle: Callable[[float | None], None]

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and (timeout is None or timeout > 0):
            self.on_idle(timeout)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Begins at `start` seconds."""

    def __init__(self, start: float = 0.0) -> None:
        selector = _JumpingSelector()
        selector.on_idle = self._jump
        super().__init__(selector)
        self._set_time(start)

    def time(self) -> float:
        return self._now

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Arguments]], Result], *args: *Arguments
    ) -> asyncio.Future[Result]:
        raise RuntimeError(
            f"{func!r} was handed to a thread on a virtual-time loop: threads take real time; "
            "await it on the loop or use a real one"
        )

    def _jump(self, timeout: float | None) -> None:
        if timeout is None:
            pending = sorted(_describe(task) for task in asyncio.all_tasks(self))
            raise StuckLoop(
                f"at {self._now:g} s nothing is ready and no timer is set, but {len(pending)} tasks wait: "
                + "; ".join(pending)
            )
        self._set_time(self._now + timeout)

    def _set_time(self, now: float) -> None:
        self._now = now
        # asyncio runs timers due before now plus this; below a float's own step that would be none.
        self._clock_resolution = max(_RESOLUTION_SECONDS, 2 * math.ulp(now))


def _describe(task: "asyncio.Task[Any]") -> str:
    stack = task.get_stack(limit=1)
    where = f"{stack[0].f_code.co_filename}:{stack[0].f_lineno}" if stack else "its end"
    return f"{task.get_name()} at {where}"


def run(main: Coroutine[Any, Any, Result], *, start: float = 0.0) -> Result:
    """What `main` returns, and raises. Raises StuckLoop instead of hanging."""
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(start)) as runner:
        return runner.run(main)
