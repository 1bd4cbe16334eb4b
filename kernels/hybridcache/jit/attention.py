"""Decode attention kernels over blocks of keys and values or of hidden states.

All are memory-bound. `paged_decode` and `mix_rows` split the context, `hidden_scores` tiles it, so that a few
long requests also fill the device.
"""

import triton
import triton.language as tl


@triton.jit
def paged_decode(
    parts, logsum, query, keys, values, tables, lengths, scale, table_stride, query_stride,
    key_block_stride, key_token_stride, key_head_stride,
    value_block_stride, value_token_stride, value_head_stride,
    splits,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PADDED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (heads, requests, splits): a normalised partial output, and the logarithm of its weight."""
    head = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(lengths + request)
    share = tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N
    end = tl.minimum(split * share + share, length)
    column = tl.arange(0, HEAD_PADDED)
    real = column < HEAD_DIM
    own = tl.load(query + request * query_stride + head * HEAD_DIM + column, mask=real, other=0.0)
    own = own.to(tl.float32) * scale
    # Running maximum and sum as vectors of one element: scalars cannot be carried through a loop.
    highest = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    mixed = tl.zeros((HEAD_PADDED,), tl.float32)
    for first in range(split * share, end, BLOCK_N):
        position = first + tl.arange(0, BLOCK_N)
        held = position < end
        mask = held[:, None] & real[None, :]
        block = tl.load(tables + request * table_stride + position // BLOCK_TOKENS, mask=held, other=0)
        block = block.to(tl.int64)
        token = position % BLOCK_TOKENS
        at = keys + block * key_block_stride + token * key_token_stride + head * key_head_stride
        key = tl.load(at[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        score = tl.where(held, tl.sum(key * own[None, :], 1), float("-inf"))
        reached = tl.maximum(highest, tl.max(score, 0))
        weight = tl.exp(score - reached)
        fading = tl.exp(highest - reached)
        at = values + block * value_block_stride + token * value_token_stride + head * value_head_stride
        value = tl.load(at[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        mixed = mixed * fading + tl.sum(value * weight[:, None], 0)
        total = total * fading + tl.sum(weight, 0)
        highest = reached
    some = total > 0
    part = (request * HEADS + head) * splits + split
    mixed = mixed / tl.where(some, total, 1.0)
    tl.store(parts + part * HEAD_DIM + column, mixed, mask=real)
    weighed = tl.where(some, highest + tl.log(tl.where(some, total, 1.0)), float("-inf"))
    tl.store(logsum + part + tl.arange(0, 1), weighed)


@triton.jit
def hidden_scores(
    scores, absorbed, hidden, tables, lengths,
    table_stride, block_stride, request_stride, head_stride, longest, D,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid (requests, positions / BLOCK_N): one program computes all heads, which read the same rows."""
    request = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK_N
    length = tl.load(lengths + request)
    if first < length:
        position = first + tl.arange(0, BLOCK_N)
        held = position < length
        block = tl.load(tables + request * table_stride + position // ROWS, mask=held, other=0).to(tl.int64)
        source = hidden + block * block_stride + (position % ROWS) * D
        head = tl.arange(0, HEADS_PADDED)
        real_head = head < HEADS
        own = absorbed + request * request_stride + head * head_stride
        score = tl.zeros((HEADS_PADDED, BLOCK_N), tl.float32)
        for start in range(0, D, BLOCK_D):
            column = start + tl.arange(0, BLOCK_D)
            real = column < D
            rows = tl.load(source[:, None] + column[None, :], mask=held[:, None] & real[None, :], other=0.0)
            queries = tl.load(
                own[:, None] + column[None, :], mask=(head < HEADS)[:, None] & real[None, :], other=0.0
            )
            score = tl.dot(queries, tl.trans(rows), score, input_precision="ieee")
        at = scores + (request * HEADS + head)[:, None] * longest + position[None, :]
        tl.store(at, score, mask=real_head[:, None] & held[None, :])


@triton.jit
def mix_rows(
    parts, weights, hidden, tables, lengths, table_stride, block_stride, longest, splits, D,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid (requests, columns / BLOCK_D, splits): weighted sum over a part of the context, for all heads."""
    request = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(lengths + request)
    share = tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N
    end = tl.minimum(split * share + share, length)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    real = column < D
    head = tl.arange(0, HEADS_PADDED)
    own = weights + (request * HEADS + head) * longest
    mixed = tl.zeros((HEADS_PADDED, BLOCK_D), tl.float32)
    for first in range(split * share, end, BLOCK_N):
        position = first + tl.arange(0, BLOCK_N)
        held = position < end
        block = tl.load(tables + request * table_stride + position // ROWS, mask=held, other=0).to(tl.int64)
        source = hidden + block * block_stride + (position % ROWS) * D
        rows = tl.load(source[:, None] + column[None, :], mask=held[:, None] & real[None, :], other=0.0)
        weight = tl.load(
            own[:, None] + position[None, :], mask=(head < HEADS)[:, None] & held[None, :], other=0.0
        )
        mixed = tl.dot(weight, rows, mixed, input_precision="ieee")
    part = (split * tl.num_programs(0) + request) * HEADS + head
    at = parts + part[:, None] * D + column[None, :]
    tl.store(at, mixed.to(parts.dtype.element_ty), mask=(head < HEADS)[:, None] & real[None, :])
