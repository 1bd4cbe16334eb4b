"""How is a request that kept only hidden states decoded? Three ways to the same answer, and the way back.

- `restored` (M0, Apt-Serve's): restore keys and values at every step, then attend as ever.
- `value_absorbed` (M1): restore keys only; values are linear, so rows are mixed first and projected once.
- `absorbed` (M2): without rotation keys are affine as well. q.(W x + b) = (W'q).x + q.b, and q.b, the same
  for every token, falls out of the softmax: nothing is restored.

`convert` rewrites hidden rows as keys and values, once, for a request that changes to the plain cache.
"""

import torch

from hybridcache import ops
from hybridcache.layout import Held, Projection, Rotary


def restored(
    query: torch.Tensor,
    hidden: torch.Tensor,
    held: Held,
    projection: Projection,
    rotary: Rotary | None,
    scale: float,
) -> torch.Tensor:
    """Attention of queries `[requests, heads, head_dim]`, after rotation. Restores into memory of its own."""
    keys, values, tables = _restored_blocks(hidden, held, projection, rotary, query.shape[1])
    return ops.paged_decode(query, keys, values, Held(tables, held.lengths, held.longest), scale)


def restored_tokens(
    hidden: torch.Tensor, held: Held, projection: Projection, rotary: Rotary | None, *, heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all held tokens, `[requests, longest, heads, head_dim]`; undefined behind each last
    token."""
    keys, values, tables = _restored_blocks(hidden, held, projection, rotary, heads)
    shape = (len(tables), tables.shape[1] * keys.shape[1], *keys.shape[2:])
    return keys.view(shape)[:, : held.longest], values.view(shape)[:, : held.longest]


def _restored_blocks(
    hidden: torch.Tensor, held: Held, projection: Projection, rotary: Rotary | None, heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks of keys, of values, and their tables, each request's in a line. Blocks are as long as those
    read, because a kernel is compiled anew for every length that it meets."""
    requests, block_tokens = len(held.lengths), hidden.shape[1]
    blocks = -(-held.longest // block_tokens)
    tables = torch.arange(requests * blocks, dtype=torch.int32, device=hidden.device).view(requests, blocks)
    shape = (requests * blocks, block_tokens, heads, len(projection.key_weight) // heads)
    keys, values = hidden.new_empty(shape), hidden.new_empty(shape)
    ops.restore(hidden, held, projection, rotary, keys, values, tables)
    return keys, values, tables


def value_absorbed(
    query: torch.Tensor,
    hidden: torch.Tensor,
    held: Held,
    projection: Projection,
    rotary: Rotary | None,
    scale: float,
) -> torch.Tensor:
    """As `restored`, without restoring values."""
    scores = ops.rotated_scores(query, hidden, held, projection, rotary, scale)
    return _attended(scores, hidden, held, projection, query.shape[2])


def absorbed(
    query: torch.Tensor, hidden: torch.Tensor, held: Held, projection: Projection, scale: float
) -> torch.Tensor:
    """As `restored`, for models that do not rotate their keys."""
    _, heads, head_dim = query.shape
    weight = projection.key_weight.view(heads, head_dim, -1)
    turned = torch.bmm((query * scale).transpose(0, 1), weight).transpose(0, 1)
    return _attended(ops.hidden_scores(turned, hidden, held), hidden, held, projection, head_dim)


def convert(
    hidden: torch.Tensor,
    held: Held,
    projection: Projection,
    rotary: Rotary | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
) -> None:
    """Hidden rows to keys and values in blocks `tables`, any of which may be blocks that are read: rows are
    copied out before anything is written."""
    requests, width = len(held.lengths), hidden.shape[2]
    rows = hidden.new_empty((requests * held.longest, width))
    starts = torch.arange(requests, dtype=torch.int32, device=hidden.device) * held.longest
    ops.gather_rows(hidden, held, starts, rows)
    # Rows that lie in a line are blocks of one.
    line = torch.arange(len(rows), dtype=torch.int32, device=hidden.device).view(requests, held.longest)
    copied = Held(line, held.lengths, held.longest)
    ops.restore(rows.unsqueeze(1), copied, projection, rotary, keys, values, tables)


def _attended(
    scores: torch.Tensor, hidden: torch.Tensor, held: Held, projection: Projection, head_dim: int
) -> torch.Tensor:
    """From scores to answers `[requests, heads, head_dim]`: weights sum to one, so the bias is added once."""
    # A request of no tokens has only scores of minus infinity.
    weights = torch.softmax(scores, -1).nan_to_num(0.0).to(hidden.dtype)
    mixed = ops.mix_rows(weights, hidden, held)
    heads = scores.shape[1]
    value_weight = projection.value_weight.view(heads, head_dim, -1)
    answer = torch.bmm(mixed.transpose(0, 1), value_weight.transpose(1, 2)).transpose(0, 1)
    if projection.value_bias is not None:
        some = (held.lengths > 0)[:, None, None]
        answer = answer + projection.value_bias.view(heads, head_dim) * some
    return answer
