"""Bloom filter of the block hashes in a model's prefix cache; it holds no text (Bloom 1970).

A router that hashes a prompt's blocks as the box does (`controlplane.core.prefix_index.block_hashes`) finds
how many leading tokens the box has. A false positive makes a forecast too short, and costs no more than that.
"""

import base64
import binascii
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

_PROBES = 4
_BITS_PER_BLOCK = 10
_MIN_BITS = 1_024
_MAX_BITS = 8 * 64 * 1_024
_MULTIPLIERS = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], np.uint64
)
"""Odd constants of multiplicative hashing (xxHash, SplitMix64), one for each probe."""


@dataclass(frozen=True, slots=True)
class PrefixDigest:
    """Approximate set of block hashes; `bits` is a power of two of bits, packed, at most 64 KiB."""

    block_tokens: int
    bits: bytes

    @classmethod
    def of(cls, blocks: Iterable[int], block_tokens: int) -> Self:
        """Digest of these block hashes, with about 1 % false positives up to 52,000 blocks."""
        hashes = _unsigned(blocks)
        wanted = min(_MAX_BITS, max(_MIN_BITS, _BITS_PER_BLOCK * len(hashes)))
        size = 1 << (wanted - 1).bit_length()
        marks = np.zeros(size, np.uint8)
        marks[_places(hashes, size).ravel()] = 1
        return cls(block_tokens, np.packbits(marks).tobytes())

    def cached_tokens(self, blocks: Sequence[int]) -> int:
        """Tokens of the leading blocks that are in the set.

        What holds for a block holds for those before it.
        """
        if not blocks:
            return 0
        found = self._has(blocks)
        return bisect_left(range(len(blocks)), True, key=lambda at: not found[at]) * self.block_tokens

    def _has(self, blocks: Sequence[int]) -> list[bool]:
        packed = np.frombuffer(self.bits, np.uint8)
        places = _places(_unsigned(blocks), 8 * len(packed))
        is_set = packed[places >> np.uint64(3)] >> (7 - (places & np.uint64(7))).astype(np.uint8) & 1
        marked: list[bool] = is_set.all(axis=1).tolist()
        return marked

    def to_json(self) -> dict[str, object]:
        """JSON with the bits in base64."""
        return {"block_tokens": self.block_tokens, "bits": base64.b64encode(self.bits).decode("ascii")}

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Reverse of `to_json`. Raises ValueError."""
        match value:
            case {"block_tokens": int(block_tokens), "bits": str(text)} if block_tokens > 0:
                try:
                    bits = base64.b64decode(text, validate=True)
                except (binascii.Error, ValueError) as error:
                    raise ValueError(f"bits: {error}; send base64") from None
                if len(bits) & (len(bits) - 1) or not _MIN_BITS <= 8 * len(bits) <= _MAX_BITS:
                    raise ValueError(
                        f"bits: {len(bits)} bytes; send a power of two from {_MIN_BITS // 8} to "
                        f"{_MAX_BITS // 8}"
                    )
                return cls(block_tokens, bits)
        raise ValueError("send an object with block_tokens, a positive integer, and bits")


def _unsigned(blocks: Iterable[int]) -> npt.NDArray[np.uint64]:
    return np.array([block & 0xFFFFFFFFFFFFFFFF for block in blocks], np.uint64)


def _places(hashes: npt.NDArray[np.uint64], size: int) -> npt.NDArray[np.uint64]:
    """Bit of each hash (rows) and probe (columns), by the high bits of a product modulo 2**64."""
    shift = np.uint64(64 - (size - 1).bit_length())
    mixed = (hashes ^ (hashes >> np.uint64(32)))[:, None] * _MULTIPLIERS[None, :]
    found: npt.NDArray[np.uint64] = mixed >> shift
    return found
