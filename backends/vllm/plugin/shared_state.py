"""What does the engine's scheduler hold right now? A board in shared memory, written before each step.

One writer, any number of readers, no lock. The writer fills two halves in turn, each with its sequence
number and a checksum over all of it; a reader takes the newer half that is whole. Only a writer that
laps the reader spoils both, so one that stands still or has died in the middle delays nobody. The file
is named by the environment, since vLLM's own configuration is hashed into the key of compiled graphs.
Behind the halves stands one byte for the other direction: whether somebody else wants the device.
"""

import mmap
import os
import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

ENVIRONMENT = "TANDEM_BOARD"

_HEADER = struct.Struct("<IQ")  # checksum over all that follows it, sequence
_FACTS = struct.Struct("<qQQQIIIIIIIQQI")
_MAX_ROWS = 4_096
_COLUMN_TYPES = (np.uint64, np.uint32, np.uint32)
_ROW_SIZE = 16
_HALF = _HEADER.size + _FACTS.size + _MAX_ROWS * _ROW_SIZE
_IS_SHARED_OFFSET = 2 * _HALF
_SIZE = _IS_SHARED_OFFSET + 1
_CHECKSUM_SIZE = 4
_MAX_READ_ATTEMPTS = 100
_environment_lock = Lock()

Column = Sequence[int] | npt.NDArray[np.integer[Any]]
Row = tuple[int, int, int]
"""(key of the request's id, tokens in the cache, blocks held)."""


class EngineFacts(NamedTuple):
    """As of `at_ns` on the host's monotonic clock; memory in blocks. `ceded` is what nobody in the engine
    holds or still writes: only that may be lent to others. A step takes `step_ns` now, and
    `prompt_token_ns` more for each prompt token in it; 0 is unknown. `waited_ns` were left to others on
    purpose since the start."""

    at_ns: int
    step: int
    step_ns: int
    prompt_token_ns: int
    total: int
    quota: int
    used: int
    ceded: int
    running: int
    waiting: int
    preemptions: int
    recompute_tokens: int
    waited_ns: int


@dataclass(frozen=True, slots=True)
class StateReading:
    facts: EngineFacts
    rows: tuple[Row, ...]

    def of(self, request_id: str) -> Row | None:
        key = key_of(request_id)
        return next((row for row in self.rows if row[0] == key), None)


class TornRead(RuntimeError):
    """The writer lapped this reader at every try: it must read faster than two steps take."""


def key_of(request_id: str) -> int:
    return int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest(), "little")


@contextmanager
def open_shared_state() -> Iterator["SharedState"]:
    """A board for the engine that starts inside. Afterwards its file has no name any more, so it goes with
    those that map it."""
    # The environment is the whole process's: two engines that start at once take turns.
    with _environment_lock:
        shared = Path("/dev/shm")
        handle, path = tempfile.mkstemp(prefix="tandem-board-", dir=shared if shared.is_dir() else None)
        os.close(handle)
        before = os.environ.get(ENVIRONMENT)
        os.environ[ENVIRONMENT] = path
        try:
            yield SharedState.create(Path(path))
        finally:
            Path(path).unlink()
            del os.environ[ENVIRONMENT]
            if before is not None:
                os.environ[ENVIRONMENT] = before


class SharedState:
    """Maps the file at `path`, which `create` makes."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _SIZE)
        self._sequence = 0

    @classmethod
    def create(cls, path: Path) -> "SharedState":
        path.write_bytes(bytes(_SIZE))
        return cls(path)

    @classmethod
    def from_environment(cls) -> "SharedState | None":
        path = os.environ.get(ENVIRONMENT)
        return cls(Path(path)) if path else None

    def close(self) -> None:
        self._memory.close()

    def write(self, facts: EngineFacts, keys: Column, tokens: Column, blocks: Column) -> None:
        """The rows by column. Those beyond the first 4,096 are left out."""
        count = min(len(keys), _MAX_ROWS)
        self._sequence += 1
        columns = zip((keys, tokens, blocks), _COLUMN_TYPES, strict=True)
        rows = [np.asarray(column[:count], kind).tobytes() for column, kind in columns]
        sequence = self._sequence.to_bytes(_HEADER.size - _CHECKSUM_SIZE, "little")
        summed = b"".join((sequence, _FACTS.pack(*facts, count), *rows))
        half = crc32(summed).to_bytes(_CHECKSUM_SIZE, "little") + summed
        start = self._sequence % 2 * _HALF
        self._memory[start : start + len(half)] = half

    @property
    def is_device_shared(self) -> bool:
        """Somebody else wants the device; set by the gate."""
        return self._memory[_IS_SHARED_OFFSET] != 0

    @is_device_shared.setter
    def is_device_shared(self, value: bool) -> None:
        self._memory[_IS_SHARED_OFFSET] = int(value)

    def newest(self) -> int:
        """The sequence number of the last write; 0 before the first."""
        return max(int(_HEADER.unpack_from(self._memory, start)[1]) for start in (0, _HALF))

    def read(self) -> StateReading | None:
        """None before the first write. Raises TornBoard."""
        for _ in range(_MAX_READ_ATTEMPTS):
            halves = [(_HEADER.unpack_from(self._memory, start)[1], start) for start in (0, _HALF)]
            if halves == [(0, 0), (0, _HALF)]:
                return None
            for _, start in sorted(halves, reverse=True):
                if (reading := self._whole(start)) is not None:
                    return reading
        raise TornRead(f"no half of the engine's board was whole at {_MAX_READ_ATTEMPTS} readings")

    def _whole(self, start: int) -> StateReading | None:
        checksum, sequence = _HEADER.unpack_from(self._memory, start)
        *facts, count = _FACTS.unpack_from(self._memory, start + _HEADER.size)
        end = start + _HEADER.size + _FACTS.size + min(count, _MAX_ROWS) * _ROW_SIZE
        summed = self._memory[start + _CHECKSUM_SIZE : end]
        if sequence == 0 or crc32(summed) != checksum:
            return None
        numbers = struct.unpack_from(
            _columns_format(count), summed, _HEADER.size - _CHECKSUM_SIZE + _FACTS.size
        )
        rows = zip(numbers[:count], numbers[count : 2 * count], numbers[2 * count :], strict=True)
        return StateReading(EngineFacts(*facts), tuple(rows))


def _columns_format(count: int) -> str:
    """Keys, tokens and blocks of so many rows, in the byte order of the host that both ends share."""
    return f"={count}Q{count}I{count}I"
