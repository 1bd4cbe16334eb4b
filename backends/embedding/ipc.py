"""How do server and worker speak? Length-prefixed frames over one socket pair.

A frame is a head (kind, batch number, payload bytes; little-endian) and its payload. Token ids travel
as uint32 behind their lengths, vectors as raw float32 rows behind the nanoseconds and the peak bytes that
they took and the bytes that the allocator keeps (0: not measured), everything else as UTF-8 text or JSON.
The worker's first frame is READY or LOAD_FAILED. Each BATCH is answered once, by VECTORS, OUT_OF_MEMORY or
FAILED; each PING by PONG, and so each RELEASE, when what was kept is given back; each TEXTS (a JSON list) by
TOKENS, packed like a batch, or empty when a text has no tokens to give. A worker that a batch has broken says
LEAVING before it answers that batch, and then ends.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.uint32]
Rows = npt.NDArray[np.float32]

HEADER = struct.Struct("<BIQ")
_COST = struct.Struct("<QQQ")


class FrameKind(IntEnum):
    READY = 1
    LOAD_FAILED = 2
    BATCH = 3
    VECTORS = 4
    OUT_OF_MEMORY = 5
    FAILED = 6
    PING = 7
    PONG = 8
    TEXTS = 9
    TOKENS = 10
    RELEASE = 11
    LEAVING = 12


REQUEST_KIND = {
    FrameKind.READY: FrameKind.READY,
    FrameKind.LOAD_FAILED: FrameKind.READY,
    FrameKind.VECTORS: FrameKind.BATCH,
    FrameKind.OUT_OF_MEMORY: FrameKind.BATCH,
    FrameKind.FAILED: FrameKind.BATCH,
    FrameKind.PONG: FrameKind.PING,
    FrameKind.TOKENS: FrameKind.TEXTS,
}
"""What each frame of the worker's is the answer to; LEAVING is none."""


@dataclass(frozen=True, slots=True)
class Frame:
    kind: FrameKind
    batch: int
    payload: bytes

    def pack(self) -> bytes:
        return HEADER.pack(self.kind, self.batch, len(self.payload)) + self.payload


def unpack_header(head: bytes) -> tuple[FrameKind, int, int]:
    """(kind, batch number, payload bytes). Raises ValueError for an unknown kind."""
    kind, batch, size = HEADER.unpack(head)
    return FrameKind(kind), batch, size


def pack_inputs(inputs: Sequence[Ids]) -> bytes:
    count = np.array([len(inputs), *map(len, inputs)], dtype="<u4")
    return b"".join((count.tobytes(), *(ids.astype("<u4", copy=False).tobytes() for ids in inputs)))


def unpack_inputs(payload: bytes) -> tuple[Ids, Ids]:
    """(lengths [inputs], the ids of all inputs one after the other)."""
    words = np.frombuffer(payload, dtype="<u4")
    first = 1 + int(words[0])
    return words[1:first], words[first:]


@dataclass(frozen=True, slots=True)
class PassResult:
    rows: Rows
    elapsed_ns: int
    peak_bytes: int
    reserved_bytes: int = 0

    def pack(self) -> bytes:
        cost = _COST.pack(self.elapsed_ns, self.peak_bytes, self.reserved_bytes)
        return cost + self.rows.astype("<f4", copy=False).tobytes()

    @classmethod
    def unpack(cls, payload: bytes, dimension: int) -> "PassResult":
        rows = np.frombuffer(payload, dtype="<f4", offset=_COST.size).reshape(-1, dimension)
        return cls(rows, *_COST.unpack_from(payload))
