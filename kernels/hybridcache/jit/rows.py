"""Kernels that copy rows of hidden states into and out of their blocks."""

import triton
import triton.language as tl


@triton.jit
def scatter_rows(rows, slots, hidden, row_stride, block_stride, D, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Grid (rows): copies one row to its slot."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        into = hidden + (slot // ROWS) * block_stride + (slot % ROWS) * D
        for first in range(0, D, BLOCK_D):
            column = first + tl.arange(0, BLOCK_D)
            value = tl.load(rows + token * row_stride + column, mask=column < D)
            tl.store(into + column, value, mask=column < D)


@triton.jit
def gather_rows(
    out, hidden, tables, lengths, starts, table_stride, block_stride, D,
    ROWS: tl.constexpr, ROWS_PADDED: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid (requests, blocks): copies one block of a request's rows."""
    request = tl.program_id(0)
    logical = tl.program_id(1)
    length = tl.load(lengths + request)
    if logical * ROWS < length:
        block = tl.load(tables + request * table_stride + logical).to(tl.int64)
        row = tl.arange(0, ROWS_PADDED)
        token = logical * ROWS + row
        held = (row < ROWS) & (token < length)
        into = tl.load(starts + request).to(tl.int64) + token
        for first in range(0, D, BLOCK_D):
            column = first + tl.arange(0, BLOCK_D)
            mask = held[:, None] & (column < D)[None, :]
            value = tl.load(hidden + block * block_stride + row[:, None] * D + column[None, :], mask=mask)
            tl.store(out + into[:, None] * D + column[None, :], value, mask=mask)
