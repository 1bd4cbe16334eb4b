"""Reads from /proc what memory a server and its children use, in MB of 10^6 bytes."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from backends.device.probe import processes_of


def memory_mb(process_id: int, key: str = "VmRSS") -> float:
    """A size of /proc/PID/status: VmRSS, or VmHWM, the largest one since the last reset."""
    status = Path(f"/proc/{process_id}/status").read_text(encoding="utf-8")
    # A process that has ended and is not waited for has no sizes.
    line = next((line for line in status.splitlines() if line.startswith(f"{key}:")), "none 0")
    return int(line.split()[1]) * 1_024 / 1e6


def proportional_mb(process_id: int) -> float:
    """Resident memory of a process, of which a page that n processes have counts as 1/n of a page.

    Pages of mapped files do not count: libraries are shared with other programs, so that the end of one of
    those would look like growth.
    """
    rollup = Path(f"/proc/{process_id}/smaps_rollup").read_text(encoding="utf-8")
    sizes = {key: int(size) for key, size, *_ in map(str.split, rollup.splitlines()[1:])}
    return (sizes["Pss_Anon:"] + sizes["Pss_Shmem:"]) * 1_024 / 1e6


class TreeMemory:
    """Memory of a process and its descendants above that at the start.

    Pages that a fork shares with its parent count once. The peak is the largest sum at any call of `sample`,
    or the sum now with each process at its own peak since the last reset, if that is more: the first one
    misses what is short, the second one a process that has ended.
    """

    def __init__(self, process_id: int) -> None:
        self._process_id = process_id
        self._rest_mb = self._most_mb = self._sum_mb()

    def reset_peak(self) -> None:
        """Makes the peak count from now on, above the same memory at rest."""
        for process in processes_of(self._process_id):
            with suppress(OSError):
                Path(f"/proc/{process}/clear_refs").write_text("5", encoding="ascii")
        self._most_mb = self._sum_mb()

    def sample(self) -> None:
        """Reads the sum now."""
        self._most_mb = max(self._most_mb, self._sum_mb())

    def growth_mb(self) -> float:
        """MB that the processes take now above those at the start."""
        return round(self._sum_mb() - self._rest_mb, 1)

    def peak_growth_mb(self) -> float:
        """MB that the processes took at the peak above those at the start."""
        below_peak = self._over_processes(lambda process: memory_mb(process, "VmHWM") - memory_mb(process))
        return round(max(self._most_mb, self._sum_mb() + below_peak) - self._rest_mb, 1)

    def _sum_mb(self) -> float:
        return self._over_processes(proportional_mb)

    def _over_processes(self, size: Callable[[int], float]) -> float:
        """Sum of `size` of each process that has not ended."""
        found = 0.0
        for process in processes_of(self._process_id):
            # The memory of a process that ends meanwhile cannot be read.
            with suppress(OSError):
                found += size(process)
        return found
