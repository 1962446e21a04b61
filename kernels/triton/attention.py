# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"
"""Portable attention kernel: one KV latent per token as K and V, softmax with sink, fused epilogue or split partials.

One program computes BLOCK_H heads of one token (all heads share the keys, so they are the matrix rows) over its keys:

    RANGE    keys first .. last - 1 of a dense tensor (causal and sliding window are a range per token)
    INDEXED  rows picked by an index list, from one pool or two; negative and out-of-range indices are masked

A dense mask becomes an index list first (see :mod:`.mask_lists`), so that masked keys cost neither loads nor products,
wherever they lie, and a NaN row behind a mask is never read.

The maximum starts at a finite value below every admissible logit, so that rows without keys need no special case inside
the loop: masked logits are -inf, their weight exp2(-inf - finite) is an exact zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .epilogue import finish_rows
from .interpreter import dot_operand, load_fp32, round_to

# Start of the running maximum (base-2 logits): below every logit, because additive masks are clamped to LOWEST_BIAS.
LOWEST = tl.constexpr(-2.0e38)
LOWEST_BIAS = tl.constexpr(-1.0e38)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _attend(
    acc,
    top,
    total,
    q,
    kv_ptr,
    num_rows,
    index_ptr,
    first,
    last,
    tiles,
    extra_kv_ptr,
    extra_rows,
    extra_index_ptr,
    extra_last,
    bias_ptr,
    bias_stride,
    low,
    high,
    scale_log2,
    D: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    EXTRA_STRIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    INDEXED: tl.constexpr,
    EXTRA: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Online softmax of q [BLOCK_H, D] over tiles low .. high - 1 of BLOCK_N columns each.

    Column n counts if first <= n < last; with INDEXED its row is index_ptr[n], which must lie in 0 .. num_rows - 1.
    With EXTRA the tiles from ``tiles`` on are those of the second pool: one loop for both, because a second loop costs
    registers that the accumulator needs. Returns the updated (acc [BLOCK_H, D], top [BLOCK_H], total [BLOCK_H]).
    """
    channel = tl.arange(0, D)
    for tile in tl.range(low, high, num_stages=STAGES):
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        base = kv_ptr
        rows = num_rows
        if EXTRA:
            second = tile >= tiles
            base = tl.where(second, extra_kv_ptr, kv_ptr)
            rows = tl.where(second, extra_rows, num_rows)
            n = n - tl.where(second, tiles * BLOCK_N, 0)
            listed = tl.where(second, extra_index_ptr, index_ptr)
            row = tl.load(listed + n, mask=n < tl.where(second, extra_last, last), other=-1)
            visible = (row >= 0) & (row < rows)
            row = row.to(tl.int32)  # 64-bit indices, once checked, need not stay in registers
            offset = row.to(tl.int64) * tl.where(second, EXTRA_STRIDE, KV_STRIDE)
        else:
            visible = (n >= first) & (n < last)
            row = n
            if INDEXED:
                row = tl.load(index_ptr + n, mask=visible, other=-1)
                visible = (row >= 0) & (row < rows)
                row = row.to(tl.int32)
            offset = row.to(tl.int64) * KV_STRIDE
        kv = tl.load(base + offset[:, None] + channel[None, :], mask=visible[:, None], other=0.0)
        keys = dot_operand(kv)
        logits = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale_log2
        if BIAS:
            bias = load_fp32(tl.load(bias_ptr + row.to(tl.int64) * bias_stride, mask=visible, other=0.0))
            visible = visible & (bias > -float("inf"))
            logits += (tl.maximum(bias, LOWEST_BIAS) * LOG2E)[None, :]
        logits = tl.where(visible[None, :], logits, -float("inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        weights = tl.exp2(logits - new_top[:, None])
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(round_to(weights, kv.dtype), keys, acc * decay[:, None], input_precision=PRECISION)
        top = new_top
    return acc, top, total


@triton.jit(
    do_not_specialize=[
        "first_token", "num_tokens", "queries", "num_rows", "columns", "index_stride", "extra_rows", "extra_columns",
        "extra_index_stride", "offset", "window", "index_rows", "bias_stride_b", "bias_stride_s",
    ]
)  # fmt: skip
def attention_kernel(
    q_ptr,
    q_stride_b,
    q_stride_s,
    q_stride_h,
    kv_ptr,
    kv_stride_b,
    num_rows,
    index_ptr,
    index_stride,
    index_rows,
    lengths_ptr,
    columns,
    extra_kv_ptr,
    extra_rows,
    extra_index_ptr,
    extra_index_stride,
    extra_lengths_ptr,
    extra_columns,
    bias_ptr,
    bias_stride_b,
    bias_stride_s,
    bias_stride_n,
    sink_ptr,
    out_ptr,
    scales_ptr,
    cos_ptr,
    cos_stride_b,
    cos_stride_s,
    cos_stride,
    sin_ptr,
    sin_stride_b,
    sin_stride_s,
    sin_stride,
    first_token,
    num_tokens,
    queries,
    offset,
    window,
    scale_log2,
    floor,
    H: tl.constexpr,
    D: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    EXTRA_STRIDE: tl.constexpr,
    HPG: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    QUANT: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    INDEXED: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    EXTRA: tl.constexpr,
    HAS_EXTRA_LENGTHS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    BIAS: tl.constexpr,
    HAS_SINK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (tokens of this launch, ceil(H / BLOCK_H), splits).

    Token t = b * queries + s. Without SPLIT: the epilogue of :mod:`.epilogue` into out_ptr and scales_ptr. With SPLIT:
    normalised fp32 rows [P, T, H, D] into out_ptr and the natural-log lse [P, T, H] into scales_ptr; the program of
    split p takes the p-th part of this token's own tiles, so that short tokens split evenly too.
    """
    token = first_token + tl.program_id(0)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    split = tl.program_id(2)
    batch = (token // queries).to(tl.int64)
    query = (token % queries).to(tl.int64)
    head_mask = heads < H
    channel = tl.arange(0, D)

    index_row = index_ptr
    bias_row = bias_ptr
    first = 0
    last = columns
    if INDEXED:
        # The list of a mask without a batch dimension has one row per query, shared by all sequences.
        listed = tl.program_id(0) % index_rows
        index_row = index_ptr + listed.to(tl.int64) * index_stride
        if HAS_LENGTHS:
            last = tl.minimum(columns, tl.load(lengths_ptr + listed).to(tl.int32))
        if BIAS:
            bias_row = bias_ptr + batch * bias_stride_b + query * bias_stride_s
    else:
        end = query.to(tl.int32) + offset + 1
        if CAUSAL:
            last = tl.minimum(columns, end)
        if WINDOW:
            first = tl.maximum(0, end - window)
    tiles_low = first // BLOCK_N
    tiles = tl.maximum(tl.cdiv(tl.maximum(last, 0), BLOCK_N), tiles_low)
    extra_last = 0
    extra_tiles = 0
    if EXTRA:
        extra_last = extra_columns
        if HAS_EXTRA_LENGTHS:
            extra_last = tl.minimum(extra_columns, tl.load(extra_lengths_ptr + token).to(tl.int32))
        extra_tiles = tl.cdiv(tl.maximum(extra_last, 0), BLOCK_N)

    low = tiles_low
    high = tiles + extra_tiles
    if SPLIT:
        share = tl.cdiv(high - low, tl.num_programs(2))
        low = tl.minimum(low + split * share, high)
        high = tl.minimum(low + share, high)

    q_row = q_ptr + batch * q_stride_b + query * q_stride_s
    q = tl.load(q_row + heads.to(tl.int64)[:, None] * q_stride_h + channel[None, :], mask=head_mask[:, None], other=0.0)
    q = dot_operand(q)
    acc = tl.zeros([BLOCK_H, D], tl.float32)
    top = tl.full([BLOCK_H], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc, top, total = _attend(
        acc, top, total, q, kv_ptr + batch * kv_stride_b, num_rows, index_row, first, last, tiles,
        extra_kv_ptr, extra_rows, extra_index_ptr + token.to(tl.int64) * extra_index_stride, extra_last,
        bias_row, bias_stride_n, low, high, scale_log2,
        D, KV_STRIDE, EXTRA_STRIDE, BLOCK_N, STAGES, INDEXED, EXTRA, BIAS, PRECISION,
    )  # fmt: skip

    if SPLIT:
        row = (split.to(tl.int64) * num_tokens + token) * H + heads
        live = total > 0.0
        normaliser = 1.0 / tl.where(live, total, 1.0)
        lse = tl.where(live, (top + tl.log2(tl.where(live, total, 1.0))) * LN2, -float("inf"))
        # A NaN total is neither live nor empty: let it through.
        lse = tl.where(total != total, total, lse)
        tl.store(scales_ptr + row, lse, mask=head_mask)
        tl.store(out_ptr + row[:, None] * D + channel[None, :], acc * normaliser[:, None], mask=head_mask[:, None])
    else:
        if HAS_SINK:
            sink = load_fp32(tl.load(sink_ptr + heads, mask=head_mask, other=0.0)) * LOG2E
            peak = tl.maximum(top, sink)
            factor = tl.exp2(top - peak)
            total = total * factor + tl.exp2(sink - peak)
        else:
            factor = tl.full([BLOCK_H], 1.0, tl.float32)
        factor = factor / tl.where(total == 0.0, 1.0, total)
        # One table row per token: the same for all heads.
        here = tl.zeros([1], tl.int64)
        finish_rows(
            acc * factor[:, None],
            out_ptr,
            scales_ptr,
            cos_ptr,
            sin_ptr,
            (here + batch * cos_stride_b + query * cos_stride_s, here + batch * sin_stride_b + query * sin_stride_s),
            cos_stride,
            sin_stride,
            token + tl.zeros([BLOCK_H], tl.int32),
            heads,
            head_mask,
            num_tokens,
            0,
            floor,
            BLOCK_H,
            D,
            D,
            HPG,
            HALF,
            BLOCK,
            QUANT,
            NATIVE,
        )
