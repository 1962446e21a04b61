# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"
"""Turns a dense attention mask into the list of keys each query attends.

DeepSeek-V4's masks are sparse in a way no tile grid follows: a window of 128 keys, plus the top-k rows of a compressed
cache anywhere. Attention over the list does work for the attended keys only, and never reads a masked row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .interpreter import load_fp32

# Mask values at or below this give a softmax weight of exactly zero next to any other logit: exp(-1e30) = 0.
NEVER = tl.constexpr(-1.0e30)
WORKSPACE_BYTES = 64 << 20


@triton.jit
def _visible(mask_row, mask_stride, n, keys, end, window, lowest, BOOL: tl.constexpr, CAUSAL: tl.constexpr,
             WINDOW: tl.constexpr):  # fmt: skip
    inside = n < keys
    value = tl.load(mask_row + n.to(tl.int64) * mask_stride, mask=inside, other=0)
    if BOOL:
        visible = inside & (value != 0)
    else:
        visible = inside & (load_fp32(value) > lowest)
    if CAUSAL:
        visible = visible & (n < end)
    if WINDOW:
        visible = visible & (n >= end - window)
    return visible


@triton.jit
def _scan(mask_row, mask_stride, out_row, keys, end, window, lowest, BLOCK: tl.constexpr, BOOL: tl.constexpr,
          CAUSAL: tl.constexpr, WINDOW: tl.constexpr):  # fmt: skip
    count = 0
    for start in tl.range(0, keys, BLOCK):
        n = start + tl.arange(0, BLOCK)
        taken = _visible(mask_row, mask_stride, n, keys, end, window, lowest, BOOL, CAUSAL, WINDOW).to(tl.int32)
        position = count + tl.cumsum(taken, 0) - taken
        tl.store(out_row + position, n, mask=taken != 0)
        count += tl.sum(taken, 0)
    return count


@triton.jit(do_not_specialize=[
    "mask_stride_b", "first_row", "queries", "keys", "offset", "window", "out_stride",
])  # fmt: skip
def _compact_kernel(
    mask_ptr,
    mask_stride_b,
    mask_stride_s,
    mask_stride_n,
    out_ptr,
    out_stride,
    counts_ptr,
    first_row,
    queries,
    keys,
    offset,
    window,
    BLOCK: tl.constexpr,
    BOOL: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINK: tl.constexpr,
):
    row = first_row + tl.program_id(0)
    batch = (row // queries).to(tl.int64)
    query = (row % queries).to(tl.int64)
    mask_row = mask_ptr + batch * mask_stride_b + query * mask_stride_s
    out_row = out_ptr + tl.program_id(0).to(tl.int64) * out_stride
    end = query.to(tl.int32) + offset + 1
    count = _scan(mask_row, mask_stride_n, out_row, keys, end, window, NEVER, BLOCK, BOOL, CAUSAL, WINDOW)
    if not BOOL:
        if not HAS_SINK:
            # A row of nothing but dtype-minimum values, and no sink: its keys share the weight, as in the formula.
            if count == 0:
                count = _scan(
                    mask_row, mask_stride_n, out_row, keys, end, window, -float("inf"), BLOCK, BOOL, CAUSAL, WINDOW
                )
    tl.store(counts_ptr + tl.program_id(0), count)


def rows_per_pass(keys: int) -> int:
    """Mask rows whose index lists fit the workspace."""
    return max(1, WORKSPACE_BYTES // (4 * max(1, keys)))


def compact_mask(
    mask: torch.Tensor, first_row: int, rows: int, keys: int, causal: bool, window: int, has_sink: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Index lists of ``rows`` consecutive rows of ``mask`` [Bm, S, N], counted over its first two dimensions.

    Returns indices int32 [rows, N] in ascending order (entries behind the count are uninitialised) and counts
    int32 [rows]. ``causal`` and ``window`` are applied as well.
    """
    queries = mask.shape[1]
    indices = torch.empty((rows, keys), dtype=torch.int32, device=mask.device)
    counts = torch.empty((rows,), dtype=torch.int32, device=mask.device)
    boolean = mask.dtype == torch.bool
    block = 128 if keys <= 128 else 1024  # two sizes only: the number of compiled kernels stays bounded
    _compact_kernel[(rows,)](
        mask.view(torch.uint8) if boolean else mask,
        *mask.stride(),
        indices,
        keys,
        counts,
        first_row,
        queries,
        keys,
        keys - queries,
        window,
        BLOCK=block,
        BOOL=boolean,
        CAUSAL=causal,
        WINDOW=window > 0,
        HAS_SINK=has_sink,
        num_warps=4,
    )
    return indices, counts
