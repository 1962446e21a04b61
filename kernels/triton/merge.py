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

import functools
import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from ..modes import current
from ..reduction import KvSplitDecision, choose_kv_split, default_layout, for_blocks
from .epilogue import QUANT_NONE, finish_rows, load_tables, quant_mode
from .interpreter import (
    device_of,
    e4m3_is_native,
    interpreted,
    load_fp32,
    pdl_release,
    pdl_wait,
    supports_pdl,
)
from .rope_quant import empty_quantized, scale_pointer

# Stands for "no partial yet": finite, so that differences of maxima never become inf - inf.
_LOWEST = tl.constexpr(-3.0e38)
# Partials per group of the kernels without a run-time loop: rounded up to these, so that the number of compiled kernels
# stays bounded whatever counts occur.
_STEP_BUCKETS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 18, 20, 24, 28, 32, 48, 64, 96, 128)


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


@triton.jit(do_not_specialize=["num_partials", "num_tokens", "num_heads"])
def _merge_kernel(
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
    D: tl.constexpr,
    HPG: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    QUANT: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    d0 = tl.program_id(1) * WIDTH
    num_rows = num_tokens * num_heads
    token = row // num_heads
    head = row % num_heads
    channel = d0 + tl.arange(0, WIDTH)
    pdl_release(PDL)
    pdl_wait(PDL)

    acc = tl.zeros([KV_SPLIT, WIDTH], tl.float32)
    top = tl.full([KV_SPLIT], _LOWEST, tl.float32)
    total = tl.zeros([KV_SPLIT], tl.float32)
    batch = _load_batch(
        0, row, num_rows, channel, num_partials, partials_ptr, max_ptr, sum_ptr, D, KV_SPLIT, UNROLL, HAS_SUM
    )
    # What the end of the row needs is loaded here: there the memory's latency would be waited out once more.
    table_offsets = (
        (token.to(tl.int64) * cos_stride_t) + tl.zeros([1], tl.int64),
        (token.to(tl.int64) * sin_stride_t) + tl.zeros([1], tl.int64),
    )
    tables = None
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
        num_tokens,
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


@dataclass(frozen=True)
class Epilogue:
    """What follows the merge: inverse RoPE with ``cos``, ``sin`` [T, half], regrouped into ``groups``; with ``quant``
    (a QUANT constant) E4M3 codes per ``block`` channels instead of rows. ``floor``: lower bound of the absolute
    maximum."""

    cos: torch.Tensor
    sin: torch.Tensor
    groups: int
    quant: int = 0
    block: int = 128
    floor: float = 1e-12


def unrolled_steps(num_partials: int, kv_split: int, limit: int) -> int:
    """Partials of a group that a kernel without a run-time loop covers, or 0 if there are more than ``limit`` of them.

    Rounded up to a bucket, so that the number of compiled kernels stays bounded whatever counts occur; the slots past
    the last partial are predicated off.
    """
    steps = -(-num_partials // kv_split)
    bucket = next((b for b in _STEP_BUCKETS if b >= steps), limit + 1)
    return bucket if bucket <= limit else 0


def batches(num_partials: int, decision: KvSplitDecision) -> tuple[int, int]:
    """(partials per group in one batch of loads, batches) that ``decision`` means for a count; 0 batches = a loop."""
    steps = unrolled_steps(num_partials, decision.kv_split, decision.unroll_limit)
    if not steps:
        return decision.unroll, 0
    batch = min(decision.batch or steps, steps)
    return batch, -(-steps // batch)


# A dict lookup per call instead of the walk through the table.
_choose = functools.lru_cache(maxsize=4096)(choose_kv_split)


def decide(partials: torch.Tensor, kv_split: int | None, *, epilogue: bool = False) -> KvSplitDecision:
    """The policy's decision for ``partials`` [P, T, H, D]: from shapes and the device only, so it holds under capture.

    kv_split: upper bound or None; epilogue: whether inverse RoPE (and quantisation) follow in the same kernel. A
    batch-invariant call takes the decision for one token, whatever the number of tokens.
    """
    num_partials, tokens, heads, dim = partials.shape
    if interpreted():  # there is no grid to fill
        return default_layout(
            kv_split or 1, head_dim=dim, element_size=partials.element_size(), reason="interpreted: bound as given"
        )
    capability, sm_count = device_of(partials)
    invariant = current().batch_invariant
    decision = _choose(
        num_partials=num_partials,
        rows=heads if invariant else tokens * heads,
        head_dim=dim,
        sm_count=sm_count,
        bound=kv_split,
        element_size=partials.element_size(),
        epilogue=epilogue,
        capability=capability,
    )
    # What suits one token is faster with dependent launch than many tokens are.
    return replace(decision, pdl=False) if invariant and decision.pdl else decision


def merge_into(
    out: torch.Tensor,
    scales: torch.Tensor | None,
    stats: torch.Tensor | None,
    partials: torch.Tensor,
    lse_or_max: torch.Tensor,
    sum: torch.Tensor | None,
    sink: torch.Tensor | None,
    stat_scale: float,
    decision: KvSplitDecision,
    epilogue: Epilogue | None = None,
) -> None:
    """Merge ``partials`` [P, T, H, D] into ``out``, contiguous: [T, H, D], or [G, T, K] with an epilogue (codes
    viewed as uint8 when it quantises, with their ``scales``). ``stats`` [T, H, 2] fp32 or None. Arguments are not
    checked here."""
    num_partials, tokens, heads, dim = partials.shape
    if tokens == 0:
        return
    partials, lse_or_max = partials.contiguous(), lse_or_max.contiguous()
    sum = None if sum is None else sum.contiguous()
    sink = None if sink is None else sink.contiguous()
    half, quant, block, floor, groups = 0, int(QUANT_NONE.value), 1, 1.0, 1
    cos = sin = lse_or_max  # not read without an epilogue
    strides: tuple[int, ...] = (0, 1, 0, 1)
    if epilogue is not None:
        half, groups = epilogue.cos.shape[-1], epilogue.groups
        quant, block, floor = epilogue.quant, epilogue.block, epilogue.floor
        cos, sin = epilogue.cos.expand(tokens, half), epilogue.sin.expand(tokens, half)
        strides = (*cos.stride(), *sin.stride())
    kv_split, width = decision.kv_split, decision.width
    if quant and width < block:
        raise ValueError(f"a tile of {width} channels cannot quantise blocks of {block}")
    unroll, count = batches(num_partials, decision)
    pdl = decision.pdl and supports_pdl(partials.device)
    _merge_kernel[(tokens * heads, dim // width)](
        partials,
        lse_or_max,
        lse_or_max if sum is None else sum,
        lse_or_max if sink is None else sink,
        out,
        out if scales is None else scale_pointer(scales, quant),
        out if stats is None else stats,
        cos,
        sin,
        num_partials,
        tokens,
        heads,
        *strides,
        stat_scale * math.log2(math.e),
        1.0 / stat_scale,
        floor,
        KV_SPLIT=kv_split,
        WIDTH=width,
        UNROLL=unroll,
        BATCHES=count,
        HAS_SUM=sum is not None,
        HAS_SINK=sink is not None,
        STATS=stats is not None,
        D=dim,
        HPG=heads // groups,
        HALF=half,
        BLOCK=block,
        QUANT=quant,
        NATIVE=e4m3_is_native(partials.device),
        PDL=pdl,
        num_warps=decision.num_warps,
        **({"launch_pdl": True} if pdl else {}),
    )


def refuses(partials: torch.Tensor, *tensors: torch.Tensor | None, out_dtype: torch.dtype | None = None) -> str | None:
    """Why the kernel cannot run these arguments (None: it can)."""
    floats = (torch.float32, torch.bfloat16, torch.float16)
    for tensor in (partials, *tensors):
        if tensor is not None and tensor.dtype not in floats:
            return f"{tensor.dtype} (the kernel computes in fp32)"
    if out_dtype is not None and out_dtype not in floats:
        return f"out_dtype {out_dtype}"
    return None


def merge_partials(
    partials: torch.Tensor,
    lse_or_max: torch.Tensor,
    sum: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    stat_scale: float = 1.0,
    kv_split: int | None = None,
    return_stats: bool = False,
    out_dtype: torch.dtype | None = None,
    *,
    decision: KvSplitDecision | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merged rows [T, H, D] and stats [T, H, 2] (or an empty tensor); see the op of this name for the arguments."""
    _, tokens, heads, dim = partials.shape
    out = partials.new_empty((tokens, heads, dim), dtype=out_dtype or partials.dtype)
    stats = lse_or_max.new_empty((tokens, heads, 2) if return_stats else (0,), dtype=torch.float32)
    decision = decision or decide(partials, kv_split)
    merge_into(out, None, stats if return_stats else None, partials, lse_or_max, sum, sink, stat_scale, decision)
    return out, stats


def merge_partials_rope(
    partials: torch.Tensor,
    lse_or_max: torch.Tensor,
    sum: torch.Tensor | None,
    sink: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    groups: int,
    stat_scale: float = 1.0,
    kv_split: int | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    decision: KvSplitDecision | None = None,
) -> torch.Tensor:
    """Merge and inverse RoPE: [G, T, K], rounded once."""
    _, tokens, heads, dim = partials.shape
    out = partials.new_empty((groups, tokens, heads // groups * dim), dtype=out_dtype or partials.dtype)
    decision = decision or decide(partials, kv_split, epilogue=True)
    epilogue = Epilogue(cos, sin, groups)
    merge_into(out, None, None, partials, lse_or_max, sum, sink, stat_scale, decision, epilogue)
    return out


def merge_partials_rope_quant(
    partials: torch.Tensor,
    lse_or_max: torch.Tensor,
    sum: torch.Tensor | None,
    sink: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    groups: int,
    block: int = 128,
    scale_rule: str = "fp32",
    floor: float = 1e-12,
    pack_scales: bool = False,
    stat_scale: float = 1.0,
    kv_split: int | None = None,
    *,
    decision: KvSplitDecision | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge, inverse RoPE and quantisation: (codes [G, T, K], scales)."""
    _, tokens, heads, dim = partials.shape
    quant = quant_mode(scale_rule, pack_scales)
    codes, scales = empty_quantized(tokens, heads, dim, groups, block, quant, partials.device)
    if decision is None:
        decision = for_blocks(decide(partials, kv_split, epilogue=True), block, dim, partials.element_size())
    epilogue = Epilogue(cos, sin, groups, quant, block, floor)
    merge_into(codes.view(torch.uint8), scales, None, partials, lse_or_max, sum, sink, stat_scale, decision, epilogue)
    return codes, scales
