"""Public operations: check their arguments, then run Triton kernels on CUDA and `reference` elsewhere.

The kernels rely on strides and shapes, so all their assumptions are checked here as far as the host knows
them. Block numbers and lengths stay on the device unread.
"""

from types import ModuleType

import torch

from hybridcache import reference
from hybridcache.layout import HeldTokens, Projection, Rotary


def scatter_rows(rows: torch.Tensor, slots: torch.Tensor, hidden: torch.Tensor) -> None:
    """Writes row t of `[tokens, hidden_size]` to slot `slots[t]` of `hidden` `[blocks, rows, hidden_size]`.

    Slots are numbered across all blocks; a negative slot drops the row. Raises ValueError.
    """
    _check_hidden(hidden)
    _check_numbers("slots", slots, len(rows), hidden)
    _expect("rows", rows, (len(slots), hidden.shape[2]), hidden)
    _implementation(hidden).scatter_rows(rows, slots, hidden)


def gather_rows(hidden: torch.Tensor, held: HeldTokens, starts: torch.Tensor, out: torch.Tensor) -> None:
    """Copies the rows of request r to `out[starts[r] : starts[r] + lengths[r]]`. Raises ValueError."""
    _check_held(hidden, held)
    _check_numbers("starts", starts, len(held.lengths), hidden)
    _expect("out", out, (out.shape[0], hidden.shape[2]), hidden)
    _expect_stride("out", out, 0, hidden.shape[2])
    _implementation(hidden).gather_rows(hidden, held, starts, out)


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

    `keys` and `values` are `[blocks, tokens, heads, head_dim]`; blocks that are read must not be written.
    Raises ValueError.
    """
    _check_held(hidden, held)
    _check_projection(projection, rotary, hidden, keys.shape[2] * keys.shape[3], keys.shape[3], held)
    _check_cache("keys", keys, keys, hidden)
    _check_cache("values", values, keys, hidden)
    _check_tables("tables", tables, held, keys.shape[1], hidden)
    _implementation(hidden).restore(hidden, held, projection, rotary, keys, values, tables)


def paged_decode(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, held: HeldTokens, scale: float
) -> torch.Tensor:
    """Attention of one query per request, `[requests, heads, head_dim]`. Raises ValueError."""
    _check_cache("keys", keys, keys, query)
    _check_cache("values", values, keys, query)
    _check_tables("held.tables", held.tables, held, keys.shape[1], query)
    _check_query(query, (len(held.lengths), *keys.shape[2:]), keys)
    output: torch.Tensor = _implementation(query).paged_decode(query, keys, values, held, scale)
    return output


def hidden_scores(absorbed: torch.Tensor, hidden: torch.Tensor, held: HeldTokens) -> torch.Tensor:
    """Products of absorbed queries `[requests, heads, hidden_size]` with the rows.

    Returns float32 `[requests, heads, longest]`, minus infinity after the last token. Raises ValueError.
    """
    _check_held(hidden, held)
    _expect("absorbed", absorbed, (len(held.lengths), absorbed.shape[1], hidden.shape[2]), hidden)
    scores: torch.Tensor = _implementation(hidden).hidden_scores(absorbed, hidden, held)
    return scores


def rotated_scores(
    query: torch.Tensor,
    hidden: torch.Tensor,
    held: HeldTokens,
    projection: Projection,
    rotary: Rotary | None,
    scale: float,
) -> torch.Tensor:
    """Scores of rotated queries `[requests, heads, head_dim]`, in the shape of `hidden_scores`.

    Raises ValueError.
    """
    _check_held(hidden, held)
    heads, head_dim = query.shape[1:]
    _check_query(query, (len(held.lengths), heads, head_dim), hidden)
    _check_projection(projection, rotary, hidden, heads * head_dim, head_dim, held)
    chosen = _implementation(hidden)
    scores: torch.Tensor = chosen.rotated_scores(query, hidden, held, projection, rotary, scale)
    return scores


def mix_rows(weights: torch.Tensor, hidden: torch.Tensor, held: HeldTokens) -> torch.Tensor:
    """Sums of rows weighted by `[requests, heads, longest]`; returns `[requests, heads, hidden_size]`.

    Raises ValueError.
    """
    _check_held(hidden, held)
    _expect("weights", weights, (len(held.lengths), weights.shape[1], held.longest), hidden)
    if not weights.is_contiguous():
        raise ValueError(f"weights with strides {weights.stride()}: must be contiguous; call .contiguous()")
    mixed: torch.Tensor = _implementation(hidden).mix_rows(weights, hidden, held)
    return mixed


def _implementation(tensor: torch.Tensor) -> ModuleType:
    if not tensor.is_cuda:
        return reference
    # Imported only on CUDA, so that other machines need no Triton.
    from hybridcache import launch

    return launch


def _expect(name: str, found: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor) -> None:
    if found.shape != shape or found.dtype != like.dtype or found.device != like.device:
        raise ValueError(
            f"{name}: {tuple(found.shape)} of {found.dtype} on {found.device}, expected {shape} of "
            f"{like.dtype} on {like.device}; reshape, convert or move it"
        )
    _expect_stride(name, found, found.dim() - 1, 1)


def _expect_stride(name: str, found: torch.Tensor, dimension: int, stride: int) -> None:
    if found.shape[dimension] > 1 and found.stride(dimension) != stride:
        raise ValueError(
            f"{name}: stride {found.stride(dimension)} in dimension {dimension}, expected {stride}; "
            "call .contiguous()"
        )


def _check_hidden(hidden: torch.Tensor) -> None:
    if hidden.dim() != 3 or not hidden.is_floating_point():
        raise ValueError(
            f"hidden: {tuple(hidden.shape)} of {hidden.dtype}, expected floating [blocks, rows, "
            "hidden_size]; BlockLayout.hidden_rows gives this view of a layer's cache"
        )
    _expect_stride("hidden", hidden, 2, 1)
    _expect_stride("hidden", hidden, 1, hidden.shape[2])


def _check_held(hidden: torch.Tensor, held: HeldTokens) -> None:
    _check_hidden(hidden)
    _check_tables("held.tables", held.tables, held, hidden.shape[1], hidden)


def _check_numbers(name: str, numbers: torch.Tensor, count: int, like: torch.Tensor) -> None:
    whole = numbers.dtype in (torch.int32, torch.int64)
    if numbers.shape != (count,) or not whole or numbers.device != like.device:
        raise ValueError(
            f"{name}: {tuple(numbers.shape)} of {numbers.dtype} on {numbers.device}, expected ({count},) of "
            f"int32 or int64 on {like.device}; reshape, convert or move it"
        )
    _expect_stride(name, numbers, 0, 1)


def _check_tables(
    name: str, tables: torch.Tensor, held: HeldTokens, block_tokens: int, like: torch.Tensor
) -> None:
    if tables.dtype != torch.int32 or held.lengths.dtype != torch.int32:
        raise ValueError(f"{name} of {tables.dtype}, lengths of {held.lengths.dtype}: both must be int32")
    if tables.dim() != 2 or len(tables) != len(held.lengths):
        raise ValueError(
            f"{name} {tuple(tables.shape)}: expected [{len(held.lengths)}, blocks], one row per request"
        )
    if tables.shape[1] * block_tokens < held.longest:
        raise ValueError(
            f"{name} {tuple(tables.shape)}: blocks of {block_tokens} tokens cannot hold "
            f"longest={held.longest}; widen the table"
        )
    if tables.device != like.device:
        raise ValueError(f"{name} on {tables.device}, expected {like.device}; move it")
    _expect_stride(name, tables, 1, 1)
    _check_numbers("held.lengths", held.lengths, len(tables), like)


def _check_cache(name: str, cache: torch.Tensor, keys: torch.Tensor, like: torch.Tensor) -> None:
    if cache.dim() != 4:
        raise ValueError(f"{name}: {tuple(cache.shape)}, expected [blocks, tokens, heads, head_dim]")
    _expect(name, cache, tuple(keys.shape), like)


def _check_query(query: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor) -> None:
    _expect("query", query, shape, like)
    _expect_stride("query", query, 1, shape[2])


def _check_projection(
    projection: Projection,
    rotary: Rotary | None,
    hidden: torch.Tensor,
    width: int,
    head_dim: int,
    held: HeldTokens,
) -> None:
    for name in ("key_weight", "value_weight"):
        weight = getattr(projection, name)
        _expect(name, weight, (width, hidden.shape[2]), hidden)
        _expect_stride(name, weight, 0, hidden.shape[2])
    for name in ("key_bias", "value_bias"):
        if (bias := getattr(projection, name)) is not None:
            _expect(name, bias, (width,), hidden)
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim}: must be even")
    if rotary is None:
        return
    half = rotary.cos.shape[1]
    if rotary.cos.shape != rotary.sin.shape or 2 * half > head_dim or len(rotary.cos) < held.longest:
        raise ValueError(
            f"rotary of shapes {tuple(rotary.cos.shape)} and {tuple(rotary.sin.shape)}: expected both "
            f"[at least {held.longest} positions, at most {head_dim // 2}]"
        )
    for name, part in (("cos", rotary.cos), ("sin", rotary.sin)):
        if part.dtype != torch.float32 or not part.is_contiguous() or part.device != hidden.device:
            raise ValueError(
                f"rotary.{name} of {part.dtype} on {part.device}: must be contiguous float32 on "
                f"{hidden.device}"
            )
