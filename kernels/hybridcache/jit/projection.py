"""Kernels that restore keys and values from hidden states: gather, projection, bias and rotation in one.

A head's dimensions are computed as two vectors a and b. The first HALF pairs (a, b) are the rotated
dimensions, paired as they rotate; the other dimensions fill the rest. So any share of a head may be rotated
without shuffling registers.
"""

import triton
import triton.language as tl


@triton.jit
def column_pairs(pair, HALF: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Dimensions a and b of each pair within the head; pairs below HALF are rotated."""
    still: tl.constexpr = (HEAD_DIM - 2 * HALF) // 2
    a = tl.where(pair < HALF, pair, HALF + pair)
    b = tl.where(pair < HALF, HALF + pair, HALF + still + pair)
    return a, b


@triton.jit
def project(
    source, held, weight, bias, head, D,
    HALF: tl.constexpr, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Projects BLOCK_M rows for one head, in pairs, rounded to the cache's dtype."""
    pair = tl.arange(0, PAIRS)
    real = pair < HEAD_DIM // 2
    a, b = column_pairs(pair, HALF, HEAD_DIM)
    weight_a = weight + (head * HEAD_DIM + a).to(tl.int64) * D
    weight_b = weight + (head * HEAD_DIM + b).to(tl.int64) * D
    sum_a = tl.zeros((BLOCK_M, PAIRS), tl.float32)
    sum_b = tl.zeros((BLOCK_M, PAIRS), tl.float32)
    for first in range(0, D, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        row_mask = held[:, None] & (k < D)[None, :]
        weight_mask = (k < D)[:, None] & real[None, :]
        rows = tl.load(source[:, None] + k[None, :], mask=row_mask, other=0.0)
        w = tl.load(weight_a[None, :] + k[:, None], mask=weight_mask, other=0.0)
        sum_a = tl.dot(rows, w, sum_a, input_precision="ieee")
        w = tl.load(weight_b[None, :] + k[:, None], mask=weight_mask, other=0.0)
        sum_b = tl.dot(rows, w, sum_b, input_precision="ieee")
    if BIAS:
        sum_a += tl.load(bias + head * HEAD_DIM + a, mask=real, other=0.0).to(tl.float32)[None, :]
        sum_b += tl.load(bias + head * HEAD_DIM + b, mask=real, other=0.0).to(tl.float32)[None, :]
    kind = weight.dtype.element_ty
    return sum_a.to(kind).to(tl.float32), sum_b.to(kind).to(tl.float32)


@triton.jit
def rotate(a, b, cos, sin, position, held, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """Rotates the pairs below HALF by the angles of their positions."""
    pair = tl.arange(0, PAIRS)
    mask = held[:, None] & (pair < HALF)[None, :]
    at = position[:, None] * HALF + pair[None, :]
    c = tl.load(cos + at, mask=mask, other=1.0)
    s = tl.load(sin + at, mask=mask, other=0.0)
    return a * c - b * s, b * c + a * s


@triton.jit
def source_rows(hidden, tables, request, position, held, table_stride, block_stride, D, ROWS: tl.constexpr):
    """Pointers to the rows at some positions of a request."""
    block = tl.load(tables + request * table_stride + position // ROWS, mask=held, other=0).to(tl.int64)
    return hidden + block * block_stride + (position % ROWS) * D


@triton.jit
def restore(
    keys, values, hidden, tables, lengths, key_weight, value_weight, key_bias, value_bias, cos, sin, into,
    table_stride, into_stride, block_stride, D,
    key_block_stride, key_token_stride, key_head_stride,
    value_block_stride, value_token_stride, value_head_stride,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    KEY_BIAS: tl.constexpr, VALUE_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (2 * heads, requests, positions / BLOCK_M): adjacent programs share rows in the cache."""
    head = tl.program_id(0)
    request = tl.program_id(1)
    first = tl.program_id(2) * BLOCK_M
    length = tl.load(lengths + request)
    if first < length:
        position = first + tl.arange(0, BLOCK_M)
        held = position < length
        source = source_rows(hidden, tables, request, position, held, table_stride, block_stride, D, ROWS)
        block = tl.load(into + request * into_stride + position // BLOCK_TOKENS, mask=held, other=0).to(
            tl.int64
        )
        token = position % BLOCK_TOKENS
        pair = tl.arange(0, PAIRS)
        mask = held[:, None] & (pair < HEAD_DIM // 2)[None, :]
        column_a, column_b = column_pairs(pair, HALF, HEAD_DIM)
        kind = keys.dtype.element_ty
        if head < HEADS:
            a, b = project(
                source, held, key_weight, key_bias, head, D,
                HALF, HEAD_DIM, PAIRS, KEY_BIAS, BLOCK_M, BLOCK_K,
            )  # fmt: skip
            if HALF > 0:
                a, b = rotate(a, b, cos, sin, position, held, HALF, PAIRS)
            out = keys + block * key_block_stride + token * key_token_stride + head * key_head_stride
            tl.store(out[:, None] + column_a[None, :], a.to(kind), mask=mask)
            tl.store(out[:, None] + column_b[None, :], b.to(kind), mask=mask)
        else:
            a, b = project(
                source, held, value_weight, value_bias, head - HEADS, D,
                HALF, HEAD_DIM, PAIRS, VALUE_BIAS, BLOCK_M, BLOCK_K,
            )  # fmt: skip
            out = values + block * value_block_stride + token * value_token_stride
            out += (head - HEADS) * value_head_stride
            tl.store(out[:, None] + column_a[None, :], a.to(kind), mask=mask)
            tl.store(out[:, None] + column_b[None, :], b.to(kind), mask=mask)


@triton.jit
def rotated_scores(
    scores, query, hidden, tables, lengths, key_weight, key_bias, cos, sin, scale,
    table_stride, block_stride, query_stride, longest, D,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr,
    ROWS: tl.constexpr, BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (heads, requests, positions / BLOCK_M): keys are restored in registers and not written."""
    head = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    first = tl.program_id(2) * BLOCK_M
    length = tl.load(lengths + request)
    if first < length:
        position = first + tl.arange(0, BLOCK_M)
        held = position < length
        source = source_rows(hidden, tables, request, position, held, table_stride, block_stride, D, ROWS)
        a, b = project(
            source, held, key_weight, key_bias, head, D,
            HALF, HEAD_DIM, PAIRS, BIAS, BLOCK_M, BLOCK_K,
        )  # fmt: skip
        if HALF > 0:
            a, b = rotate(a, b, cos, sin, position, held, HALF, PAIRS)
        kind = hidden.dtype.element_ty
        a, b = a.to(kind).to(tl.float32), b.to(kind).to(tl.float32)
        pair = tl.arange(0, PAIRS)
        real = pair < HEAD_DIM // 2
        column_a, column_b = column_pairs(pair, HALF, HEAD_DIM)
        own = query + request * query_stride + head * HEAD_DIM
        query_a = tl.load(own + column_a, mask=real, other=0.0).to(tl.float32)
        query_b = tl.load(own + column_b, mask=real, other=0.0).to(tl.float32)
        score = tl.sum(a * query_a[None, :] + b * query_b[None, :], 1) * scale
        tl.store(scores + (request * HEADS + head) * longest + position, score, mask=held)
