"""The last preemptions by the scheduler: the victim, the request that its blocks are for, and the cost."""

import struct
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from backends.vllm.plugin.request_metadata import EngineRequest

_ROW = struct.Struct("=qQQI")
ROW_SIZE = _ROW.size
KEPT = 64
"""Rows that are kept. The server reads them at each arrival and at each end of a request."""


class PreemptionRow(NamedTuple):
    """One preemption.

    Attributes:
        at_ns: time on the host's monotonic clock.
        victim: key of the request that lost its blocks (`shared_state.key_of`).
        beneficiary: key of the request that is to start in its place; 0: running requests need the blocks.
        tokens: tokens whose KV entries were freed.
    """

    at_ns: int
    victim: int
    beneficiary: int
    tokens: int


class PreemptionLog:
    """Counts preemptions and their tokens since the start, and keeps the last rows.

    Attributes:
        count: preemptions.
        tokens: tokens whose KV entries they freed.
        packed: the last rows, the oldest first.
        beneficiary: the request that the next preemption is for; None: running requests.
    """

    def __init__(self) -> None:
        self.count = self.tokens = 0
        self.packed = b""
        self.beneficiary: EngineRequest | None = None
        self._rows: deque[bytes] = deque(maxlen=KEPT)

    def add(self, request: Any, at_ns: int) -> None:
        """Adds the preemption of vLLM's `request`, which still has its computed tokens."""
        tokens = max(0, request.num_computed_tokens - request.tandem.cached)
        beneficiary, self.beneficiary = self.beneficiary, None
        key = 0 if beneficiary is None else beneficiary.key
        self.count += 1
        self.tokens += tokens
        self._rows.append(_ROW.pack(at_ns, request.tandem.key, key, tokens))
        self.packed = b"".join(self._rows)


def unpacked(rows: bytes) -> Iterator[PreemptionRow]:
    """The rows of `PreemptionLog.packed`."""
    return map(PreemptionRow._make, _ROW.iter_unpack(rows))
