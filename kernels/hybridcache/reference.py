"""Reference implementation of each operation in plain torch, one request after another.

Products are summed in float32 and results are rounded once to the cache's dtype. A request without tokens
reads and writes nothing, and its result is zero.
"""

import torch
from torch.nn.functional import linear, pad

from hybridcache.layout import HeldTokens, Projection, Rotary


def scatter_rows(rows: torch.Tensor, slots: torch.Tensor, hidden: torch.Tensor) -> None:
    """Writes row t to slot `slots[t]`, numbered across all blocks; a negative slot drops the row."""
    kept = slots >= 0
    per_block = hidden.shape[1]
    hidden[slots[kept] // per_block, slots[kept] % per_block] = rows[kept]


def gather_rows(hidden: torch.Tensor, held: HeldTokens, starts: torch.Tensor, out: torch.Tensor) -> None:
    """Copies the rows of request r to `out[starts[r] : starts[r] + lengths[r]]`."""
    for request, start in enumerate(starts.tolist()):
        rows = _tokens_of(hidden, held, request)
        out[start : start + len(rows)] = rows


def restore(
    hidden: torch.Tensor,
    held: HeldTokens,
    projection: Projection,
    rotary: Rotary | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
) -> None:
    """Computes keys and values of all held tokens and writes them to the blocks of `tables`.

    A row's position is its index in the request. Keys are rounded to the cache's dtype before rotation, like
    keys that are computed from a prompt.
    """
    block_tokens = keys.shape[1]
    for request in range(len(held.lengths)):
        rows = _tokens_of(hidden, held, request)
        position = torch.arange(len(rows), device=rows.device)
        block = tables[request, position // block_tokens].long()
        shape = (len(rows), *keys.shape[2:])
        key = linear(rows, projection.key_weight, projection.key_bias).view(shape)
        keys[block, position % block_tokens] = rotated(key, rotary)
        value = linear(rows, projection.value_weight, projection.value_bias)
        values[block, position % block_tokens] = value.view(shape)


def paged_decode(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, held: HeldTokens, scale: float
) -> torch.Tensor:
    """Attention of one query per request, `[requests, heads, head_dim]`, over its keys and values."""
    output = torch.zeros_like(query)
    for request, length in enumerate(held.lengths.tolist()):
        if length:
            key = _tokens_of(keys, held, request).float()
            value = _tokens_of(values, held, request).float()
            scores = torch.einsum("he,nhe->hn", query[request].float(), key) * scale
            output[request] = torch.einsum("hn,nhe->he", scores.softmax(-1), value).to(query.dtype)
    return output


def hidden_scores(absorbed: torch.Tensor, hidden: torch.Tensor, held: HeldTokens) -> torch.Tensor:
    """Products of absorbed queries `[requests, heads, hidden_size]` with the rows.

    Returns float32 `[requests, heads, longest]`, minus infinity after a request's last token.
    """
    scores = [
        absorbed[request].float() @ _tokens_of(hidden, held, request).float().T
        for request in range(len(held.lengths))
    ]
    return _padded(scores, held.longest)


def rotated_scores(
    query: torch.Tensor,
    hidden: torch.Tensor,
    held: HeldTokens,
    projection: Projection,
    rotary: Rotary | None,
    scale: float,
) -> torch.Tensor:
    """Scores of rotated queries `[requests, heads, head_dim]` with keys restored from the rows.

    Returns the same shape as `hidden_scores`.
    """
    scores = []
    for request in range(len(held.lengths)):
        rows = _tokens_of(hidden, held, request)
        key = linear(rows, projection.key_weight, projection.key_bias).view(len(rows), *query.shape[1:])
        key = rotated(key, rotary).float()
        scores.append(torch.einsum("he,nhe->hn", query[request].float(), key) * scale)
    return _padded(scores, held.longest)


def mix_rows(weights: torch.Tensor, hidden: torch.Tensor, held: HeldTokens) -> torch.Tensor:
    """Sums of rows weighted by `[requests, heads, longest]`; returns `[requests, heads, hidden_size]`."""
    mixed = []
    for request, length in enumerate(held.lengths.tolist()):
        rows = _tokens_of(hidden, held, request).float()
        mixed.append(weights[request, :, :length].float() @ rows)
    return torch.stack(mixed).to(hidden.dtype)


def rotated(keys: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
    """Rotates keys `[tokens, heads, head_dim]` at positions 0, 1, ..."""
    if rotary is None:
        return keys
    half = rotary.cos.shape[1]
    cos, sin = rotary.cos[: len(keys), None], rotary.sin[: len(keys), None]
    first, second = keys[..., :half].float(), keys[..., half : 2 * half].float()
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat([part.to(keys.dtype) for part in rotated] + [keys[..., 2 * half :]], -1)


def _tokens_of(blocks: torch.Tensor, held: HeldTokens, request: int) -> torch.Tensor:
    """The request's tokens `[length, ...]` of blocks `[blocks, tokens, ...]`."""
    length = int(held.lengths[request])
    used = -(-length // blocks.shape[1])
    return blocks[held.tables[request, :used].long()].flatten(0, 1)[:length]


def _padded(scores: list[torch.Tensor], longest: int) -> torch.Tensor:
    return torch.stack([pad(score, (0, longest - score.shape[1]), value=float("-inf")) for score in scores])
