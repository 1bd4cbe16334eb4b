"""Does the engine still step? Of one that lives but hangs vLLM takes no notice.

Rule: an engine that has requests reports each of its steps, also one in which it could start nobody. One that
reports none for too long is killed.
"""

import math
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess

from backends.supervision import SchedulingDelay, Watchdog
from controlplane.core.ports import StepCost


class StepWatchdog:
    """Over the engine's `processes`; a step is due while it is not idle. It may take `stall_seconds`, or
    `longest_seconds` if that is more; `on_killed` is called once, when they have been killed."""

    def __init__(
        self,
        processes: Sequence[BaseProcess],
        *,
        stall_seconds: float,
        longest_seconds: float,
        is_idle: Callable[[], bool],
        on_killed: Callable[[], None],
    ) -> None:
        self._processes = processes
        self._longest_seconds = longest_seconds
        self._is_idle = is_idle
        self._on_killed = on_killed
        self._delays = [SchedulingDelay(process.pid) for process in processes if process.pid is not None]
        self._watchdog = Watchdog(stall_seconds, self._kill, self._excluded_seconds)
        self.step_finished()

    def step_finished(self) -> None:
        self._watchdog.disarm(self)
        self._watchdog.arm(self, self._longest_seconds)

    def end(self) -> None:
        self._watchdog.end()

    def _excluded_seconds(self) -> float:
        if self._is_idle():
            return math.inf
        return max((spared() for spared in self._delays), default=0.0)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        self._on_killed()


def longest_step(cost: StepCost | None, *, prompt_tokens: int, sequences: int, cells: int) -> float:
    """Seconds of a step that does as much as one may; 0 where nobody knows."""
    if cost is None:
        return 0.0
    return cost.step + cost.prompt_token * prompt_tokens + cost.decode * sequences + cost.cell * cells
