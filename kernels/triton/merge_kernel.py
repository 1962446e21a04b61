# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"
"""Merge of split-KV partials with KvSplit concurrent groups, and the epilogue of the whole chain.

One program merges WIDTH channels of one row (a token and a head). Its KV_SPLIT groups run the online-softmax merge over
partials g, g + KV_SPLIT, g + 2 * KV_SPLIT, ... of that row side by side (the first axis of the tile); then the groups
are combined with ``exp2(scale_log2 * (group_max - max))``, the sink enters the denominator once, stats are exported
once, and the epilogue of :mod:`.epilogue` stores the row. KV_SPLIT = 1 is the serial loop.

Why groups at all: the running maximum is a chain of dependent exponentials, one link per partial. Groups cut its length
by KV_SPLIT and put that many loads in flight. The price is KV_SPLIT accumulators and the final combination, so it pays
for many partials of few rows only; the policy in :mod:`fusion_pass.kernels.reduction` decides from measurements.

Layout: the number of warps is WIDTH / 128 for fp32 partials, so that each warp owns its columns for every group and the
combination needs no exchange between warps.

Slots past the last partial are predicated off and enter with maximum -inf: weight 0, and the group's maximum does not
move. An empty partial (maximum -inf, or sum 0) is read but never used: its rows may hold anything, NaN included.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .discard import discard_partials
from .epilogue import finish_rows, load_tables
from .interpreter import load_fp32, pdl_release, pdl_wait

# Stands for "no partial yet": finite, so that differences of maxima never become inf - inf.
_LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def _load_batch(
    first,
    row,
    num_rows,
    channel,
    num_partials,
    partials_ptr,
    max_ptr,
    sum_ptr,
    D: tl.constexpr,
    KV_SPLIT: tl.constexpr,
    UNROLL: tl.constexpr,
    HAS_SUM: tl.constexpr,
):
    """Loads of UNROLL partials per group, from partial ``first`` on: a tuple of (rows [KV_SPLIT, WIDTH], max
    [KV_SPLIT], sum [KV_SPLIT]). Nothing is computed in between, so that all of them are in flight together."""
    batch = ()
    for step in tl.static_range(0, UNROLL):
        slot = first + step * KV_SPLIT + tl.arange(0, KV_SPLIT)
        present = slot < num_partials
        statistic = slot * num_rows + row
        address = partials_ptr + statistic.to(tl.int64)[:, None] * D + channel[None, :]
        values = tl.load(address, mask=present[:, None], other=0.0)
        slot_top = tl.load(max_ptr + statistic, mask=present, other=float("-inf"))
        if HAS_SUM:
            slot_sum = tl.load(sum_ptr + statistic, mask=present, other=0.0)
        else:
            slot_sum = slot_top
        batch = batch + ((values, slot_top, slot_sum),)  # type: ignore[assignment]
    return batch


@triton.jit
def _merge_batch(acc, top, total, batch, scale_log2, UNROLL: tl.constexpr, HAS_SUM: tl.constexpr):
    """The online-softmax update of every group, one partial after the other.

    acc [KV_SPLIT, WIDTH] fp32, top and total [KV_SPLIT]: sums relative to the running maximum ``top``.
    """
    for step in tl.static_range(0, UNROLL):
        values, slot_top, slot_sum = batch[step]
        if HAS_SUM:
            slot_top = tl.where(slot_sum == 0.0, float("-inf"), slot_top)
        empty = slot_top == float("-inf")
        values = tl.where(empty[:, None], 0.0, load_fp32(values))
        new_top = tl.maximum(top, slot_top)
        keep = tl.exp2((top - new_top) * scale_log2)
        weight = tl.exp2((slot_top - new_top) * scale_log2)
        acc = acc * keep[:, None] + values * weight[:, None]
        if HAS_SUM:
            weight = tl.where(empty, 0.0, weight * slot_sum)
        total = total * keep + weight
        top = new_top
    return acc, top, total


@triton.jit(do_not_specialize=["num_partials", "num_tokens", "num_heads", "token0", "total_tokens", "table_rows"])
def merge_kernel(
    partials_ptr,
    max_ptr,
    sum_ptr,
    sink_ptr,
    out_ptr,
    scales_ptr,
    stats_ptr,
    cos_ptr,
    sin_ptr,
    num_partials,
    num_tokens,
    num_heads,
    token0,  # token of the outputs that the partials' first is
    total_tokens,  # of the outputs
    table_rows,
    cos_stride_t,
    cos_stride,
    sin_stride_t,
    sin_stride,
    scale_log2,
    inverse_scale,
    floor,
    KV_SPLIT: tl.constexpr,
    WIDTH: tl.constexpr,
    UNROLL: tl.constexpr,  # partials per group in one batch of loads
    BATCHES: tl.constexpr,  # batches that hold all partials, unrolled; 0: a run-time loop over batches
    HAS_SUM: tl.constexpr,
    HAS_SINK: tl.constexpr,
    STATS: tl.constexpr,
    DISCARD: tl.constexpr,  # 0, or the program's threads: nobody reads the partials afterwards
    D: tl.constexpr,
    HPG: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    QUANT: tl.constexpr,
    NATIVE: tl.constexpr,
    READY: tl.constexpr,  # the tables and the sink may be read before the wait
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    d0 = tl.program_id(1) * WIDTH
    num_rows = num_tokens * num_heads
    token = token0 + row // num_heads
    head = row % num_heads
    channel = d0 + tl.arange(0, WIDTH)
    table_row = (token % table_rows).to(tl.int64)
    table_offsets = (
        table_row * cos_stride_t + tl.zeros([1], tl.int64),
        table_row * sin_stride_t + tl.zeros([1], tl.int64),
    )
    tables = None
    pdl_release(PDL)
    if READY:
        if HAS_SINK:
            sink = load_fp32(tl.load(sink_ptr + head)) * inverse_scale
        if HALF > 0:
            if WIDTH % (2 * HALF) == 0 and D % (2 * HALF) == 0:
                tables = load_tables(cos_ptr, sin_ptr, table_offsets, cos_stride, sin_stride, HALF)
    pdl_wait(PDL)

    acc = tl.zeros([KV_SPLIT, WIDTH], tl.float32)
    top = tl.full([KV_SPLIT], _LOWEST, tl.float32)
    total = tl.zeros([KV_SPLIT], tl.float32)
    batch = _load_batch(
        0, row, num_rows, channel, num_partials, partials_ptr, max_ptr, sum_ptr, D, KV_SPLIT, UNROLL, HAS_SUM
    )
    # What the end of the row needs is loaded here: there the memory's latency would be waited out once more.
    if not READY:
        if HALF > 0:
            if WIDTH % (2 * HALF) == 0 and D % (2 * HALF) == 0:
                tables = load_tables(cos_ptr, sin_ptr, table_offsets, cos_stride, sin_stride, HALF)
        if HAS_SINK:
            sink = load_fp32(tl.load(sink_ptr + head)) * inverse_scale
    # The next batch is loaded before this one is merged: a loop that loads and merges in turn waits out the memory's
    # latency at every iteration. Past the last partial nothing is loaded.
    if BATCHES > 0:
        for index in tl.static_range(1, BATCHES):
            following = _load_batch(
                index * KV_SPLIT * UNROLL,
                row,
                num_rows,
                channel,
                num_partials,
                partials_ptr,
                max_ptr,
                sum_ptr,
                D,
                KV_SPLIT,
                UNROLL,
                HAS_SUM,
            )
            acc, top, total = _merge_batch(acc, top, total, batch, scale_log2, UNROLL, HAS_SUM)
            batch = following
        acc, top, total = _merge_batch(acc, top, total, batch, scale_log2, UNROLL, HAS_SUM)
    else:
        for first in tl.range(0, num_partials, KV_SPLIT * UNROLL):
            following = _load_batch(
                first + KV_SPLIT * UNROLL,
                row,
                num_rows,
                channel,
                num_partials,
                partials_ptr,
                max_ptr,
                sum_ptr,
                D,
                KV_SPLIT,
                UNROLL,
                HAS_SUM,
            )
            acc, top, total = _merge_batch(acc, top, total, batch, scale_log2, UNROLL, HAS_SUM)
            batch = following

    # Combine the groups. One that saw no partial has sum 0 and a zero accumulator, whatever its factor.
    row_top = tl.max(top, axis=0)
    factor = tl.exp2((top - row_top) * scale_log2)
    row_total = tl.sum(total * factor, axis=0)
    x = tl.sum(acc * factor[:, None], axis=0)
    if HAS_SINK:
        with_sink = tl.maximum(row_top, sink)
        rescale = tl.exp2((row_top - with_sink) * scale_log2)
        row_total = row_total * rescale + tl.exp2((sink - with_sink) * scale_log2)
        x = x * rescale
        row_top = with_sink
    if STATS:
        if d0 == 0:
            tl.store(stats_ptr + row.to(tl.int64) * 2, tl.where(row_top <= _LOWEST, float("-inf"), row_top))
            tl.store(stats_ptr + row.to(tl.int64) * 2 + 1, row_total)
    # Nothing attended and no sink: zeros. A NaN total stays a NaN.
    x = x * tl.where(row_total == 0.0, 0.0, 1.0 / row_total)
    finish_rows(
        x[None, :],
        out_ptr,
        scales_ptr,
        cos_ptr,
        sin_ptr,
        table_offsets,
        cos_stride,
        sin_stride,
        token + tl.zeros([1], tl.int32),
        head + tl.zeros([1], tl.int32),
        tl.full([1], True, tl.int1),
        total_tokens,
        d0,
        floor,
        1,
        WIDTH,
        D,
        HPG,
        HALF,
        BLOCK,
        QUANT,
        NATIVE,
        tables,
    )
    if DISCARD > 0:
        discard_partials(partials_ptr, row, num_rows, d0, num_partials, 1, WIDTH, D, DISCARD)
