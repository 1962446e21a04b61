# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-calls
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"
"""Merge of few partials of many rows, several rows per program, and the epilogue of the whole chain.

The kernel of :mod:`.merge` gives every row a program of its own, which suits many partials of few rows. From some
hundred rows on, starting its thousands of small programs costs more than their work. Here a warp merges whole rows, and
all loads of a program are in flight before the first is used.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ..launching import at
from .calling import keep_shared_memory
from .discard import discard_partials, discarding
from .epilogue import finish_rows, load_tables
from .interpreter import e4m3_is_native, load_fp32, pdl_release, pdl_wait, supports_pdl
from .merge import Epilogue
from .rope_quant import scale_pointer

# Partials that a program loads: counts between are rounded up, so that few kernels are compiled.
COUNTS = (2, 3, 4, 6, 9, 12, 18)


@triton.jit(do_not_specialize=["num_partials", "num_rows", "num_heads", "token0", "total_tokens", "table_rows"])
def _merge_rows_kernel(
    partials_ptr,
    lse_ptr,
    sink_ptr,
    out_ptr,
    scales_ptr,
    cos_ptr,
    sin_ptr,
    num_partials,
    num_rows,
    num_heads,
    token0,  # token of the outputs that the partials' first is
    total_tokens,  # of the outputs
    table_rows,
    cos_stride_t,
    cos_stride,
    sin_stride_t,
    sin_stride,
    floor,
    PARTIALS: tl.constexpr,
    CERTAIN: tl.constexpr,  # so many of them always exist
    ROWS: tl.constexpr,
    HAS_SINK: tl.constexpr,
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
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = row < num_rows
    row = tl.minimum(row, num_rows - 1)
    token = token0 + row // num_heads
    head = row % num_heads
    channel = tl.arange(0, D)
    table_row = (token % table_rows).to(tl.int64)
    table_offsets = (table_row * cos_stride_t, table_row * sin_stride_t)
    pdl_release(PDL)
    if READY:
        tables = load_tables(cos_ptr, sin_ptr, table_offsets, cos_stride, sin_stride, HALF)
        if HAS_SINK:
            sink = load_fp32(tl.load(sink_ptr + head)) * 1.4426950408889634
    pdl_wait(PDL)

    if HAS_SINK:
        if not READY:
            sink = load_fp32(tl.load(sink_ptr + head)) * 1.4426950408889634
    values = ()
    tops = ()
    for slot in tl.static_range(0, PARTIALS):
        statistic = slot * num_rows + row
        address = partials_ptr + statistic.to(tl.int64)[:, None] * D + channel[None, :]
        if slot < CERTAIN:
            values = values + (tl.load(address),)  # type: ignore[assignment]
            top = tl.load(lse_ptr + statistic)
        else:
            present = slot < num_partials
            values = values + (tl.load(address, mask=present, other=0.0),)  # type: ignore[assignment]
            top = tl.load(lse_ptr + statistic, mask=present, other=float("-inf"))
        tops = tops + (top * 1.4426950408889634,)  # type: ignore[assignment]
    if not READY:
        tl.debug_barrier()  # all loads above are issued before anything waits for the tables
        tables = load_tables(cos_ptr, sin_ptr, table_offsets, cos_stride, sin_stride, HALF)
    top = tops[0]  # type: ignore[misc]
    for slot in tl.static_range(1, PARTIALS):
        top = tl.maximum(top, tops[slot])
    if HAS_SINK:
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)  # nothing attended: every weight is zero
    acc = tl.zeros([ROWS, D], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for slot in tl.static_range(0, PARTIALS):
        weight = tl.exp2(tops[slot] - top)
        # an empty partial is never used: its rows may hold anything
        acc += tl.where(weight[:, None] == 0.0, 0.0, load_fp32(values[slot])) * weight[:, None]
        total += weight
    if HAS_SINK:
        total += tl.exp2(sink - top)
    acc = acc * tl.where(total == 0.0, 0.0, 1.0 / total)[:, None]
    finish_rows(
        acc,
        out_ptr,
        scales_ptr,
        cos_ptr,
        sin_ptr,
        table_offsets,
        cos_stride,
        sin_stride,
        token,
        head,
        row_mask,
        total_tokens,
        0,
        floor,
        ROWS,
        D,
        D,
        HPG,
        HALF,
        BLOCK,
        QUANT,
        NATIVE,
        tables,
    )
    if DISCARD > 0:
        discard_partials(partials_ptr, tl.program_id(0) * ROWS, num_rows, 0, num_partials, ROWS, D, D, DISCARD)


def merge_rows_into(
    out: torch.Tensor,
    scales: torch.Tensor | None,
    partials: torch.Tensor,
    lse: torch.Tensor,
    sink: torch.Tensor | None,
    epilogue: Epilogue,
    *,
    rows: int,
    num_warps: int,
    pdl: bool,
    token0: int = 0,
    ready: bool = False,
    last_use: bool = False,
) -> None:
    """Merge ``partials`` [P, T, H, D] with natural-log ``lse`` [P, T, H] into ``out`` [G, T, K] (codes as uint8 where
    the epilogue quantises, with their ``scales``), ``rows`` rows per program. P is at most 18. token0, ready, last_use:
    as of :func:`.merge.merge_into`. Arguments are not checked here."""
    count, tokens, heads, dim = partials.shape
    half, quant = epilogue.cos.shape[-1], epilogue.quant
    cos, sin = epilogue.cos, epilogue.sin
    slots = next(c for c in COUNTS if c >= count)
    pdl = pdl and supports_pdl(partials.device)
    launched = at(_merge_rows_kernel, (math.ceil(tokens * heads / rows),))(
        partials,
        lse,
        lse if sink is None else sink,
        out,
        out if scales is None else scale_pointer(scales, quant),
        cos,
        sin,
        count,
        tokens * heads,
        heads,
        token0,
        out.shape[1],
        cos.shape[0],
        *cos.stride(),
        *sin.stride(),
        epilogue.floor,
        PARTIALS=slots,
        CERTAIN=max((c for c in COUNTS if c < slots), default=slots - 1) + 1,
        ROWS=rows,
        HAS_SINK=sink is not None,
        DISCARD=discarding(partials, num_warps) if last_use else 0,
        D=dim,
        HPG=heads // epilogue.groups,
        HALF=half,
        BLOCK=epilogue.block,
        QUANT=quant,
        NATIVE=e4m3_is_native(partials.device),
        READY=ready,
        PDL=pdl,
        num_warps=num_warps,
        **({"launch_pdl": True} if pdl else {}),
    )
    if last_use:
        keep_shared_memory(launched)
