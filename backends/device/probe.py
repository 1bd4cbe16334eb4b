"""Reads total, free and used memory of the device.

With a GPU, NVML reports bytes on the device by process; importing this module makes CUDA number GPUs as NVML
does, unless CUDA_DEVICE_ORDER is set. Otherwise the device is the host: physical memory (or the limit of the
control group) and the resident pages of our processes. `read` is cheap enough for a hundred calls per second:
free bytes are read every time, memory per process when they changed and otherwise every `_QUERY_EVERY`
readings.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from controlplane.core.device import DeviceProbe, DeviceReading

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
# Readings between two scans for new child processes; a worker may have been replaced.
_RESCAN_EVERY = 100
# Readings between two queries of memory per process while free bytes change by less than
# `_QUERY_ON_CHANGE_BYTES`, the size of CUDA's smallest allocation.
_QUERY_EVERY = 10
_QUERY_ON_CHANGE_BYTES = 2 * 2**20
_MEMINFO_BYTES = 256
# NVML numbers GPUs by PCI address, CUDA by default from the fastest on. CUDA reads this when a process opens
# the device; engines and workers are children of a process that has imported this module, and inherit it.
os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
UNCOUNTED_NAME = "tandem-grammars"
"""Name of processes (`/proc/PID/comm`) whose memory is not of the pool, as their pages are mostly shared."""


def memory_bytes() -> int:
    """Total bytes of the first visible GPU, or of the host without one.

    Raises ValueError if CUDA_VISIBLE_DEVICES names a GPU that does not exist.
    """
    with _opened_gpu() as gpu:
        return _host_bytes() if gpu is None else _gpu_bytes(*gpu)[0]


def free_gpu_bytes() -> int | None:
    """Free bytes of the first visible GPU; None without one, because a host reclaims caches on demand.

    Raises ValueError if CUDA_VISIBLE_DEVICES names a GPU that does not exist.
    """
    with _opened_gpu() as gpu:
        return None if gpu is None else _gpu_bytes(*gpu)[1]


def gpu_name() -> str | None:
    """Name and driver version of the first visible GPU, as recorded in results; None without one.

    Raises ValueError if CUDA_VISIBLE_DEVICES names a GPU that does not exist.
    """
    with _opened_gpu() as gpu:
        if gpu is None:
            return None
        nvml, handle = gpu
        return f"{nvml.nvmlDeviceGetName(handle)}, driver {nvml.nvmlSystemGetDriverVersion()}"


def open_probe() -> DeviceProbe:
    """Opens a probe of the first visible GPU, or of the host without one.

    Raises ValueError if CUDA_VISIBLE_DEVICES names a GPU that does not exist.
    """
    gpu = _first_gpu()
    return HostProbe() if gpu is None else GpuProbe(*gpu)


@dataclass(eq=False, slots=True)
class _CachedUsage:
    """Bytes held by our processes, queried only when free memory has changed or the value is old."""

    _query: Callable[[], int]
    _used: int = field(init=False, default=0)
    _free_at_query: int = field(init=False, default=0)
    _readings_left: int = field(init=False, default=0)

    def at_free(self, free: int) -> int:
        """Bytes held by our processes when `free` bytes are free."""
        if not self._readings_left or abs(free - self._free_at_query) >= _QUERY_ON_CHANGE_BYTES:
            self._used, self._free_at_query, self._readings_left = self._query(), free, _QUERY_EVERY
        self._readings_left -= 1
        return self._used


@dataclass(eq=False, slots=True)
class HostProbe:
    """Probe of host memory.

    `total` and `free` are those of the host, or of the control group if it has less. A resident page that
    several of our processes share counts for each of them; those named UNCOUNTED_NAME are left out.
    """

    counts_reserved_memory = False
    _files: dict[int, int] = field(init=False, default_factory=dict)
    _meminfo: int = field(init=False)
    _total: int = field(init=False)
    _cgroup: "_CgroupUsage | None" = field(init=False)
    _usage: _CachedUsage = field(init=False)
    _reads: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._meminfo = os.open(_PROC / "meminfo", os.O_RDONLY)
        self._usage = _CachedUsage(lambda: sum([self._resident(pid) for pid in tuple(self._files)]))
        self._total = _host_bytes()
        self._cgroup = None if _cgroup_limit() is None else _CgroupUsage()

    def read(self) -> DeviceReading:
        """Reads memory now."""
        if self._reads % _RESCAN_EVERY == 0:
            self._rescan()
            if self._cgroup is not None:
                self._cgroup.refresh_cache()
        self._reads += 1
        free = min(self._total, _available(os.pread(self._meminfo, _MEMINFO_BYTES, 0)))
        if self._cgroup is not None:
            free = min(free, max(0, self._total - self._cgroup.used_bytes()))
        ours = self._usage.at_free(free)
        return DeviceReading(self._total, free, ours, max(0, self._total - free - ours))

    def close(self) -> None:
        """Closes all files."""
        for descriptor in (self._meminfo, *self._files.values()):
            os.close(descriptor)
        self._files.clear()
        if self._cgroup is not None:
            self._cgroup.close()

    def _rescan(self) -> None:
        for pid in processes_of(os.getpid()):
            try:
                name = (_PROC / str(pid) / "comm").read_text("utf-8", "replace").strip()
                if name != UNCOUNTED_NAME and pid not in self._files:
                    self._files[pid] = os.open(_PROC / str(pid) / "statm", os.O_RDONLY)
            except OSError:
                continue  # the process has exited
            if name == UNCOUNTED_NAME and pid in self._files:
                # It was found while it still imported what it runs, under its parent's name.
                os.close(self._files.pop(pid))

    def _resident(self, pid: int) -> int:
        try:
            return int(os.pread(self._files[pid], 64, 0).split()[1]) * _PAGE_BYTES
        except (OSError, IndexError):
            # The process has exited.
            os.close(self._files.pop(pid))
            return 0


@dataclass(eq=False, slots=True)
class _CgroupUsage:
    """Memory used by this control group, without the file cache that the kernel reclaims on demand."""

    _current: int = field(init=False)
    _cache: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._current = os.open(_CGROUP / "memory.current", os.O_RDONLY)

    def refresh_cache(self) -> None:
        """Reads the size of the reclaimable file cache, which costs more than the rest of a reading."""
        stated = (_CGROUP / "memory.stat").read_text("ascii").splitlines()
        self._cache = next((int(line.split()[1]) for line in stated if line.startswith("inactive_file ")), 0)

    def used_bytes(self) -> int:
        """Bytes used now."""
        return max(0, int(os.pread(self._current, 64, 0)) - self._cache)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._current)


@dataclass(eq=False, slots=True)
class GpuProbe:
    """Probe of the GPU or MIG device with NVML handle `_handle`."""

    counts_reserved_memory = True
    _nvml: Any
    _handle: Any
    _pids: set[int] = field(init=False, default_factory=set)
    _usage: _CachedUsage = field(init=False)
    _reads: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._usage = _CachedUsage(self._query_used)

    def read(self) -> DeviceReading:
        """Reads memory now."""
        if self._reads % _RESCAN_EVERY == 0:
            self._pids = processes_of(os.getpid())
        self._reads += 1
        total, free = _gpu_bytes(self._nvml, self._handle)
        ours = self._usage.at_free(free)
        return DeviceReading(total, free, ours, max(0, total - free - ours))

    def close(self) -> None:
        """Shuts NVML down."""
        self._nvml.nvmlShutdown()

    def _query_used(self) -> int:
        try:
            running = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except self._nvml.NVMLError_NotSupported:
            return 0  # for example under WSL
        return sum(int(process.usedGpuMemory or 0) for process in running if process.pid in self._pids)


def processes_of(root: int) -> set[int]:
    """Ids of process `root` and all its descendants."""
    found, unvisited = {root}, [root]
    while unvisited:
        tasks = _PROC / str(unvisited.pop()) / "task"
        try:
            listed = [(task / "children").read_text().split() for task in tasks.iterdir()]
        except OSError:
            continue  # the process has exited
        children = {int(pid) for pids in listed for pid in pids} - found
        unvisited += children
        found |= children
    return found


def _available(meminfo: bytes) -> int:
    at = meminfo.index(b"MemAvailable:") + len(b"MemAvailable:")
    return int(meminfo[at : meminfo.index(b"kB", at)]) * 1_024


def _host_bytes() -> int:
    physical = _PAGE_BYTES * os.sysconf("SC_PHYS_PAGES")
    limit = _cgroup_limit()
    return physical if limit is None else min(physical, limit)


def _cgroup_limit() -> int | None:
    """Memory limit of the control group in bytes; None if unlimited."""
    stated = _CGROUP / "memory.max"
    limit = stated.read_text().strip() if stated.is_file() else ""
    return int(limit) if limit.isdigit() else None


@contextmanager
def _opened_gpu() -> Iterator[tuple[Any, Any] | None]:
    """Opens NVML for one query; a probe keeps it open."""
    gpu = _first_gpu()
    try:
        yield gpu
    finally:
        if gpu is not None:
            gpu[0].nvmlShutdown()


def _first_gpu() -> tuple[Any, Any] | None:
    """Returns initialized NVML and the handle of the first visible GPU.

    None without a GPU, and for a GPU that shares the host's memory.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    first = visible.split(",")[0].strip()
    # CUDA ignores the list from the first invalid entry on.
    if not first.isdigit() and not first.startswith(("GPU-", "MIG-")):
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handle = _gpu(pynvml, first)
        _gpu_bytes(pynvml, handle)
    except pynvml.NVMLError_NotSupported:
        pynvml.nvmlShutdown()
        return None
    except pynvml.NVMLError as error:
        pynvml.nvmlShutdown()
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES={visible}: {error}; choose a GPU that `nvidia-smi -L` lists"
        ) from error
    return pynvml, handle


def _gpu(nvml: Any, name: str) -> Any:
    if not name.isdigit():
        return nvml.nvmlDeviceGetHandleByUUID(name)
    device = nvml.nvmlDeviceGetHandleByIndex(int(name))
    try:
        has_mig = nvml.nvmlDeviceGetMigMode(device)[0] == nvml.NVML_DEVICE_MIG_ENABLE
    except nvml.NVMLError_NotSupported:
        return device
    # CUDA uses only the first MIG device.
    return nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, 0) if has_mig else device


def _gpu_bytes(nvml: Any, handle: Any) -> tuple[int, int]:
    """(total, free) bytes, without the driver's reserve, which no process can use."""
    found = nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2)
    return int(found.total) - int(found.reserved), int(found.free)
