"""Decode attention over hidden states, in three variants with the same result.

- `restored` (M0, as in Apt-Serve): restores keys and values in every step, then attends as usual.
- `value_absorbed` (M1): restores only keys; values are linear in the rows, so rows are mixed first and the
  mixture is projected once.
- `absorbed` (M2): restores nothing. Without rotation keys are affine in the rows:
  q.(W x + b) = (W'q).x + q.b, and q.b is the same for every token, so the softmax cancels it.

`restored_tokens` computes all keys and values of one request, for a step with several new tokens and for the
change to the plain cache.
"""

import torch
from torch.nn.functional import linear

from hybridcache import ops
from hybridcache.layout import HeldTokens, Projection, Rotary
from hybridcache.reference import rotated


def restored(
    query: torch.Tensor,
    hidden: torch.Tensor,
    held: HeldTokens,
    projection: Projection,
    rotary: Rotary | None,
    scale: float,
) -> torch.Tensor:
    """Attention of rotated queries `[requests, heads, head_dim]` over keys and values in temporary memory."""
    requests, block_tokens = len(held.lengths), hidden.shape[1]
    # Blocks as long as those that are read, because Triton compiles a kernel for each block length.
    blocks = -(-held.longest // block_tokens)
    tables = torch.arange(requests * blocks, dtype=torch.int32, device=hidden.device).view(requests, blocks)
    shape = (requests * blocks, block_tokens, *query.shape[1:])
    keys, values = hidden.new_empty(shape), hidden.new_empty(shape)
    ops.restore(hidden, held, projection, rotary, keys, values, tables)
    return ops.paged_decode(query, keys, values, HeldTokens(tables, held.lengths, held.longest), scale)


def restored_tokens(
    hidden: torch.Tensor, held: HeldTokens, projection: Projection, rotary: Rotary | None, *, heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one request, `[tokens, heads, head_dim]`.

    They may be written over the rows they come from. The rows are gathered first, because a product of this
    size is best left to the BLAS library.
    """
    rows = hidden.new_empty((held.longest, hidden.shape[2]))
    ops.gather_rows(hidden, held, torch.zeros_like(held.lengths), rows)
    shape = (len(rows), heads, len(projection.key_weight) // heads)
    keys = linear(rows, projection.key_weight, projection.key_bias).view(shape)
    values = linear(rows, projection.value_weight, projection.value_bias).view(shape)
    return rotated(keys, rotary), values


def value_absorbed(
    query: torch.Tensor,
    hidden: torch.Tensor,
    held: HeldTokens,
    projection: Projection,
    rotary: Rotary | None,
    scale: float,
) -> torch.Tensor:
    """Attention of rotated queries `[requests, heads, head_dim]`, restoring only keys."""
    scores = ops.rotated_scores(query, hidden, held, projection, rotary, scale)
    return _attended(scores, hidden, held, projection, query.shape[2])


def absorbed(
    query: torch.Tensor, hidden: torch.Tensor, held: HeldTokens, projection: Projection, scale: float
) -> torch.Tensor:
    """Attention of queries `[requests, heads, head_dim]` of models that do not rotate keys."""
    _, heads, head_dim = query.shape
    weight = projection.key_weight.view(heads, head_dim, -1)
    absorbed_query = torch.bmm((query * scale).transpose(0, 1), weight).transpose(0, 1)
    return _attended(ops.hidden_scores(absorbed_query, hidden, held), hidden, held, projection, head_dim)


def _attended(
    scores: torch.Tensor, hidden: torch.Tensor, held: HeldTokens, projection: Projection, head_dim: int
) -> torch.Tensor:
    """Attention output `[requests, heads, head_dim]`; weights sum to 1, so the bias is added once."""
    # The softmax of a request without tokens is NaN.
    weights = torch.softmax(scores, -1).nan_to_num_(0.0).to(hidden.dtype)
    mixed = ops.mix_rows(weights, hidden, held)
    heads = scores.shape[1]
    value_weight = projection.value_weight.view(heads, head_dim, -1)
    output = torch.bmm(mixed.transpose(0, 1), value_weight.transpose(1, 2)).transpose(0, 1)
    if projection.value_bias is not None:
        some = (held.lengths > 0)[:, None, None]
        output = output + projection.value_bias.view(heads, head_dim) * some
    return output
