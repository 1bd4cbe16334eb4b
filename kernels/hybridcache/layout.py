"""Memory layout of a block as rows of hidden states, and the argument types of the operations."""

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Layout of a block's `2 * block_tokens * kv_heads * head_dim` elements as rows of `hidden_size`."""

    block_tokens: int
    kv_heads: int
    head_dim: int
    hidden_size: int

    @property
    def rows_per_block(self) -> int:
        """Rows of hidden states that fit into a block."""
        return 2 * self.block_tokens * self.kv_heads * self.head_dim // self.hidden_size

    def hidden_rows(self, blocks: torch.Tensor) -> torch.Tensor:
        """A view of cache memory `[blocks, ...]` as `[blocks, rows_per_block, hidden_size]`.

        The other dimensions may be in any order. Raises ValueError if a block has another number of elements
        or is not contiguous.
        """
        elements = 2 * self.block_tokens * self.kv_heads * self.head_dim
        block = blocks[0]
        as_it_lies = sorted(range(block.dim()), key=block.stride, reverse=True)
        if block.numel() != elements or not block.permute(as_it_lies).is_contiguous():
            raise ValueError(
                f"blocks of shape {tuple(blocks.shape)} and strides {blocks.stride()}: each must be "
                f"{elements} elements without gaps; pass one layer's cache with the block dimension first"
            )
        return blocks.as_strided(
            (blocks.shape[0], self.rows_per_block, self.hidden_size),
            (blocks.stride(0), self.hidden_size, 1),
            blocks.storage_offset(),
        )


@dataclass(frozen=True, slots=True)
class HeldTokens:
    """Block tables and lengths of some requests.

    Attributes:
        tables: int32 `[requests, blocks]`, physical block numbers in logical order.
        lengths: int32 `[requests]`, tokens.
        longest: upper bound of the lengths, on the host, so that a launch need not synchronise with the
            device.
    """

    tables: torch.Tensor
    lengths: torch.Tensor
    longest: int


class Projection(NamedTuple):
    """Projections of a layer: weights `[heads * head_dim, hidden_size]`, biases `[heads * head_dim]`."""

    key_weight: torch.Tensor
    value_weight: torch.Tensor
    key_bias: torch.Tensor | None = None
    value_bias: torch.Tensor | None = None


class Rotary(NamedTuple):
    """Rotary angles, float32 `[positions, rotated / 2]`.

    Dimension i is paired with i + rotated / 2 (GPT-NeoX order); dimensions from `rotated` on are not rotated.
    """

    cos: torch.Tensor
    sin: torch.Tensor
