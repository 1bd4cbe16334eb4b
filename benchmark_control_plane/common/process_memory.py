"""Reads from /proc what memory a server and its children use, in MB of 10^6 bytes."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from backends.device.probe import UNCOUNTED_NAME, processes_of

SERVER, ENGINE, WORKER, GRAMMARS, OTHER = "server", "engine", "worker", "grammars", "other"
"""Names of the processes of a server: the one that serves the API, EngineCore, the embedding worker, the
process that compiles grammars with its children, and any other."""
# By a part of the command line.
_COMMANDS = {"EngineCore": ENGINE, "backends.embedding.worker": WORKER}


def process_name(process_id: int, server: int) -> str:
    """The name of a process of `server`, one of the five above. Raises OSError if it has ended."""
    if process_id == server:
        return SERVER
    folder = Path(f"/proc/{process_id}")
    if (folder / "comm").read_text(encoding="utf-8", errors="replace").strip() == UNCOUNTED_NAME:
        return GRAMMARS
    command = (folder / "cmdline").read_text(encoding="utf-8", errors="replace")
    return next((name for part, name in _COMMANDS.items() if part in command), OTHER)


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
        self._rest = self._sizes()
        self._rest_mb = self._most_mb = sum(self._rest.values())
        self._most = self._rest

    def reset_peak(self) -> None:
        """Makes the peak count from now on, above the same memory at rest."""
        for process in processes_of(self._process_id):
            with suppress(OSError):
                Path(f"/proc/{process}/clear_refs").write_text("5", encoding="ascii")
        self._most = self._sizes()
        self._most_mb = sum(self._most.values())

    def sample(self) -> None:
        """Reads the sizes now."""
        sizes = self._sizes()
        self._most = _largest(self._most, sizes)
        self._most_mb = max(self._most_mb, sum(sizes.values()))

    def growth_mb(self) -> float:
        """MB that the processes take now above those at the start."""
        return round(sum(self._sizes().values()) - self._rest_mb, 1)

    def peak_growth_mb(self) -> float:
        """MB that the processes took at the peak above those at the start."""
        return round(max(self._most_mb, sum(self._at_peaks().values())) - self._rest_mb, 1)

    def growth_by_process(self) -> dict[str, float]:
        """`growth_mb` by `process_name`."""
        return self._above_rest(self._sizes())

    def peak_growth_by_process(self) -> dict[str, float]:
        """MB above those at the start by `process_name`, each at its own peak: at different times."""
        return self._above_rest(_largest(self._most, self._at_peaks()))

    def _above_rest(self, sizes: Mapping[str, float]) -> dict[str, float]:
        names = sorted({*sizes, *self._rest})
        return {name: round(sizes.get(name, 0.0) - self._rest.get(name, 0.0), 1) for name in names}

    def _at_peaks(self) -> dict[str, float]:
        """Sizes now, with each process at its own peak."""
        return self._sizes(lambda process: memory_mb(process, "VmHWM") - memory_mb(process))

    def _sizes(self, more: Callable[[int], float] = lambda _: 0.0) -> dict[str, float]:
        """Sizes of the processes that have not ended, and `more` of each, by name."""
        found: defaultdict[str, float] = defaultdict(float)
        for process in processes_of(self._process_id):
            # The memory of a process that ends meanwhile cannot be read.
            with suppress(OSError):
                size = proportional_mb(process) + more(process)
                found[process_name(process, self._process_id)] += size
        return dict(found)


def _largest(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: max(one.get(name, 0.0), other.get(name, 0.0)) for name in {*one, *other}}
