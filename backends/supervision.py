"""Has another process had long enough to answer? Which of what it owes is overdue.

Rule: time counts in beats of our own loop. A pause of the whole process group, a breakpoint or a suspended
machine is one beat, however long it was, and what came meanwhile is taken in before the next. What the other
process waited for a core does not count, nor what passes while somebody traces it; only Linux tells these
two.
"""

import asyncio
import multiprocessing
import os
import re
import threading
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

# Of the shortest wait: what a pause costs the other, and how late we are at most.
_TICKS = 16
_PROC = Path("/proc")


@dataclass(eq=False, slots=True)
class Watchdog:
    """`on_expired` is called once, when something owed is overdue by `stall_seconds`, or by more where more was
    granted. `excluded_seconds` says how many seconds do not count since it was last asked."""

    stall_seconds: float
    on_expired: Callable[[], None]
    excluded_seconds: Callable[[], float]
    counted_seconds: float = field(init=False, default=0.0)
    """Seconds during which something was owed."""
    _due: dict[Hashable, float] = field(init=False, default_factory=dict)
    _timer: asyncio.TimerHandle | None = field(init=False, default=None)

    def arm(self, key: Hashable, timeout_seconds: float = 0.0) -> None:
        """Asking again for what is still owed gives no more time."""
        self._due.setdefault(key, self.counted_seconds + max(self.stall_seconds, timeout_seconds))
        if self._timer is None:
            self.excluded_seconds()
            self._schedule_tick()

    def disarm(self, key: Hashable) -> None:
        self._due.pop(key, None)

    def end(self) -> None:
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule_tick(self) -> None:
        interval = self.stall_seconds / _TICKS
        self._timer = asyncio.get_running_loop().call_later(interval, self._tick, interval)

    def _tick(self, interval: float) -> None:
        self._timer = None
        if not self._due:
            return
        # Before this beat is added: what arrived during a long one has not been read yet.
        if self.counted_seconds >= min(self._due.values()):
            self.end()
            self.on_expired()
            return
        self.counted_seconds += max(0.0, interval - self.excluded_seconds())
        self._schedule_tick()


class SchedulingDelay:
    """Asked again and again: for how many seconds could the process `pid` do nothing since the last time?"""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seen_seconds = run_queue_seconds(pid)

    def __call__(self) -> float:
        previous, self._seen_seconds = self._seen_seconds, run_queue_seconds(self._pid)
        return float("inf") if is_traced(self._pid) else max(0.0, self._seen_seconds - previous)


def run_queue_seconds(pid: int) -> float:
    """Ready to run, but without a core: of all threads together, so rather too much than too little."""
    waited = 0
    for path in (_PROC / str(pid) / "task").glob("*/schedstat"):
        # A thread may end between the two.
        with suppress(OSError):
            waited += int(path.read_text("ascii").split()[1])
    return waited / 1e9


def is_traced(pid: int) -> bool:
    """By a debugger, for example."""
    try:
        status = (_PROC / str(pid) / "status").read_text("utf-8", "replace")
    except OSError:
        # It has ended, or this is no Linux.
        return False
    found = re.search(r"^TracerPid:\s+(\d+)$", status, re.MULTILINE)
    return found is not None and int(found[1]) > 0


# FOLDED leash.py:
# Does a process end with the one that started it, however that ended? A server that is killed, by hand or
# for want of memory, would leave its engine behind, and with it the device's memory.
#
# For processes that `multiprocessing` starts, forked or spawned: each has a pipe that ends with its parent.


def end_with_parent() -> None:
    """From now on; at once, whatever it does then. Raises RuntimeError in a process that has none."""
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError(f"process {os.getpid()} was not started by multiprocessing: it has no parent")

    def exit_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, name="exit-with-parent", daemon=True).start()
