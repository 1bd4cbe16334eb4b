"""Kills an engine that has requests but no longer completes steps.

vLLM notices a dead engine process, but not one that hangs. An engine that has requests reports every step,
including steps that schedule nothing, and answers calls between steps; if neither a report nor an answer
arrives in time, its processes and their children, one of which may be what hangs, are killed.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

from backends.supervision import SchedulingDelay, Watchdog, kill_tree
from controlplane.core.engine_reports import StepCost


class StepWatchdog:
    """Watchdog over one engine's processes; time in which it is idle or cannot run does not count.

    Args:
        processes: processes to kill with all their descendants.
        stall_seconds: longest time between two steps.
        longest_seconds: predicted longest step; extends `stall_seconds` if it is more.
        is_idle: whether the engine has no request; it may have a call.
        on_killed: called once, after the processes were killed.
    """

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
        self._calls = 0
        self._delays = [SchedulingDelay(process.pid) for process in processes if process.pid is not None]
        self._watchdog = Watchdog(stall_seconds, self._kill, self._excluded_seconds)
        self.step_finished()

    def step_finished(self) -> None:
        """Restarts the time within which the next step must be reported."""
        self._watchdog.disarm(self)
        self._watchdog.arm(self, self._longest_seconds)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Counts as work what the engine is to answer within the context, and its answer as a step."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
        self.step_finished()

    def stop(self) -> None:
        """Stops watching."""
        self._watchdog.stop()

    def _excluded_seconds(self) -> float:
        if self._is_idle() and not self._calls:
            return math.inf
        return max((delay() for delay in self._delays), default=0.0)

    def _kill(self) -> None:
        for process in self._processes:
            kill_tree(process)
        self._on_killed()


def longest_step(cost: StepCost | None, *, prompt_tokens: int, sequences: int, cells: int) -> float:
    """Predicted seconds of a step with a full token budget, batch and KV cache; 0 if `cost` is unknown."""
    if cost is None:
        return 0.0
    return cost.step + cost.prompt_token * prompt_tokens + cost.decode * sequences + cost.cell * cells
