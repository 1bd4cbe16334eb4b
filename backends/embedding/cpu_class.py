"""Moves a worker process into Linux's idle scheduling class and back.

A thread in the idle class (SCHED_IDLE) runs only on cores that no other process wants. Any process may enter
it; leaving it takes CAP_SYS_NICE or a RLIMIT_NICE of 20 (`ulimit -e 20`). The server moves its worker, since
a worker that gets no CPU time could not leave by itself.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

# Linux autogroups divide a core among sessions first, then among the threads of each. A session of idle
# threads would have the share of any other session, so its weight is lowered, too. In the normal class the
# worker's session has the weight of the server's.
_IDLE_AUTOGROUP = "19"
_OWN_AUTOGROUP_FILE = Path("/proc/self/autogroup")
_NO_PRIORITY = 0


def may_leave_idle_class() -> bool:
    """Whether this process may move threads out of the idle class; tried on a thread of its own."""
    if not hasattr(os, "SCHED_IDLE"):
        return False
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_try_to_leave).result()


def _try_to_leave() -> bool:
    parameters = os.sched_param(_NO_PRIORITY)
    os.sched_setscheduler(0, os.SCHED_IDLE, parameters)
    try:
        os.sched_setscheduler(0, os.SCHED_OTHER, parameters)
    except PermissionError:
        return False
    return True


def enter_idle_class(pid: int) -> None:
    """Moves all threads of a process into the idle class; without one, sets the lowest priority."""
    if hasattr(os, "SCHED_IDLE"):
        _move(pid, os.SCHED_IDLE, _IDLE_AUTOGROUP)
    else:
        os.setpriority(os.PRIO_PROCESS, pid, 19)


def leave_idle_class(pid: int) -> bool:
    """Moves all threads of a process into the normal class. Raises PermissionError.

    Returns False if its session keeps the low weight for now; then it has to be called again.
    """
    return _move(pid, os.SCHED_OTHER, _own_autogroup())


def _own_autogroup() -> str:
    """Nice level of this process's session; 0 without autogroups."""
    with suppress(OSError):
        # For example "/autogroup-9 nice -20"; empty in the session of the first process of the machine.
        words = _OWN_AUTOGROUP_FILE.read_text().split()
        return words[-1] if words else "0"
    return "0"


def _move(pid: int, policy: int, autogroup: str) -> bool:
    """Moves a process; returns False if the weight of its session could not be changed yet."""
    folder, is_settled = Path("/proc") / str(pid), True
    try:
        (folder / "autogroup").write_text(autogroup)
    except BlockingIOError:
        # Without CAP_SYS_ADMIN the kernel takes one change in 100 ms.
        is_settled = False
    except OSError:
        # Absent or read-only in some containers; the session then has the weight of any other.
        pass
    # The policy is set per thread and inherited.
    for thread in (folder / "task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setscheduler(int(thread.name), policy, os.sched_param(_NO_PRIORITY))
    return is_settled


class CpuClass:
    """Scheduling class of one worker, changed only when it differs from the wanted one.

    `is_idle` is whether the worker is in the idle class, or only partly out of it; None before the first
    `set`.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.is_idle: bool | None = None

    def set(self, *, is_idle: bool) -> None:
        """Moves the worker into the idle class or out of it; does nothing once the worker has ended."""
        if is_idle is self.is_idle:
            return
        with suppress(FileNotFoundError, ProcessLookupError):
            if is_idle:
                enter_idle_class(self._pid)
                self.is_idle = True
            else:
                self.is_idle = not leave_idle_class(self._pid)
