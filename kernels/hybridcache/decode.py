"""How is a request that kept only hidden states attended? Three ways to decode it, all to the same answer.

- `restored` (M0, Apt-Serve's): restore keys and values at every step, then attend as ever.
- `value_absorbed` (M1): restore keys only; values are linear, so rows are mixed first and projected once.
- `absorbed` (M2): without rotation keys are affine as well. q.(W x + b) = (W'q).x + q.b, and q.b, the same
  for every token, falls out of the softmax: nothing is restored.

`restored_tokens` are a whole request's keys and values: for one that reads several tokens at once, or that
changes to the plain cache.
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
    """Attention of queries `[requests, heads, head_dim]`, after rotation. Restores into memory of its own."""
    requests, block_tokens = len(held.lengths), hidden.shape[1]
    # As long as those read, because a kernel is compiled anew for every length that it meets.
    blocks = -(-held.longest // block_tokens)
    tables = torch.arange(requests * blocks, dtype=torch.int32, device=hidden.device).view(requests, blocks)
    shape = (requests * blocks, block_tokens, *query.shape[1:])
    keys, values = hidden.new_empty(shape), hidden.new_empty(shape)
    ops.restore(hidden, held, projection, rotary, keys, values, tables)
    return ops.paged_decode(query, keys, values, HeldTokens(tables, held.lengths, held.longest), scale)


def restored_tokens(
    hidden: torch.Tensor, held: HeldTokens, projection: Projection, rotary: Rotary | None, *, heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one request, `[tokens, heads, head_dim]`, which may then be written over the rows
    that they come from. Rows are gathered first: so long a product is best left to the library."""
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
    """As `restored`, without restoring values."""
    scores = ops.rotated_scores(query, hidden, held, projection, rotary, scale)
    return _attended(scores, hidden, held, projection, query.shape[2])


def absorbed(
    query: torch.Tensor, hidden: torch.Tensor, held: HeldTokens, projection: Projection, scale: float
) -> torch.Tensor:
    """As `restored`, for models that do not rotate their keys."""
    _, heads, head_dim = query.shape
    weight = projection.key_weight.view(heads, head_dim, -1)
    absorbing = torch.bmm((query * scale).transpose(0, 1), weight).transpose(0, 1)
    return _attended(ops.hidden_scores(absorbing, hidden, held), hidden, held, projection, head_dim)


def _attended(
    scores: torch.Tensor, hidden: torch.Tensor, held: HeldTokens, projection: Projection, head_dim: int
) -> torch.Tensor:
    """From scores to answers `[requests, heads, head_dim]`: weights sum to one, so the bias is added once."""
    # A request of no tokens has only scores of minus infinity.
    weights = torch.softmax(scores, -1).nan_to_num_(0.0).to(hidden.dtype)
    mixed = ops.mix_rows(weights, hidden, held)
    heads = scores.shape[1]
    value_weight = projection.value_weight.view(heads, head_dim, -1)
    answer = torch.bmm(mixed.transpose(0, 1), value_weight.transpose(1, 2)).transpose(0, 1)
    if projection.value_bias is not None:
        some = (held.lengths > 0)[:, None, None]
        answer = answer + projection.value_bias.view(heads, head_dim) * some
    return answer
