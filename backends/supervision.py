"""Watchdog for a child process that excludes suspended time; a child exits when its parent exits.

The `Watchdog` counts ticks of the supervisor's own event loop. A pause of the whole process group (a
breakpoint, a suspended machine) is one tick, however long it lasts, and responses that arrived during it are
read before the next tick. Time in which the child waited for a core or was traced by a debugger is excluded;
both are known on Linux only.
"""

import asyncio
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

from backends.device.probe import processes_of

# Ticks per `stall_seconds`: bounds both the credit for one pause and the lateness of expiry.
_TICKS = 16
_PROC = Path("/proc")


@dataclass(eq=False, slots=True)
class Watchdog:
    """Supervises a child process with deadlines that exclude time in which either side was suspended.

    `arm` starts a deadline, `disarm` ends it. The first deadline that expires calls `on_expired` once and
    clears the others. Deadlines are checked every `stall_seconds` / 16, so expiry is at most that much late.

    Args:
        stall_seconds: shortest deadline, in seconds.
        on_expired: called once, from the event loop.
        excluded_seconds: seconds since its previous call that do not count; infinity excludes the whole tick.
    """

    stall_seconds: float
    on_expired: Callable[[], None]
    excluded_seconds: Callable[[], float]
    counted_seconds: float = field(init=False, default=0.0)
    """Seconds counted while a deadline was pending."""
    _due: dict[Hashable, float] = field(init=False, default_factory=dict)
    _timer: asyncio.TimerHandle | None = field(init=False, default=None)

    def arm(self, key: Hashable, timeout_seconds: float = 0.0) -> None:
        """Starts the deadline `max(stall_seconds, timeout_seconds)` of `key`; no effect if one is pending."""
        self._due.setdefault(key, self.counted_seconds + max(self.stall_seconds, timeout_seconds))
        if self._timer is None:
            self.excluded_seconds()
            self._schedule_tick()

    def disarm(self, key: Hashable) -> None:
        """Ends the deadline of `key`, if one is pending."""
        self._due.pop(key, None)

    def stop(self) -> None:
        """Clears all deadlines and stops the timer."""
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
        # Checked before this tick is added: responses that arrived during a long tick are not read yet.
        if self.counted_seconds >= min(self._due.values()):
            self.stop()
            self.on_expired()
            return
        self.counted_seconds += max(0.0, interval - self.excluded_seconds())
        self._schedule_tick()


class SchedulingDelay:
    """Callable: seconds since its previous call in which process `pid` was not able to run."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seen_seconds = run_queue_seconds(pid)

    def __call__(self) -> float:
        """Returns the delay in seconds, or infinity while the process is traced."""
        previous, self._seen_seconds = self._seen_seconds, run_queue_seconds(self._pid)
        return float("inf") if is_traced(self._pid) else max(0.0, self._seen_seconds - previous)


def run_queue_seconds(pid: int) -> float:
    """Total time that the threads of `pid` were runnable without a core (Linux schedstat; 0 elsewhere).

    The sum over threads overestimates the delay of a process whose threads wait at the same time.
    """
    waited = 0
    for path in (_PROC / str(pid) / "task").glob("*/schedstat"):
        # The thread may exit between listing and reading.
        with suppress(OSError):
            waited += int(path.read_text("ascii").split()[1])
    return waited / 1e9


def is_traced(pid: int) -> bool:
    """Whether a debugger or another tracer is attached to `pid` (Linux; False elsewhere)."""
    try:
        status = (_PROC / str(pid) / "status").read_text("utf-8", "replace")
    except OSError:
        # The process has exited, or the system is not Linux.
        return False
    found = re.search(r"^TracerPid:\s+(\d+)$", status, re.MULTILINE)
    return found is not None and int(found[1]) > 0


def kill_tree(process: BaseProcess) -> None:
    """Kills `process` and all its descendants with SIGKILL.

    The workers of an engine follow its death by a thread of their own, which ends no main thread that hangs
    in a kernel of the device; such a worker would keep its memory there.
    """
    tree = set() if process.pid is None else processes_of(process.pid) - {process.pid}
    process.kill()
    for pid in tree:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def end_with_parent() -> None:
    """Makes this process exit with status 1 as soon as its parent exits, however the parent ended.

    Without this, a server that is killed (by hand or by the OOM killer) would leave its engine, and the
    engine's device memory, behind. Works for forked and spawned `multiprocessing` children, which hold a pipe
    that closes with the parent; the exit is immediate and runs no cleanup.

    Raises RuntimeError in a process that `multiprocessing` did not start.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError(
            f"process {os.getpid()} was not started by multiprocessing: it has no parent to follow"
        )

    def exit_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, name="exit-with-parent", daemon=True).start()
