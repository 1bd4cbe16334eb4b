"""Reads from /proc what memory a server and its children use, in MB of 10^6 bytes."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def memory_mb(process_id: int, key: str = "VmRSS") -> float:
    """A size of /proc/PID/status: VmRSS, or VmHWM, the largest one since the last reset."""
    status = Path(f"/proc/{process_id}/status").read_text(encoding="utf-8")
    # A process that has ended and is not waited for has no sizes.
    line = next((line for line in status.splitlines() if line.startswith(f"{key}:")), "none 0")
    return int(line.split()[1]) * 1_024 / 1e6


def processes_of(process_id: int) -> Iterator[int]:
    """A process, its children and theirs. One that ends meanwhile may be left out."""
    yield process_id
    with suppress(OSError):
        for thread in Path(f"/proc/{process_id}/task").iterdir():
            for child in (thread / "children").read_text(encoding="ascii").split():
                yield from processes_of(int(child))


class TreeMemory:
    """Memory of a process and its descendants above that at the start.

    The peak is the largest sum at any call of `sample`, or the sum of the peaks of each process since the
    last reset if that is more: the first one misses what is short, the second one a process that has ended.
    """

    def __init__(self, process_id: int) -> None:
        self._process_id = process_id
        self._rest_mb = self._sum_mb("VmRSS")
        self._most_mb = self._rest_mb

    def reset_peak(self) -> None:
        """Makes the peak count from now on, above the same memory at rest."""
        for process in processes_of(self._process_id):
            with suppress(OSError):
                Path(f"/proc/{process}/clear_refs").write_text("5", encoding="ascii")
        self._most_mb = self._sum_mb("VmRSS")

    def sample(self) -> None:
        """Reads the sum now."""
        self._most_mb = max(self._most_mb, self._sum_mb("VmRSS"))

    def growth_mb(self) -> float:
        """The sum now."""
        return round(self._sum_mb("VmRSS") - self._rest_mb, 1)

    def peak_growth_mb(self) -> float:
        """The largest sum so far."""
        return round(max(self._most_mb, self._sum_mb("VmHWM")) - self._rest_mb, 1)

    def _sum_mb(self, key: str) -> float:
        found = 0.0
        for process in processes_of(self._process_id):
            with suppress(OSError):
                found += memory_mb(process, key)
        return found
