"""Launches the Triton kernels of the operations that `reference` defines.

Tile sizes were chosen to fit without register spilling on compute capability 8.0 and 9.0 (`compiled` checks
it); none was tuned on a device. `SCORES` covers many positions, because each program reads all queries once:
with fewer positions it would read more queries than rows.
"""

from dataclasses import dataclass

import torch
import triton

from hybridcache.jit import attention as jit_attention
from hybridcache.jit import projection as jit_projection
from hybridcache.jit import rows as jit_rows
from hybridcache.layout import HeldTokens, Projection, Rotary

# `tl.dot` requires sides of at least 16.
_LEAST_SIDE = 16
# Two programs on each multiprocessor of the larger devices (H100: 132).
_PROGRAMS = 264


@dataclass(frozen=True, slots=True)
class Tile:
    """Tile of a kernel.

    Attributes:
        across: positions, or columns where rows are only copied.
        along: elements of the dimension that is summed or split.
        warps: warps per program.
    """

    across: int
    along: int
    warps: int


SCATTER = Tile(1, 1024, 4)
GATHER = Tile(1, 256, 4)
RESTORE = Tile(64, 64, 4)
DECODE = Tile(64, 0, 4)
SCORES = Tile(64, 64, 4)
MIX = Tile(64, 128, 8)


def padded(side: int) -> int:
    """Smallest power of two of at least `side` and at least 16."""
    return max(_LEAST_SIDE, int(triton.next_power_of_2(side)))


def scatter_rows(rows: torch.Tensor, slots: torch.Tensor, hidden: torch.Tensor) -> None:
    """Launches `reference.scatter_rows`: one program per row."""
    if len(rows):
        jit_rows.scatter_rows[(len(rows),)](
            rows, slots, hidden, rows.stride(0), hidden.stride(0), hidden.shape[2],
            ROWS=hidden.shape[1], BLOCK_D=SCATTER.along, num_warps=SCATTER.warps,
        )  # fmt: skip


def gather_rows(hidden: torch.Tensor, held: HeldTokens, starts: torch.Tensor, out: torch.Tensor) -> None:
    """Launches `reference.gather_rows`: one program per request and block."""
    rows, width = hidden.shape[1:]
    if held.longest and len(held.lengths):
        jit_rows.gather_rows[(len(held.lengths), triton.cdiv(held.longest, rows))](
            out, hidden, held.tables, held.lengths, starts, held.tables.stride(0), hidden.stride(0), width,
            ROWS=rows, ROWS_PADDED=triton.next_power_of_2(rows), BLOCK_D=GATHER.along, num_warps=GATHER.warps,
        )  # fmt: skip


