"""Lock-free shared memory in which the engine's scheduler publishes its state at each step.

One writer and any number of readers. The writer alternates between two halves, each with a sequence number
and a checksum; a reader takes the newer half whose checksum matches. A read fails only if the writer
overwrites both halves during it, so a stopped or dead writer never blocks a reader. The file's path is passed
in an environment variable, because vLLM hashes its own configuration into the cache key of compiled graphs.
After the halves, two bytes go in the other direction: whether an embedding pass is under way on the device,
and how often that has become true, modulo 256.
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

from backends.run_directory import run_directory
from backends.vllm.plugin import preemption_log

ENVIRONMENT = "TANDEM_SHARED_STATE"

_HEADER = struct.Struct("<IQ")  # checksum of the rest of the half, sequence number
_FACTS = struct.Struct("<qQQQIIIIIIIIQQII")
_MAX_ROWS = 4_096
_ROW_SIZE = 12
_MOST_PREEMPTED = preemption_log.KEPT * preemption_log.ROW_SIZE
_HALF = _HEADER.size + _FACTS.size + _MAX_ROWS * _ROW_SIZE + _MOST_PREEMPTED
_IS_SHARED_OFFSET = 2 * _HALF
_PASSES_BEGUN_OFFSET = _IS_SHARED_OFFSET + 1
_SIZE = _PASSES_BEGUN_OFFSET + 1
_CHECKSUM_SIZE = 4
_MAX_READ_ATTEMPTS = 100
_environment_lock = Lock()

Column = Sequence[int] | npt.NDArray[np.integer[Any]]
Row = tuple[int, int]
"""(key of the client's request id, blocks held)."""


class EngineFacts(NamedTuple):
    """Counters of the scheduler at one step; memory in blocks.

    Attributes:
        at_ns: time on the host's monotonic clock.
        step: steps since the start.
        step_ns: predicted duration of a step without prompt tokens; 0 if unknown.
        prompt_token_ns: added duration per prompt token in the step.
        total: blocks that can hold tokens.
        quota: blocks up to which requests may start.
        use_ceiling: blocks up to which running requests may grow; only these can be used.
        used: blocks that requests hold.
        ceded: blocks that no request holds and no step in flight writes; only these may be lent.
        running: running requests.
        waiting: waiting requests.
        preemptions: preemptions since the start.
        recompute_tokens: tokens whose KV entries preemptions have freed since the start.
        waited_ns: time for which steps were delayed on purpose since the start.
    """

    at_ns: int
    step: int
    step_ns: int
    prompt_token_ns: int
    total: int
    quota: int
    use_ceiling: int
    used: int
    ceded: int
    running: int
    waiting: int
    preemptions: int
    recompute_tokens: int
    waited_ns: int


@dataclass(frozen=True, slots=True)
class StateReading:
    """One consistent read: the number of the write, the counters, and a row per running request.

    `preempted` are the last preemptions (`preemption_log.unpacked`).
    """

    sequence: int
    facts: EngineFacts
    rows: tuple[Row, ...]
    preempted: bytes


class TornRead(RuntimeError):
    """Every attempt found both halves overwritten: two steps took less time than the read."""


def key_of(request_id: str) -> int:
    """64-bit hash of a request id."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest(), "little")


@contextmanager
def open_shared_state() -> Iterator["SharedState"]:
    """Creates the shared memory for an engine that is started within the context.

    On exit the file is unlinked, so that its memory is freed with the last process that maps it.
    """
    # The environment belongs to the whole process, so concurrent engine starts are serialised.
    with _environment_lock:
        handle, path = tempfile.mkstemp(prefix="state-", dir=run_directory())
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
    """A mapping of the shared file at `path`, which `create` has written."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _SIZE)
        self._sequence = 0

    @classmethod
    def create(cls, path: Path) -> "SharedState":
        """Writes an empty file and maps it."""
        path.write_bytes(bytes(_SIZE))
        return cls(path)

    @classmethod
    def from_environment(cls) -> "SharedState | None":
        """Maps the file named by the environment; None if none is named."""
        path = os.environ.get(ENVIRONMENT)
        return cls(Path(path)) if path else None

    def write(self, facts: EngineFacts, keys: Column, blocks: Column, preempted: bytes = b"") -> None:
        """Publishes the counters and the rows, given by column; only the first 4,096 rows are kept.

        `preempted` is that of a `PreemptionLog`.
        """
        count = min(len(keys), _MAX_ROWS)
        self._sequence += 1
        columns = ((keys, np.uint64), (blocks, np.uint32))
        rows = [np.asarray(column[:count], dtype).tobytes() for column, dtype in columns]
        sequence = self._sequence.to_bytes(_HEADER.size - _CHECKSUM_SIZE, "little")
        payload = b"".join((sequence, _FACTS.pack(*facts, count, len(preempted)), *rows, preempted))
        half = crc32(payload).to_bytes(_CHECKSUM_SIZE, "little") + payload
        start = self._sequence % 2 * _HALF
        self._memory[start : start + len(half)] = half

    @property
    def is_device_shared(self) -> bool:
        """Whether an embedding pass is under way on the device; set by the server."""
        return self._memory[_IS_SHARED_OFFSET] != 0

    @is_device_shared.setter
    def is_device_shared(self, value: bool) -> None:
        if value:
            self._memory[_PASSES_BEGUN_OFFSET] = (self.passes_begun + 1) % 256
        self._memory[_IS_SHARED_OFFSET] = int(value)

    @property
    def passes_begun(self) -> int:
        """How often `is_device_shared` was set, modulo 256; reveals a pass between two reads of the flag."""
        return self._memory[_PASSES_BEGUN_OFFSET]

    def newest(self) -> int:
        """Sequence number of the latest write; 0 before the first."""
        return max(int(_HEADER.unpack_from(self._memory, start)[1]) for start in (0, _HALF))

    def read(self) -> StateReading | None:
        """The latest state; None before the first write. Raises TornRead."""
        for _ in range(_MAX_READ_ATTEMPTS):
            halves = [(_HEADER.unpack_from(self._memory, start)[1], start) for start in (0, _HALF)]
            if halves == [(0, 0), (0, _HALF)]:
                return None
            for _, start in sorted(halves, reverse=True):
                if (reading := self._whole(start)) is not None:
                    return reading
        raise TornRead(f"no half of the engine's shared state was valid in {_MAX_READ_ATTEMPTS} attempts")

    def _whole(self, start: int) -> StateReading | None:
        checksum, sequence = _HEADER.unpack_from(self._memory, start)
        *facts, count, size = _FACTS.unpack_from(self._memory, start + _HEADER.size)
        end = start + _HEADER.size + _FACTS.size + min(count, _MAX_ROWS) * _ROW_SIZE
        # Torn sizes may lead beyond the half, and the checksum then differs.
        payload = self._memory[start + _CHECKSUM_SIZE : min(end + size, start + _HALF)]
        if sequence == 0 or crc32(payload) != checksum:
            return None
        numbers = struct.unpack_from(
            _columns_format(count), payload, _HEADER.size - _CHECKSUM_SIZE + _FACTS.size
        )
        rows = zip(numbers[:count], numbers[count:], strict=True)
        return StateReading(sequence, EngineFacts(*facts), tuple(rows), payload[len(payload) - size :])


def _columns_format(count: int) -> str:
    """Struct format of the key and block columns of `count` rows, in the host's byte order."""
    return f"={count}Q{count}I"
