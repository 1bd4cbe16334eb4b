"""Physical memory available to the embedding workspace, given what the LLM's KV cache owns, where bytes move.

- `kvcached`: KV blocks are mapped on demand (CUDA virtual memory, the `kvcached` package inside the engine),
  so memory ceded by the engine returns to the device. The limit is in a file in shared memory: three 64-bit
  numbers (total, used and preallocated bytes) under an advisory lock. It takes effect at the engine's next
  allocation and never evicts; only bytes that are neither used nor preallocated are free.
- `elastic`: an ideal of `kvcached`, for simulators.
"""

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from controlplane.core.device import LimitConflict
from controlplane.core.engine_reports import EngineState

SEGMENTS = Path("/dev/shm")
_NAME_VARIABLE = "KVCACHED_IPC_NAME"
_FIELDS = struct.Struct("=qqq")
# Page of CUDA's virtual memory.
_PAGE_BYTES = 2 * 2**20


@dataclass(frozen=True, slots=True)
class ElasticMemory:
    """Memory that follows the engine's quota without delay.

    `kv_bytes` is the largest KV cache; at most `pool_bytes`.
    """

    pool_bytes: int
    kv_bytes: int

    mode = "elastic"

    @property
    def max_llm_bytes(self) -> int:
        """Largest LLM quota."""
        return self.kv_bytes

    def limit_llm(self, quota_bytes: int) -> None:
        """Does nothing; an unused block takes no memory."""

    def engine_restarted(self) -> None:
        """Does nothing; no limit is kept."""

    def workspace_room(self, engine: EngineState) -> int:
        """Bytes of the pool that the engine does not hold."""
        return self.pool_bytes - (engine.total_bytes - engine.ceded_bytes)


@dataclass(frozen=True, slots=True)
class KvLimit:
    """Content of the segment in bytes: the limit, what is mapped and held, and what is mapped in reserve."""

    total: int
    used: int
    prealloc: int

    @property
    def mapped(self) -> int:
        """Bytes mapped on the device."""
        return self.used + self.prealloc


class KvcachedMemory:
    """Memory whose KV limit is set through the shared segment of kvcached.

    `unit_bytes` is the granularity of mapping (`kvcached_unit`). Limits are whole units, and never equal to
    the original total, which the engine would not recognize as a change.
    """

    mode = "kvcached"

    def __init__(self, segment: Path, *, pool_bytes: int, unit_bytes: int) -> None:
        self._segment = segment
        self._unit = unit_bytes
        self.pool_bytes = pool_bytes
        """Bytes that the KV cache and the workspace may take together."""
        self._original = self.read().total
        self._last_set: int | None = None
        self.revision = 0
        """Number of limits set so far."""

    @property
    def max_llm_bytes(self) -> int:
        """Largest limit that can be set."""
        whole = min(self._original, self.pool_bytes) // self._unit * self._unit
        return whole if whole < self._original else whole - self._unit

    def read(self) -> KvLimit:
        """Reads the segment under a shared lock."""
        with self._locked(fcntl.LOCK_SH) as file:
            return _read(file)

    def limit_llm(self, quota_bytes: int) -> None:
        """Sets the limit. Raises LimitConflict if another process has changed it since."""
        # Rounded up to a whole unit, so that the engine can hold its whole quota.
        limit = min(-(-quota_bytes // self._unit) * self._unit, self.max_llm_bytes)
        with self._locked(fcntl.LOCK_EX) as file:
            found = _read(file)
            if self._last_set is not None and found.total != self._last_set:
                raise LimitConflict(
                    f"{self._segment}: the limit is {found.total} bytes, but {self._last_set} was set "
                    f"(revision {self.revision}); stop whatever else sets kvcached's limit, such as kvctl"
                )
            file.seek(0)
            file.write(_FIELDS.pack(limit, found.used, found.prealloc))
            file.flush()
        self._last_set = limit
        self.revision += 1

    def engine_restarted(self) -> None:
        """Accepts the limit that the new engine has written."""
        self._last_set = None

    def workspace_room(self, engine: EngineState) -> int:
        """Bytes of the pool that are neither mapped, allowed to be mapped, nor held by the engine.

        The engine's state counts because a step in flight may still write into blocks that are not ceded yet.
        """
        found = self.read()
        held = engine.total_bytes - engine.ceded_bytes
        return max(0, self.pool_bytes - max(found.mapped, found.total, held))

    @contextmanager
    def _locked(self, kind: int) -> Iterator[IO[bytes]]:
        with self._segment.open("r+b") as file:
            fcntl.flock(file, kind)
            try:
                yield file
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)


def _read(file: IO[bytes]) -> KvLimit:
    file.seek(0)
    found = file.read(_FIELDS.size)
    if len(found) < _FIELDS.size:
        raise ValueError(
            f"{file.name}: {len(found)} bytes instead of {_FIELDS.size}; name kvcached's segment"
        )
    return KvLimit(*_FIELDS.unpack(found))


def kvcached_unit(layers: int) -> int:
    """Bytes mapped at once: one CUDA page each for keys and values in every layer."""
    return 2 * layers * _PAGE_BYTES


def kvcached_segment(folder: Path = SEGMENTS) -> Path:
    """Path of the segment with the engine's limit. Raises ValueError if it does not exist."""
    name = os.environ.get(_NAME_VARIABLE)
    if not name:
        raise ValueError(
            f"pool.kv_allocator=kvcached: {_NAME_VARIABLE} is not set; start with ENABLE_KVCACHED=true "
            f"KVCACHED_AUTOPATCH=1 {_NAME_VARIABLE}=tandem, or use static"
        )
    segment = folder / Path(name).name
    if not segment.is_file():
        raise ValueError(
            f"pool.kv_allocator=kvcached: no segment {segment}, so the engine does not use kvcached; "
            "install a release of it that supports this vLLM, or use static"
        )
    return segment
