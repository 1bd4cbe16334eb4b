"""Requests with hidden states scattered over one layer's blocks, and the expected attention output."""

from dataclasses import dataclass

import torch
from hybridcache import ops
from hybridcache.layout import BlockLayout, HeldTokens, Projection, Rotary
from torch.nn.functional import linear, scaled_dot_product_attention

GAPS = 4


@dataclass(frozen=True)
class Case:
    """`rows[r]` are the hidden states of request r, `hidden` the blocks they were scattered to."""

    layout: BlockLayout
    blocks: torch.Tensor
    hidden: torch.Tensor
    rows: list[torch.Tensor]
    held: HeldTokens
    projection: Projection
    rotary: Rotary | None
    query: torch.Tensor
    scale: float

    def keys_and_values(self):
        """The same memory as `[blocks, tokens, heads, head_dim]`, in vLLM's memory order."""
        halves = self.blocks.unflatten(-1, (2, self.layout.head_dim))
        keys, values = halves.unbind(-2)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def plain(self):
        """Keys, values `[tokens, heads, head_dim]` and attention output of each request."""
        shape = (self.layout.kv_heads, self.layout.head_dim)
        for rows, query in zip(self.rows, self.query, strict=True):
            key = linear(rows, self.projection.key_weight, self.projection.key_bias).view(-1, *shape)
            value = linear(rows, self.projection.value_weight, self.projection.value_bias).view(-1, *shape)
            if self.rotary is not None:
                key = rotate(key, self.rotary)
            per_head = [part.transpose(0, 1).float() for part in (key, value)]
            found = scaled_dot_product_attention(query[:, None].float(), *per_head, scale=self.scale)
            yield key, value, found[:, 0].nan_to_num(0.0)


def rotate(keys, rotary):
    """Rotates with complex numbers, unlike the code under test."""
    half = rotary.cos.shape[1]
    turned = keys.float()
    pairs = torch.complex(turned[..., :half], turned[..., half : 2 * half])
    pairs = pairs * torch.complex(rotary.cos, rotary.sin)[: len(keys), None]
    turned = torch.cat([pairs.real, pairs.imag, turned[..., 2 * half :]], -1)
    return turned.to(keys.dtype)


def a_case(
    lengths, *, heads=4, head_dim=32, block_tokens=8, hidden_size=None, rotated=0, bias=True,
    dtype=torch.float32, device="cpu", seed=0,
):  # fmt: skip
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape, by=1.0):
        return (torch.randn(*shape, generator=draw) * by).to(device, dtype)

    layout = BlockLayout(block_tokens, heads, head_dim, hidden_size or heads * head_dim)
    per_block, width = layout.rows_per_block, layout.hidden_size
    most = max(1, -(-max(lengths) // per_block))
    count = len(lengths) * most + GAPS * len(lengths)
    order = torch.randperm(count, generator=draw).to(device, torch.int32)
    tables = order[: len(lengths) * most].view(len(lengths), most)
    # Two layers in one buffer, so that a block's stride exceeds its size.
    buffer = normal(count, 2, heads, block_tokens, 2 * head_dim)
    blocks = buffer[:, 1]
    hidden = layout.hidden_rows(blocks)
    rows = [normal(length, width) for length in lengths]
    for table, own in zip(tables, rows, strict=True):
        token = torch.arange(len(own), device=device)
        ops.scatter_rows(own, table[token // per_block].long() * per_block + token % per_block, hidden)
    lines = heads * head_dim
    weights = [normal(lines, width, by=width**-0.5) for _ in range(2)]
    biases = [normal(lines, by=0.5) for _ in range(2)] if bias else [None, None]
    rotary = None
    if rotated:
        speed = 10_000.0 ** (-torch.arange(rotated // 2) / (rotated // 2))
        angle = torch.arange(max(lengths) + 1)[:, None] * speed
        rotary = Rotary(angle.cos().to(device), angle.sin().to(device))
    return Case(
        layout=layout,
        blocks=blocks,
        hidden=hidden,
        rows=rows,
        held=HeldTokens(tables, torch.tensor(lengths, dtype=torch.int32, device=device), max(lengths)),
        projection=Projection(*weights, *biases),
        rotary=rotary,
        query=normal(len(lengths), heads, head_dim),
        scale=head_dim**-0.5,
    )
