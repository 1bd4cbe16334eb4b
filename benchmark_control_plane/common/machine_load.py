"""Measures how many cores other processes used during a benchmark, and how fast the machine is.

The benchmark is this process and its descendants: servers and their children. The cores are read from /proc.
Other guests of a host that slow this machine down use none of its cores, but the same work takes longer.
"""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

_TICKS = os.sysconf("SC_CLK_TCK")
_AUTOGROUP_TRIES, _AUTOGROUP_PAUSE = 20, 0.1
_WORK_STEPS, _WORK_TIMES = 300_000, 5


@dataclass(frozen=True, slots=True)
class CpuSnapshot:
    """Monotonic time, CPU seconds used on the machine since boot, and those used by the benchmark."""

    clock: float
    busy: float
    ours: float


def cpu_snapshot() -> CpuSnapshot:
    """Reads the CPU counters now."""
    fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    # user, nice, system, idle, iowait, irq, softirq, steal
    busy = sum(int(fields[i]) for i in (0, 1, 2, 5, 6, 7)) / _TICKS
    return CpuSnapshot(time.monotonic(), busy, _seconds_of_descendants())


def others_cores(before: CpuSnapshot, after: CpuSnapshot) -> float:
    """Cores used by other processes between two snapshots, on average."""
    others = (after.busy - before.busy) - (after.ours - before.ours)
    return max(0.0, others) / (after.clock - before.clock)


def fixed_work_ms() -> float:
    """CPU milliseconds that a fixed piece of work takes now: the median of five."""
    return median(piece_of_work_ms() for _ in range(_WORK_TIMES))


def piece_of_work_ms(parts: int = 1) -> float:
    """CPU milliseconds of one of so many equal parts of the fixed piece of work."""
    before, total = time.thread_time(), 0
    for step in range(_WORK_STEPS // parts):
        total += step * step % 7
    return 1e3 * (time.thread_time() - before)


def raise_session(process_id: int, nice: int) -> None:
    """Sets the nice value of a session's autogroup (Linux); does nothing where that is not permitted."""
    with suppress(OSError):
        Path(f"/proc/{process_id}/autogroup").write_text(str(nice), encoding="ascii")


def set_session_nice(process_id: int, nice: int, processes: Path = Path("/proc")) -> None:
    """Sets the nice value of the autogroup of a process that leads its session.

    Linux divides a core among sessions before the niceness of their processes counts, so without it the
    niceness of a server in a session of its own has no effect. Does nothing without autogroups. Raises
    RuntimeError if the value is not in force afterwards.
    """
    file = processes / str(process_id) / "autogroup"
    if not file.exists() or not file.read_text(encoding="ascii"):
        return
    for _ in range(_AUTOGROUP_TRIES):
        try:
            file.write_text(str(nice), encoding="ascii")
            break
        except BlockingIOError:
            # Without CAP_SYS_ADMIN the kernel takes one change in 100 ms, and tells nobody when.
            time.sleep(_AUTOGROUP_PAUSE)
        except OSError as error:
            raise RuntimeError(f"{file}: {error.strerror}; a niceness of {nice} has no effect") from error
    if (found := file.read_text(encoding="ascii").split()[-1]) != str(nice):
        raise RuntimeError(f"{file}: the nice value is {found}; a niceness of {nice} has no effect")


@contextmanager
def raised_session(lead: int, file: Path = Path("/proc/self/autogroup")) -> Iterator[None]:
    """Lowers the nice value of this process's autogroup until the block ends, where permitted.

    It is then at most `-lead`: Linux divides a core among sessions before the niceness of their processes
    counts, and each server that a benchmark starts has a session of its own, which begins at 0 whatever the
    value of this one.
    """
    words: list[str] = []
    with suppress(OSError):
        # For example "/autogroup-9 nice 0"; absent or empty without autogroups.
        if words := file.read_text(encoding="ascii").split():
            file.write_text(str(min(int(words[-1]), 0) - lead), encoding="ascii")
    try:
        yield
    finally:
        if words:
            with suppress(OSError):
                file.write_text(words[-1], encoding="ascii")


def _seconds_of_descendants() -> float:
    """CPU seconds of this process and its descendants."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            stat = (folder / "stat").read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        # The command name may contain spaces and brackets; the fields after it are numbers (proc(5)).
        fields = stat.rpartition(")")[2].split()
        parents[int(folder.name)] = int(fields[1])
        # User and system time, of the process and of its waited-for children.
        seconds[int(folder.name)] = sum(map(int, fields[11:15])) / _TICKS
    return sum(took for pid, took in seconds.items() if _is_ours(pid, parents))


def _is_ours(pid: int, parents: Mapping[int, int]) -> bool:
    while pid in parents and pid != os.getpid():
        pid = parents[pid]
    return pid == os.getpid()
