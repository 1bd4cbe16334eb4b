"""Which bytes can the embedding workspace physically take while the LLM owns so much? One answer a mode.

`static`: the engine took its whole KV cache when it started. A smaller LLM quota frees blocks, not
bytes: the workspace keeps what was left beside the cache, whatever the quotas say.
`kvcached`: KV blocks are mapped on demand (CUDA virtual memory, the `kvcached` package inside the
engine), so what the engine has ceded returns to the device. Its limit lies in a file in shared memory:
three 64-bit numbers, total, used and preallocated bytes, under an advisory lock. It is applied at the
engine's next allocation and never evicts; only what is neither in use nor kept ready is free.
`elastic`: an ideal of that, for simulators.
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
from controlplane.core.ports import EngineState

SEGMENTS = Path("/dev/shm")
_NAME_VARIABLE = "KVCACHED_IPC_NAME"
_FIELDS = struct.Struct("=qqq")
# A page of CUDA's virtual memory; one is mapped for K and one for V in each layer at once.
_PAGE_BYTES = 2 * 2**20


@dataclass(frozen=True, slots=True)
class StaticMemory:
    kv_bytes: int
    workspace_bytes: int

    mode = "static"

    @property
    def pool_bytes(self) -> int:
        return self.kv_bytes + self.workspace_bytes

    @property
    def most_llm_bytes(self) -> int:
        return self.kv_bytes

    def limit_llm(self, quota_bytes: int) -> None:
        """Nothing: the cache was allocated at the start."""

    def workspace_room(self, engine: EngineState) -> int:
        return self.workspace_bytes


@dataclass(frozen=True, slots=True)
class ElasticMemory:
    """`kv_bytes` is the cache at its largest; all of the pool, or less."""

    pool_bytes: int
    kv_bytes: int

    mode = "elastic"

    @property
    def most_llm_bytes(self) -> int:
        return self.kv_bytes

    def limit_llm(self, quota_bytes: int) -> None:
        """Nothing: a block that nobody holds is not there."""

    def workspace_room(self, engine: EngineState) -> int:
        return self.pool_bytes - (engine.total_bytes - engine.ceded_bytes)


@dataclass(frozen=True, slots=True)
class KvLimit:
    """What the segment says. `used` blocks are mapped and held, `prealloc` ones mapped and kept ready."""

    total: int
    used: int
    prealloc: int

    @property
    def mapped(self) -> int:
        return self.used + self.prealloc


class KvcachedMemory:
    """`unit_bytes` is what is mapped at once (`kvcached_unit`): limits are whole units, and never
    the original total, which the engine would take for no change."""

    mode = "kvcached"

    def __init__(self, segment: Path, *, pool_bytes: int, unit_bytes: int) -> None:
        self._segment = segment
        self._unit = unit_bytes
        self._pool = pool_bytes
        self._original = self.read().total
        self._last_set: int | None = None
        self.revision = 0
        """How many limits were set; each on top of the one before."""

    @property
    def pool_bytes(self) -> int:
        return self._pool

    @property
    def most_llm_bytes(self) -> int:
        whole = min(self._original, self._pool) // self._unit * self._unit
        return whole if whole < self._original else whole - self._unit

    def read(self) -> KvLimit:
        with self._locked(fcntl.LOCK_SH) as file:
            return _read(file)

    def limit_llm(self, quota_bytes: int) -> None:
        """Raises LimitConflict if the limit is not the one that was set last."""
        # The engine must be able to hold its whole quota: up to a full unit, not down.
        limit = min(-(-quota_bytes // self._unit) * self._unit, self.most_llm_bytes)
        with self._locked(fcntl.LOCK_EX) as file:
            found = _read(file)
            if self._last_set is not None and found.total != self._last_set:
                raise LimitConflict(
                    f"{self._segment}: its limit is {found.total} bytes, {self._last_set} were set (revision "
                    f"{self.revision}); stop whatever else sets kvcached's limit, kvctl for one"
                )
            file.seek(0)
            file.write(_FIELDS.pack(limit, found.used, found.prealloc))
            file.flush()
        self._last_set = limit
        self.revision += 1

    def workspace_room(self, engine: EngineState) -> int:
        """The engine's own fence counts too: what a step under way may still write is not ceded."""
        found = self.read()
        held = engine.total_bytes - engine.ceded_bytes
        return max(0, self._pool - max(found.mapped, found.total, held))

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
            f"{file.name}: {len(found)} bytes where kvcached keeps {_FIELDS.size}; is this its segment?"
        )
    return KvLimit(*_FIELDS.unpack(found))


def kvcached_unit(layers: int) -> int:
    """Bytes that are mapped at once: a page for keys and one for values in every layer."""
    return 2 * layers * _PAGE_BYTES


def kvcached_segment(folder: Path = SEGMENTS) -> Path:
    """Where the engine's limit lies. Raises ValueError saying what is missing."""
    name = os.environ.get(_NAME_VARIABLE)
    if not name:
        raise ValueError(
            f"pool.device_memory=kvcached: {_NAME_VARIABLE} is not set; start with ENABLE_KVCACHED=true "
            f"KVCACHED_AUTOPATCH=1 {_NAME_VARIABLE}=tandem, or use static"
        )
    segment = folder / Path(name).name
    if not segment.is_file():
        raise ValueError(
            f"pool.device_memory=kvcached: no segment {segment}, so the engine does not run on kvcached; "
            "install it where vLLM runs (it follows some of vLLM's releases only), or use static"
        )
    return segment
