# SPDX-License-Identifier: Apache-2.0
"""Ops that merge split-KV partial results, alone or with the epilogue.

Shapes: partials [P, T, H, D] fp32, bf16 or fp16 (fp64 on the reference path), lse_or_max [P, T, H] fp32, sum [P, T, H]
fp32 or None, sink [H] (a logit) or None.

``sum`` None: partials are normalised and ``lse_or_max`` is their natural-log lse. ``sum`` given: partials are
un-normalised, ``lse_or_max`` is their maximum, weighted ``exp(stat_scale * (max - m))``: ``stat_scale`` is 1 for
natural logits, ln 2 for maxima in base 2, or the softmax scale for maxima of unscaled scores. A partial with -inf (or
sum 0) is empty and never read into the result; with nothing attended and no sink the result is zeros.

Stats [T, H, 2]: (max, sum) over all partials and the sink, max in the units of ``lse_or_max``.
``kv_split``: groups of partials merged concurrently (1, 2, 4, 8 or 16); None = the policy's choice.
"""

import math

import torch
from torch import Tensor

from .. import reference
from . import checks, layout
from .attention import MODES, QUANT_ARGUMENTS
from .registry import OpSpec, register

KV_SPLITS = (1, 2, 4, 8, 16)
_TENSORS = "Tensor partials, Tensor lse_or_max, Tensor? sum, Tensor? sink"


def _check(
    op: str,
    partials: Tensor,
    lse_or_max: Tensor,
    sum: Tensor | None,
    sink: Tensor | None,
    stat_scale: float,
    kv_split: int | None,
    out_dtype: torch.dtype | None,
    **more: Tensor | None,
) -> None:
    checks.check_same_device(op, partials, lse_or_max=lse_or_max, sum=sum, sink=sink, **more)
    checks.check_dtype(op, "partials", partials, checks.ACTIVATIONS)
    checks.check_shape(op, "partials", partials, (None, None, None, None), "[P, T, H, D]")
    splits, tokens, heads, _ = partials.shape
    if checks.known(splits) and splits < 1:
        checks.fail(op, "at least one partial", "0")
    statistics = torch.float64 if partials.dtype == torch.float64 else torch.float32
    for name, tensor in (("lse_or_max", lse_or_max), ("sum", sum)):
        if tensor is not None:
            checks.check_dtype(op, name, tensor, (statistics,))
            checks.check_shape(op, name, tensor, (splits, tokens, heads), "[P, T, H]")
    checks.check_sink(op, sink, heads)
    if not (math.isfinite(stat_scale) and stat_scale > 0):
        checks.fail(op, "a finite stat_scale > 0", str(stat_scale))
    if sum is None and stat_scale != 1.0:
        checks.fail(op, "stat_scale = 1 for normalised partials (their lse is a natural logarithm)", str(stat_scale))
    if kv_split is not None and kv_split not in KV_SPLITS:
        checks.fail(op, f"kv_split to be None or one of {KV_SPLITS}", str(kv_split))
    if out_dtype is not None and out_dtype not in checks.ACTIVATIONS:
        raise TypeError(
            f"fusion_pass::{op}: expected out_dtype to be a floating dtype of activations, got {out_dtype}."
        )


def _check_rope(op: str, partials: Tensor, cos: Tensor, sin: Tensor, groups: int) -> None:
    checks.check_token_rope(op, cos, sin, partials.shape[1])
    checks.check_groups(op, partials.shape[2], partials.shape[3], groups, cos)


def check_merge(
    partials: Tensor,
    lse_or_max: Tensor,
    sum: Tensor | None,
    sink: Tensor | None,
    stat_scale: float,
    kv_split: int | None,
    return_stats: bool,
    out_dtype: torch.dtype | None,
) -> None:
    _check("merge_partials", partials, lse_or_max, sum, sink, stat_scale, kv_split, out_dtype)


def empty_merge(
    partials: Tensor,
    lse_or_max: Tensor,
    sum: Tensor | None,
    sink: Tensor | None,
    stat_scale: float,
    kv_split: int | None,
    return_stats: bool,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    _, tokens, heads, dim = partials.shape
    out = partials.new_empty((tokens, heads, dim), dtype=out_dtype or partials.dtype)
    return out, lse_or_max.new_empty((tokens, heads, 2) if return_stats else (0,))


def check_merge_rope(
    partials: Tensor,
    lse_or_max: Tensor,
    sum: Tensor | None,
    sink: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    groups: int,
    stat_scale: float,
    kv_split: int | None,
    out_dtype: torch.dtype | None,
) -> None:
    op = "merge_partials_rope"
    _check(op, partials, lse_or_max, sum, sink, stat_scale, kv_split, out_dtype, cos=cos, sin=sin)
    _check_rope(op, partials, cos, sin, groups)


def empty_merge_rope(
    partials: Tensor,
    lse_or_max: Tensor,
    sum: Tensor | None,
    sink: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    groups: int,
    stat_scale: float,
    kv_split: int | None,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor]:
    return layout.grouped(partials, partials.shape[1:], groups, dtype=out_dtype)


def check_merge_rope_quant(
    partials: Tensor,
    lse_or_max: Tensor,
    sum: Tensor | None,
    sink: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    groups: int,
    block: int,
    scale_rule: str,
    floor: float,
    pack_scales: bool,
    stat_scale: float,
    kv_split: int | None,
) -> None:
    op = "merge_partials_rope_quant"
    _check(op, partials, lse_or_max, sum, sink, stat_scale, kv_split, None, cos=cos, sin=sin)
    _check_rope(op, partials, cos, sin, groups)
    heads, dim = partials.shape[2:]
    checks.check_quant(op, dim, block, scale_rule, floor, pack_scales, heads // groups * dim)


def empty_merge_rope_quant(
    partials: Tensor,
    lse_or_max: Tensor,
    sum: Tensor | None,
    sink: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    groups: int,
    block: int,
    scale_rule: str,
    floor: float,
    pack_scales: bool,
    stat_scale: float,
    kv_split: int | None,
) -> tuple[Tensor, Tensor]:
    _, tokens, heads, dim = partials.shape
    return layout.quantised(partials, tokens, heads // groups * dim, groups, block, pack_scales)


register(
    OpSpec(
        "merge_partials",
        f"{_TENSORS}, float stat_scale=1.0, int? kv_split=None, bool return_stats=False, ScalarType? out_dtype=None",
        ("out", "stats"),
        check_merge,
        empty_merge,
        reference.merge_partials,
        MODES,
    )
)
register(
    OpSpec(
        "merge_partials_rope",
        f"{_TENSORS}, Tensor cos, Tensor sin, int groups, float stat_scale=1.0, int? kv_split=None, "
        "ScalarType? out_dtype=None",
        ("out",),
        check_merge_rope,
        empty_merge_rope,
        reference.merge_partials_rope,
        MODES,
    )
)
register(
    OpSpec(
        "merge_partials_rope_quant",
        f"{_TENSORS}, Tensor cos, Tensor sin, int groups, {QUANT_ARGUMENTS}, float stat_scale=1.0, int? kv_split=None",
        ("codes", "scales"),
        check_merge_rope_quant,
        empty_merge_rope_quant,
        reference.merge_partials_rope_quant,
        MODES,
    )
)
