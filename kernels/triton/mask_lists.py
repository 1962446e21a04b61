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
from torch import Tensor

from ..launching import at
from .interpreter import interpreted, load_fp32

WORKSPACE_BYTES = 64 << 20  # of the lists of one pass


@triton.jit
def _scan(mask_row, stride_key, index_row, bias_row, first_key, low, high, first, lowest, BLOCK: tl.constexpr,
          BOOL: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """Append the visible keys among [max(low, first), high) to a query's list, in order; returns how many."""
    count = 0
    for start in tl.range(low, high, BLOCK):
        n = start + tl.arange(0, BLOCK)
        inside = (n < high) & (n >= first)
        value = tl.load(mask_row + n.to(tl.int64) * stride_key, mask=inside, other=0)
        if BOOL:
            visible = inside & (value != 0)
        else:
            visible = inside & (load_fp32(value) > lowest)
        taken = visible.to(tl.int32)
        place = count + tl.cumsum(taken, 0) - taken
        tl.store(index_row + place, first_key + n, mask=visible)
        if BIAS:
            tl.store(bias_row + place, value, mask=visible)
        count += tl.sum(taken, 0)
    return count


@triton.jit(
    do_not_specialize=[
        "token0", "stride_batch", "queries", "keys", "list_stride", "causal", "window", "key_stride_batch", "lowest",
    ]
)  # fmt: skip
def list_visible_keys(
    mask,
    stride_batch,
    stride_query,
    stride_key,
    index,
    bias,
    length,
    token0,
    queries,
    keys,
    list_stride,
    causal,
    window,
    key_stride_batch,
    lowest,
    BLOCK: tl.constexpr,
    BOOL: tl.constexpr,
    BIAS: tl.constexpr,
    MINIMUM_ROWS: tl.constexpr,
):
    """One program per query."""
    row = tl.program_id(0)
    token = token0 + row
    batch = token // queries
    query = token % queries
    last = query + keys - queries
    first = 0
    high = keys
    if window > 0:
        first = tl.maximum(last - window + 1, 0)
    if causal != 0:
        high = tl.minimum(tl.maximum(last + 1, 0), keys)
    low = first // BLOCK * BLOCK
    mask_row = mask + batch.to(tl.int64) * stride_batch + query.to(tl.int64) * stride_query
    offset = row.to(tl.int64) * list_stride
    first_key = batch * key_stride_batch
    count = _scan(
        mask_row, stride_key, index + offset, bias + offset, first_key, low, high, first, lowest, BLOCK, BOOL, BIAS
    )
    if MINIMUM_ROWS:
        # A row of nothing but dtype-minimum values, and no sink: its keys share the weight, as in the formula.
        if count == 0:
            everything = -float("inf")
            count = _scan(
                mask_row, stride_key, index + offset, bias + offset, first_key, low, high, first, everything, BLOCK,
                BOOL, BIAS,
            )  # fmt: skip
    tl.store(length + row, count)


def rows_per_pass(keys: int, bytes_per_key: int = 4) -> int:
    """Mask rows whose lists fit the workspace."""
    return max(1, WORKSPACE_BYTES // (bytes_per_key * max(1, keys)))


def visible_key_lists(
    mask: Tensor,
    token0: int,
    tokens: int,
    *,
    causal: bool,
    window: int,
    index: Tensor,
    length: Tensor,
    bias: Tensor | None = None,
    key_stride_batch: int = 0,
    minimum_rows: bool = False,
) -> None:
    """Fill the lists of mask rows token0 .. token0 + tokens - 1, counted over the mask's first two dimensions (rows of
    a mask without batch dimension repeat for every sequence).

    mask: [B or 1, S, N], bool (True = attend) or floating. A floating value at or below -1e30 or half of its dtype's
    lowest counts as not attended, as -inf does: next to any attended key its weight is an exact zero. With
    `minimum_rows`, a row that has only such values lists all that are not -inf (it matters without a sink only).
    causal, window: applied as well.
    index: int32 [tokens, >= N], ascending keys, plus key_stride_batch per sequence; entries behind the length are not
    written. bias: like index in the mask's dtype, to take the mask's values. length: int32 [tokens].
    """
    boolean = mask.dtype == torch.bool
    batches, queries, keys = mask.shape
    view = mask.view(torch.uint8) if boolean else mask
    at(list_visible_keys, (tokens,))(
        view,
        0 if batches == 1 else view.stride(0),
        view.stride(1),
        view.stride(2),
        index,
        index if bias is None else bias,
        length,
        token0,
        queries,
        keys,
        index.stride(0),
        int(causal),
        window,
        key_stride_batch,
        0.0 if boolean else max(torch.finfo(mask.dtype).min / 2, -1e30),
        BLOCK=128 if interpreted() else 1024,
        BOOL=boolean,
        BIAS=bias is not None,
        MINIMUM_ROWS=minimum_rows and not boolean,
        num_warps=4,
    )
