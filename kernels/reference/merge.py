# SPDX-License-Identifier: Apache-2.0
"""Reference of the merge of split-KV partial results."""

import torch
from torch import Tensor

from ..modes import current
from .quant import quantise
from .rope import group_heads, rotate_inverse
from .softmax import compute_dtype, divide_or_zero

NEG_INF = float("-inf")


def _merge(
    partials: Tensor, lse_or_max: Tensor, sum: Tensor | None, sink: Tensor | None, stat_scale: float
) -> tuple[Tensor, Tensor]:
    """Merged rows [T, H, D] in the compute dtype and their stats [T, H, 2] = (max, sum), sink included.

    ``max`` is in the units of ``lse_or_max`` (logits divided by ``stat_scale``), ``sum`` is relative to it.
    """
    if current().batch_invariant and partials.shape[1] > 1:
        alone = [
            _merge(partials[:, t : t + 1], lse_or_max[:, t : t + 1], None if sum is None else sum[:, t : t + 1], sink,
                   stat_scale)
            for t in range(partials.shape[1])
        ]  # fmt: skip
        return torch.cat([row for row, _ in alone]), torch.cat([stats for _, stats in alone])
    dtype = compute_dtype(partials.dtype)
    top_of = lse_or_max.to(dtype)
    weight_of = torch.ones_like(top_of) if sum is None else sum.to(dtype)
    if sum is None:
        stat_scale = 1.0
    empty = (top_of == NEG_INF) | (weight_of == 0)
    top_of = top_of.masked_fill(empty, NEG_INF)
    top = top_of.amax(0)
    sink_top = None if sink is None else sink.to(dtype) / stat_scale
    if sink_top is not None:
        top = torch.maximum(top, sink_top)
    shift = torch.where(top == NEG_INF, torch.zeros_like(top), top)
    factor = torch.exp(stat_scale * (top_of - shift)).masked_fill(empty, 0.0)
    denominator = (factor * weight_of.masked_fill(empty, 0.0)).sum(0)
    if sink_top is not None:
        denominator = denominator + torch.exp(stat_scale * (sink_top - shift))
    # An empty partial may hold anything (its producer need not write it): zero it, not only its weight.
    rows = partials.to(dtype).masked_fill(empty.unsqueeze(-1), 0.0)
    merged = divide_or_zero((rows * factor.unsqueeze(-1)).sum(0), denominator)
    return merged, torch.stack((top, denominator), dim=-1)


def merge_partials(
    partials: Tensor,
    lse_or_max: Tensor,
    sum: Tensor | None,
    sink: Tensor | None,
    stat_scale: float = 1.0,
    kv_split: int | None = None,
    return_stats: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge ``partials`` [P, T, H, D]; shapes as in :mod:`fusion_pass.kernels.ops.merge`.

    ``kv_split`` only changes the order of summation in a kernel; the reference ignores it.
    """
    merged, stats = _merge(partials, lse_or_max, sum, sink, stat_scale)
    stats = stats.to(lse_or_max.dtype) if return_stats else stats.new_empty(0, dtype=lse_or_max.dtype)
    return merged.to(out_dtype or partials.dtype), stats


def merge_partials_rope(
    partials: Tensor,
    lse_or_max: Tensor,
    sum: Tensor | None,
    sink: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    groups: int,
    stat_scale: float = 1.0,
    kv_split: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Merge, inverse RoPE in the compute dtype, one rounding: [G, T, K]."""
    merged, _ = _merge(partials, lse_or_max, sum, sink, stat_scale)
    return group_heads(rotate_inverse(merged, cos, sin), groups).to(out_dtype or partials.dtype)


def merge_partials_rope_quant(
    partials: Tensor,
    lse_or_max: Tensor,
    sum: Tensor | None,
    sink: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    groups: int,
    block: int = 128,
    scale_rule: str = "fp32",
    floor: float = 1e-12,
    pack_scales: bool = False,
    stat_scale: float = 1.0,
    kv_split: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge, inverse RoPE and quantisation of the unrounded result: (codes, scales)."""
    merged, _ = _merge(partials, lse_or_max, sum, sink, stat_scale)
    return quantise(group_heads(rotate_inverse(merged, cos, sin), groups), block, scale_rule, floor, pack_scales)
