"""Was the machine ours while we measured? Cores that anything but the benchmark kept busy, from /proc.

Ours is this process and all that it started: servers and their children.
"""

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class CpuSnapshot:
    """Seconds of CPU since the machine started, and the clock."""

    clock: float
    busy: float
    ours: float


def cpu_snapshot() -> CpuSnapshot:
    fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    # user, nice, system, idle, iowait, irq, softirq, steal
    busy = sum(int(fields[i]) for i in (0, 1, 2, 5, 6, 7)) / _TICKS
    return CpuSnapshot(time.monotonic(), busy, _seconds_of_descendants())


def others_cores(before: CpuSnapshot, after: CpuSnapshot) -> float:
    """What else ran, in whole cores on average."""
    others = (after.busy - before.busy) - (after.ours - before.ours)
    return max(0.0, others) / (after.clock - before.clock)


def raise_session(process_id: int, nice: int) -> None:
    """Puts a session before others where the system weighs sessions (Linux's autogroups) and lets us."""
    with suppress(OSError):
        Path(f"/proc/{process_id}/autogroup").write_text(str(nice), encoding="ascii")


def _seconds_of_descendants() -> float:
    """This process and all that it started, directly or not."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            stat = (folder / "stat").read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        # The name may hold spaces and brackets; the fields after it are numbers (proc(5)).
        fields = stat.rpartition(")")[2].split()
        parents[int(folder.name)] = int(fields[1])
        # User and system, its own and of the children that ended.
        seconds[int(folder.name)] = sum(map(int, fields[11:15])) / _TICKS
    return sum(took for pid, took in seconds.items() if _is_ours(pid, parents))


def _is_ours(pid: int, parents: Mapping[int, int]) -> bool:
    while pid in parents and pid != os.getpid():
        pid = parents[pid]
    return pid == os.getpid()
