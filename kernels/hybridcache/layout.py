"""What does a block hold, and may this model keep hidden states at all?"""

from dataclasses import dataclass
from typing import NamedTuple

import torch


class NotWorthwhileError(ValueError):
    """Hidden states would take no less memory than keys and values."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """A block's `2 * block_tokens * kv_heads * head_dim` elements, read as rows of `hidden_size`."""

    block_tokens: int
    kv_heads: int
    head_dim: int
    hidden_size: int

    @property
    def ratio(self) -> float:
        """Memory of a token's hidden state over that of its keys and values; h in Apt-Serve."""
        return self.hidden_size / (2 * self.kv_heads * self.head_dim)

    @property
    def rows_per_block(self) -> int:
        return 2 * self.block_tokens * self.kv_heads * self.head_dim // self.hidden_size

    def check(self) -> None:
        """Raises NotWorthwhileError."""
        if self.rows_per_block <= self.block_tokens:
            raise NotWorthwhileError(
                f"hidden_size={self.hidden_size}, kv_heads={self.kv_heads}, head_dim={self.head_dim}: a "
                f"hidden state takes h={self.ratio:g} times the memory of its keys and values; keep "
                "the plain KV cache for this model"
            )

    def hidden_rows(self, blocks: torch.Tensor) -> torch.Tensor:
        """The memory of `[blocks, ...]`, in whatever order its dimensions lie, as `[blocks, rows_per_block,
        hidden_size]`. Raises ValueError for blocks of other elements or with gaps."""
        elements = 2 * self.block_tokens * self.kv_heads * self.head_dim
        block = blocks[0]
        as_it_lies = sorted(range(block.dim()), key=block.stride, reverse=True)
        if block.numel() != elements or not block.permute(as_it_lies).is_contiguous():
            raise ValueError(
                f"blocks of shape {tuple(blocks.shape)} and strides {blocks.stride()}: each must be "
                f"{elements} elements without gaps; give one layer's cache, its first dimension the block"
            )
        return blocks.as_strided(
            (blocks.shape[0], self.rows_per_block, self.hidden_size),
            (blocks.stride(0), self.hidden_size, 1),
            blocks.storage_offset(),
        )


@dataclass(frozen=True, slots=True)
class HeldTokens:
    """Where the tokens of some requests lie.

    `tables` is int32 `[requests, blocks]`, physical blocks in logical order; `lengths` int32 `[requests]`,
    tokens; `longest` bounds the lengths and lives on the host, so that no launch waits for the device.
    """

    tables: torch.Tensor
    lengths: torch.Tensor
    longest: int


class Projection(NamedTuple):
    """Of one layer: weights `[heads * head_dim, hidden_size]`, biases `[heads * head_dim]`."""

    key_weight: torch.Tensor
    value_weight: torch.Tensor
    key_bias: torch.Tensor | None = None
    value_bias: torch.Tensor | None = None


class Rotary(NamedTuple):
    """float32 `[positions, rotated / 2]`; dimension i turns with i + rotated / 2 (GPT-NeoX order), and those
    from `rotated` on stay as they are."""

    cos: torch.Tensor
    sin: torch.Tensor
