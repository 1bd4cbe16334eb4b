"""Length-prefixed frames between server and embedding worker over one socket pair.

A frame is a little-endian header (kind, number, payload bytes) and a payload. Token ids are uint32 after a
table of their lengths. Vectors are float32 rows after the pass's nanoseconds, peak bytes and reserved
bytes (0: not measured). All other payloads are UTF-8 text or JSON.

The worker sends MEASURING once its model is loaded, then READY; or LOAD_FAILED. Each BATCH gets one response:
VECTORS, OUT_OF_MEMORY or FAILED. PING gets PONG with the reserved bytes; so does RELEASE, after cached
memory was released. TEXTS (a JSON list) gets TOKENS, packed like a batch, or empty if a text cannot be
tokenized. A worker that a batch has broken sends LEAVING, then the response to that batch, and exits.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.uint32]
Rows = npt.NDArray[np.float32]

# At 1,000 passes a second, numbers of 32 bits would run out after 50 days.
HEADER = struct.Struct("<BQQ")
_COST = struct.Struct("<QQQ")


class FrameKind(IntEnum):
    """Kinds of frames; the values are part of the wire format."""

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
    MEASURING = 13


REQUEST_KIND = {
    FrameKind.READY: FrameKind.READY,
    FrameKind.LOAD_FAILED: FrameKind.READY,
    FrameKind.VECTORS: FrameKind.BATCH,
    FrameKind.OUT_OF_MEMORY: FrameKind.BATCH,
    FrameKind.FAILED: FrameKind.BATCH,
    FrameKind.PONG: FrameKind.PING,
    FrameKind.TOKENS: FrameKind.TEXTS,
}
"""The request kind that each frame of the worker responds to; LEAVING and MEASURING respond to none."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message; a response has the `number` of its request."""

    kind: FrameKind
    number: int
    payload: bytes

    def pack(self) -> bytes:
        """Serializes header and payload."""
        return HEADER.pack(self.kind, self.number, len(self.payload)) + self.payload


def unpack_header(head: bytes) -> tuple[FrameKind, int, int]:
    """Returns (kind, number, payload bytes). Raises ValueError for an unknown kind."""
    kind, number, size = HEADER.unpack(head)
    return FrameKind(kind), number, size


def pack_inputs(inputs: Sequence[Ids]) -> bytes:
    """Serializes token ids, input by input."""
    count = np.array([len(inputs), *map(len, inputs)], dtype="<u4")
    return b"".join((count.tobytes(), *(ids.astype("<u4", copy=False).tobytes() for ids in inputs)))


def unpack_inputs(payload: bytes) -> tuple[Ids, Ids]:
    """Returns (lengths [inputs], ids of all inputs concatenated)."""
    words = np.frombuffer(payload, dtype="<u4")
    first = 1 + int(words[0])
    return words[1:first], words[first:]


@dataclass(frozen=True, slots=True)
class PassResult:
    """Vectors of one pass, with its duration and memory."""

    rows: Rows
    elapsed_ns: int
    peak_bytes: int
    reserved_bytes: int = 0

    def pack(self) -> bytes:
        """Serializes the payload of a VECTORS frame."""
        cost = _COST.pack(self.elapsed_ns, self.peak_bytes, self.reserved_bytes)
        return cost + self.rows.astype("<f4", copy=False).tobytes()

    @classmethod
    def unpack(cls, payload: bytes, dimension: int) -> "PassResult":
        """Parses the output of `pack`; rows have `dimension` columns."""
        rows = np.frombuffer(payload, dtype="<f4", offset=_COST.size).reshape(-1, dimension)
        return cls(rows, *_COST.unpack_from(payload))