def restore(
    hidden: torch.Tensor,
    held: HeldTokens,
    projection: Projection,
    rotary: Rotary | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
) -> None:
    """Launches `reference.restore`: one program per key or value head, request and tile of positions."""
    heads, head_dim = keys.shape[2:]
    if not held.longest or not len(held.lengths):
        return
    # Absent tensors still need a valid pointer, which the kernel does not read.
    unread = projection.key_weight
    grid = (2 * heads, len(held.lengths), triton.cdiv(held.longest, RESTORE.across))
    jit_projection.restore[grid](
        keys, values, hidden, held.tables, held.lengths, projection.key_weight, projection.value_weight,
        unread if projection.key_bias is None else projection.key_bias,
        unread if projection.value_bias is None else projection.value_bias,
        unread if rotary is None else rotary.cos, unread if rotary is None else rotary.sin, tables,
        held.tables.stride(0), tables.stride(0), hidden.stride(0), hidden.shape[2],
        *keys.stride()[:3], *values.stride()[:3],
        HEADS=heads, HEAD_DIM=head_dim, HALF=0 if rotary is None else rotary.cos.shape[1],
        PAIRS=padded(head_dim // 2), ROWS=hidden.shape[1], BLOCK_TOKENS=keys.shape[1],
        KEY_BIAS=projection.key_bias is not None, VALUE_BIAS=projection.value_bias is not None,
        BLOCK_M=RESTORE.across, BLOCK_K=RESTORE.along, num_warps=RESTORE.warps,
    )  # fmt: skip


def paged_decode(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, held: HeldTokens, scale: float
) -> torch.Tensor:
    """Launches `reference.paged_decode`: one program per head, request and part of the context."""
    requests, heads, head_dim = query.shape
    if not held.longest or not requests:
        return torch.zeros_like(query)
    splits = _splits(requests * heads, held.longest, DECODE.across)
    parts = query.new_empty((requests, heads, splits, head_dim), dtype=torch.float32)
    logsum = query.new_empty((requests, heads, splits), dtype=torch.float32)
    jit_attention.paged_decode[(heads, requests, splits)](
        parts, logsum, query, keys, values, held.tables, held.lengths, scale, held.tables.stride(0),
        query.stride(0), *keys.stride()[:3], *values.stride()[:3], splits,
        HEADS=heads, HEAD_DIM=head_dim, HEAD_PADDED=triton.next_power_of_2(head_dim),
        BLOCK_TOKENS=keys.shape[1], BLOCK_N=DECODE.across, num_warps=DECODE.warps,
    )  # fmt: skip
    # The softmax of a request without tokens is NaN.
    weights = torch.softmax(logsum, -1).nan_to_num(0.0)
    return (parts * weights[..., None]).sum(2).to(query.dtype)


def hidden_scores(absorbed: torch.Tensor, hidden: torch.Tensor, held: HeldTokens) -> torch.Tensor:
    """Launches `reference.hidden_scores`: one program per request and tile of positions."""
    requests, heads, width = absorbed.shape
    scores = _no_scores(absorbed, heads, held)
    if held.longest and requests:
        jit_attention.hidden_scores[(requests, triton.cdiv(held.longest, SCORES.across))](
            scores, absorbed, hidden, held.tables, held.lengths, held.tables.stride(0), hidden.stride(0),
            absorbed.stride(0), absorbed.stride(1), held.longest, width,
            HEADS=heads, HEADS_PADDED=padded(heads), ROWS=hidden.shape[1],
            BLOCK_N=SCORES.across, BLOCK_D=SCORES.along, num_warps=SCORES.warps,
        )  # fmt: skip
    return scores


def rotated_scores(
    query: torch.Tensor,
    hidden: torch.Tensor,
    held: HeldTokens,
    projection: Projection,
    rotary: Rotary | None,
    scale: float,
) -> torch.Tensor:
    """Launches `reference.rotated_scores`: one program per head, request and tile of positions."""
    requests, heads, head_dim = query.shape
    scores = _no_scores(query, heads, held)
    if not held.longest or not requests:
        return scores
    unread = projection.key_weight
    jit_projection.rotated_scores[(heads, requests, triton.cdiv(held.longest, RESTORE.across))](
        scores, query, hidden, held.tables, held.lengths, projection.key_weight,
        unread if projection.key_bias is None else projection.key_bias,
        unread if rotary is None else rotary.cos, unread if rotary is None else rotary.sin, scale,
        held.tables.stride(0), hidden.stride(0), query.stride(0), held.longest, hidden.shape[2],
        HEADS=heads, HEAD_DIM=head_dim, HALF=0 if rotary is None else rotary.cos.shape[1],
        PAIRS=padded(head_dim // 2), ROWS=hidden.shape[1], BIAS=projection.key_bias is not None,
        BLOCK_M=RESTORE.across, BLOCK_K=RESTORE.along, num_warps=RESTORE.warps,
    )  # fmt: skip
    return scores


def mix_rows(weights: torch.Tensor, hidden: torch.Tensor, held: HeldTokens) -> torch.Tensor:
    """Launches `reference.mix_rows`: one program per request, tile of columns and part of the context."""
    requests, heads, _ = weights.shape
    width = hidden.shape[2]
    if not held.longest or not requests:
        return hidden.new_zeros((requests, heads, width))
    columns = triton.cdiv(width, MIX.along)
    splits = _splits(requests * columns, held.longest, MIX.across)
    # Unsplit sums are rounded in the kernel; split sums are added in float32 and rounded afterwards.
    kind = hidden.dtype if splits == 1 else torch.float32
    parts = hidden.new_empty((splits, requests, heads, width), dtype=kind)
    jit_attention.mix_rows[(requests, columns, splits)](
        parts, weights, hidden, held.tables, held.lengths, held.tables.stride(0), hidden.stride(0),
        held.longest, splits, width,
        HEADS=heads, HEADS_PADDED=padded(heads), ROWS=hidden.shape[1],
        BLOCK_N=MIX.across, BLOCK_D=MIX.along, num_warps=MIX.warps,
    )  # fmt: skip
    return parts[0] if splits == 1 else parts.sum(0).to(hidden.dtype)


def _splits(programs: int, longest: int, block: int) -> int:
    """Number of parts of the context: enough to fill the device, none smaller than `block` positions."""
    return max(1, min(_PROGRAMS // programs, -(-longest // block)))


def _no_scores(like: torch.Tensor, heads: int, held: HeldTokens) -> torch.Tensor:
    shape = (len(held.lengths), heads, held.longest)
    return like.new_full(shape, float("-inf"), dtype=torch.float32)
