# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"
"""Turns a dense attention mask into per-query lists of the visible keys.

A dense mask over gathered keys (top-k selection spelled as -inf) has no empty tiles to skip, but few visible keys: a
list of them makes attention's work proportional to what is attended.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit(do_not_specialize=[
    "token0", "stride_batch", "queries", "keys", "list_stride", "causal", "window", "batched", "threshold",
])  # fmt: skip
def list_visible_keys(
    mask,
    index,
    bias,
    length,
    token0,
    queries,
    keys,
    stride_batch,
    stride_query,
    stride_key,
    list_stride,
    causal,
    window,
    batched,
    threshold,
    IS_BOOL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per query: append the visible keys' rows (and the mask's values) to the query's list, in order."""
    row = tl.program_id(0)
    token = token0 + row
    batch = token // queries
    query = token % queries
    last = query + keys - queries
    low = 0
    high = keys
    if window > 0:
        low = tl.maximum(last - window + 1, 0) // BLOCK * BLOCK
    if causal:
        high = tl.minimum(tl.maximum(last + 1, 0), keys)
    first_row = batch * batched * keys
    base = mask + batch.to(tl.int64) * stride_batch + query.to(tl.int64) * stride_query
    out = row.to(tl.int64) * list_stride
    written = low * 0
    begin = low
    while begin < high:
        n = begin + tl.arange(0, BLOCK)
        seen = n < high
        if window > 0:
            seen = seen & (n > last - window)
        value = tl.load(base + n.to(tl.int64) * stride_key, mask=seen, other=0)
        if IS_BOOL:
            seen = seen & (value != 0)
        else:
            seen = seen & (value.to(tl.float32) > threshold)
        place = written + tl.cumsum(seen.to(tl.int32), 0) - 1
        tl.store(index + out + place, first_row + n, mask=seen)
        if not IS_BOOL:
            tl.store(bias + out + place, value, mask=seen)
        written += tl.sum(seen.to(tl.int32), 0)
        begin += BLOCK
    tl.store(length + row, written)


def visible_key_lists(
    mask: Tensor,
    token0: int,
    tokens: int,
    *,
    kv_batches: int,
    causal: bool,
    window: int,
    index: Tensor,
    bias: Tensor | None,
    length: Tensor,
) -> None:
    """Fill the lists of queries token0 .. token0 + tokens - 1, counted over [B, S].

    mask: [B or 1, S, N], bool (True = attend) or floating. A floating value at or below half of its dtype's lowest
    counts as not attended, as -inf does: next to any attended key its weight is an exact zero (only a row in which
    every key carries such a value and that has no sink would differ: it gives zeros here).
    index: int32 [tokens, >= N], rows of kv [B or 1, N, D] flattened; bias: like index in the mask's dtype, for floating
    masks; length: int32 [tokens].
    """
    is_bool = mask.dtype == torch.bool
    batches, queries, keys = mask.shape
    threshold = 0.0 if is_bool else max(torch.finfo(mask.dtype).min / 2, -1.7e38)
    view = mask.view(torch.uint8) if is_bool else mask
    list_visible_keys[(tokens,)](
        view,
        index,
        index if bias is None else bias,
        length,
        token0,
        queries,
        keys,
        0 if batches == 1 else view.stride(0),
        view.stride(1),
        view.stride(2),
        index.stride(0),
        int(causal),
        window,
        int(kv_batches > 1),
        threshold,
        IS_BOOL=is_bool,
        BLOCK=BLOCK,
        num_warps=4,
    )
