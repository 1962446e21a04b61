# SPDX-License-Identifier: Apache-2.0
"""Reference of attention over KV rows picked by indices, from one or two pools."""

from collections.abc import Iterator

import torch
from torch import Tensor

from .quant import quantise
from .rope import group_heads, rotate_inverse
from .softmax import compute_dtype, divide_or_zero, rows_per_chunk, softmax_numerator

NEG_INF = float("-inf")
# A split owns whole blocks of this many index columns, as the kernels' key tiles do.
SPLIT_BLOCK = 64


def _pool(kv: Tensor, indices: Tensor, lengths: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows [t, K, D] picked by ``indices`` [t, K] and their validity [t, K]; invalid rows are zero."""
    valid = (indices >= 0) & (indices < kv.shape[0])
    if lengths is not None:
        valid &= torch.arange(indices.shape[1], device=indices.device) < lengths.unsqueeze(-1)
    if kv.shape[0] == 0:
        rows = torch.zeros(*indices.shape, kv.shape[1], dtype=dtype, device=kv.device)
    else:
        rows = kv[torch.where(valid, indices, 0)].to(dtype)
        # Zero, not only masked: a NaN row behind -1 must not leak through 0 * NaN.
        rows.masked_fill_(~valid.unsqueeze(-1), 0.0)
    return rows, valid


def _chunks(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    scale: float,
    lengths: Tensor | None,
    extra_kv: Tensor | None,
    extra_indices: Tensor | None,
    extra_lengths: Tensor | None,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield (token slice, scores [t, H, K], rows [t, K, D]) over chunks of tokens, both pools side by side."""
    tokens, heads, dim = q.shape
    dtype = compute_dtype(q.dtype)
    columns = indices.shape[1] + (0 if extra_indices is None else extra_indices.shape[1])
    step = rows_per_chunk(columns * (dim + heads) * dtype.itemsize)
    for start in range(0, tokens, step):
        part = slice(start, min(tokens, start + step))
        rows, valid = _pool(kv, indices[part], None if lengths is None else lengths[part], dtype)
        if extra_kv is not None and extra_indices is not None:
            more = _pool(extra_kv, extra_indices[part], None if extra_lengths is None else extra_lengths[part], dtype)
            rows, valid = torch.cat((rows, more[0]), 1), torch.cat((valid, more[1]), 1)
        scores = (q[part].to(dtype) @ rows.mT).mul_(scale)
        yield part, scores.masked_fill_(~valid.unsqueeze(1), NEG_INF), rows


def _attend(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sink: Tensor | None,
    scale: float,
    lengths: Tensor | None,
    extra_kv: Tensor | None,
    extra_indices: Tensor | None,
    extra_lengths: Tensor | None,
) -> Tensor:
    out = torch.zeros(q.shape, dtype=compute_dtype(q.dtype), device=q.device)
    for part, scores, rows in _chunks(q, kv, indices, scale, lengths, extra_kv, extra_indices, extra_lengths):
        p, denominator, _ = softmax_numerator(scores, sink)
        out[part] = divide_or_zero(p @ rows, denominator)
    return out


def attention_gathered(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sink: Tensor | None,
    scale: float,
    lengths: Tensor | None = None,
    extra_kv: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_lengths: Tensor | None = None,
) -> Tensor:
    """Attention of ``q`` [T, H, D] over the rows ``kv[indices[t]]`` (and ``extra_kv[extra_indices[t]]``)."""
    return _attend(q, kv, indices, sink, scale, lengths, extra_kv, extra_indices, extra_lengths).to(q.dtype)


def attention_gathered_rope(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sink: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    groups: int,
    lengths: Tensor | None = None,
    extra_kv: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_lengths: Tensor | None = None,
) -> Tensor:
    """Gathered attention, inverse RoPE, one rounding: [G, T, K] in q.dtype."""
    out = _attend(q, kv, indices, sink, scale, lengths, extra_kv, extra_indices, extra_lengths)
    return group_heads(rotate_inverse(out, cos, sin), groups).to(q.dtype)


def attention_gathered_rope_quant(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sink: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    groups: int,
    block: int = 128,
    scale_rule: str = "fp32",
    floor: float = 1e-12,
    pack_scales: bool = False,
    lengths: Tensor | None = None,
    extra_kv: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gathered attention, inverse RoPE and quantisation of the unrounded result: (codes, scales)."""
    out = _attend(q, kv, indices, sink, scale, lengths, extra_kv, extra_indices, extra_lengths)
    return quantise(group_heads(rotate_inverse(out, cos, sin), groups), block, scale_rule, floor, pack_scales)


def split_ranges(columns: int, extra_columns: int, num_splits: int) -> list[tuple[int, int]]:
    """Index-column range of every split over the two pools laid side by side.

    Each pool is padded to whole blocks of ``SPLIT_BLOCK`` columns and every split owns
    ``ceil(blocks / num_splits)`` consecutive blocks; trailing splits may be empty. Ranges are given in the unpadded
    concatenation of both pools.
    """
    first = -(-columns // SPLIT_BLOCK)
    blocks = first + -(-extra_columns // SPLIT_BLOCK)
    per_split = -(-blocks // num_splits)

    def column(block: int) -> int:
        if block <= first:
            return min(columns, block * SPLIT_BLOCK)
        return columns + min(extra_columns, (block - first) * SPLIT_BLOCK)

    edges = [column(min(blocks, split * per_split)) for split in range(num_splits + 1)]
    return list(zip(edges[:-1], edges[1:]))


def attention_partials(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    scale: float,
    num_splits: int,
    lengths: Tensor | None = None,
    extra_kv: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalised partial results of ``num_splits`` ranges of keys, without sink.

    Returns partials [P, T, H, D] fp32 (fp64 for fp64 inputs) and the natural-log lse [P, T, H]; a range without a
    valid key has partial 0 and lse -inf.
    """
    tokens, heads, dim = q.shape
    dtype = compute_dtype(q.dtype)
    partials = torch.zeros(num_splits, tokens, heads, dim, dtype=dtype, device=q.device)
    lse = torch.full((num_splits, tokens, heads), NEG_INF, dtype=dtype, device=q.device)
    ranges = split_ranges(indices.shape[1], 0 if extra_indices is None else extra_indices.shape[1], num_splits)
    for part, scores, rows in _chunks(q, kv, indices, scale, lengths, extra_kv, extra_indices, extra_lengths):
        for split, (low, high) in enumerate(ranges):
            if low == high:
                continue
            p, denominator, top = softmax_numerator(scores[..., low:high], None)
            partials[split, part] = divide_or_zero(p @ rows[:, low:high], denominator)
            lse[split, part] = torch.where(denominator == 0, NEG_INF, denominator.log() + top)
    return partials, lse
