# SPDX-License-Identifier: Apache-2.0
"""Ops of attention over gathered KV rows, and its split-KV partial results.

Shapes: q [T, H, D] (any strides), kv [N, D] in q's dtype, indices [T, K1] int32 or int64 (row of kv; negative or out of
range = masked), sink [H] or None, lengths [T] int32 or int64 or None (only the first lengths[t] columns of indices[t]
count), and a second pool with its own indices and lengths under the same softmax. A token without a valid key gives
zeros. cos and sin [T, rope_dim / 2].
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import reference
from . import checks, layout, values
from .attention import QUANT_ARGUMENTS
from .registry import OpSpec, register

_TENSORS = "Tensor q, Tensor kv, Tensor indices, Tensor? sink"
MODES = ("batch_invariant", "check_inputs")
_POOLS = "Tensor? lengths=None, Tensor? extra_kv=None, Tensor? extra_indices=None, Tensor? extra_lengths=None"


def _check_pool(op: str, prefix: str, q: Tensor, kv: Tensor, indices: Tensor, lengths: Tensor | None) -> None:
    tokens, _, dim = q.shape
    checks.check_same_dtype(op, f"{prefix}kv", kv, q)
    checks.check_shape(op, f"{prefix}kv", kv, (None, dim), "[N, D]", "Flatten a paged cache to rows.")
    checks.check_dtype(op, f"{prefix}indices", indices, checks.INDICES)
    checks.check_shape(op, f"{prefix}indices", indices, (tokens, None), "[T, K]")
    if lengths is not None:
        checks.check_dtype(op, f"{prefix}lengths", lengths, checks.INDICES)
        checks.check_shape(op, f"{prefix}lengths", lengths, (tokens,), "[T]")


def _check(
    op: str,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sink: Tensor | None,
    scale: float,
    lengths: Tensor | None,
    extra_kv: Tensor | None,
    extra_indices: Tensor | None,
    extra_lengths: Tensor | None,
    **more: Tensor | None,
) -> None:
    checks.check_same_device(
        op,
        q,
        kv=kv,
        indices=indices,
        sink=sink,
        lengths=lengths,
        extra_kv=extra_kv,
        extra_indices=extra_indices,
        extra_lengths=extra_lengths,
        **more,
    )
    checks.check_dtype(op, "q", q, checks.ACTIVATIONS)
    checks.check_shape(op, "q", q, (None, None, None), "[T, H, D]")
    _check_pool(op, "", q, kv, indices, lengths)
    if (extra_kv is None) != (extra_indices is None) or (extra_lengths is not None and extra_kv is None):
        given = [n for n, t in (("extra_kv", extra_kv), ("extra_indices", extra_indices)) if t is not None]
        checks.fail(op, "extra_kv and extra_indices together", ", ".join(given) or "only extra_lengths")
    if extra_kv is not None and extra_indices is not None:
        _check_pool(op, "extra_", q, extra_kv, extra_indices, extra_lengths)
    checks.check_sink(op, sink, q.shape[1])
    checks.check_scale(op, scale)


def _check_rope(op: str, q: Tensor, cos: Tensor, sin: Tensor, groups: int) -> None:
    checks.check_token_rope(op, cos, sin, q.shape[0])
    checks.check_groups(op, q.shape[1], q.shape[2], groups, cos)


def check_gathered(q: Tensor, kv: Tensor, indices: Tensor, sink: Tensor | None, scale: float, *pools: Any) -> None:
    _check("attention_gathered", q, kv, indices, sink, scale, *pools)


def empty_gathered(q: Tensor, *rest: Any) -> tuple[Tensor]:
    return (q.new_empty(q.shape),)


def check_gathered_rope(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sink: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    groups: int,
    *pools: Any,
) -> None:
    _check("attention_gathered_rope", q, kv, indices, sink, scale, *pools, cos=cos, sin=sin)
    _check_rope("attention_gathered_rope", q, cos, sin, groups)


def empty_gathered_rope(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sink: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    groups: int,
    *pools: Any,
) -> tuple[Tensor]:
    return layout.grouped(q, q.shape, groups)


def check_gathered_rope_quant(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sink: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    groups: int,
    block: int,
    scale_rule: str,
    floor: float,
    pack_scales: bool,
    *pools: Any,
) -> None:
    op = "attention_gathered_rope_quant"
    _check(op, q, kv, indices, sink, scale, *pools, cos=cos, sin=sin)
    _check_rope(op, q, cos, sin, groups)
    _, heads, dim = q.shape
    checks.check_quant(op, dim, block, scale_rule, floor, pack_scales, heads // groups * dim)


def empty_gathered_rope_quant(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sink: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    groups: int,
    block: int,
    scale_rule: str,
    floor: float,
    pack_scales: bool,
    *pools: Any,
) -> tuple[Tensor, Tensor]:
    tokens, heads, dim = q.shape
    return layout.quantised(q, tokens, heads // groups * dim, groups, block, pack_scales)


def check_partials(q: Tensor, kv: Tensor, indices: Tensor, scale: float, num_splits: int, *pools: Any) -> None:
    _check("attention_partials", q, kv, indices, None, scale, *pools)
    if num_splits < 1:
        checks.fail("attention_partials", "num_splits >= 1", str(num_splits))


def empty_partials(
    q: Tensor, kv: Tensor, indices: Tensor, scale: float, num_splits: int, *pools: Any
) -> tuple[Tensor, Tensor]:
    tokens, heads, dim = q.shape
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return (
        q.new_empty((num_splits, tokens, heads, dim), dtype=dtype),
        q.new_empty((num_splits, tokens, heads), dtype=dtype),
    )


def _values(op: str) -> Callable[..., None]:
    """``check_values`` of ``op``: kv and indices are its second and third argument, the pools its last four."""

    def check(*args: Any) -> None:
        values.gathered(op, args[1], args[2], *args[-4:])

    return check


register(
    OpSpec(
        "attention_gathered",
        f"{_TENSORS}, float scale, {_POOLS}",
        ("out",),
        check_gathered,
        empty_gathered,
        reference.attention_gathered,
        MODES,
        _values("attention_gathered"),
    )
)
register(
    OpSpec(
        "attention_gathered_rope",
        f"{_TENSORS}, Tensor cos, Tensor sin, float scale, int groups, {_POOLS}",
        ("out",),
        check_gathered_rope,
        empty_gathered_rope,
        reference.attention_gathered_rope,
        MODES,
        _values("attention_gathered_rope"),
    )
)
register(
    OpSpec(
        "attention_gathered_rope_quant",
        f"{_TENSORS}, Tensor cos, Tensor sin, float scale, int groups, {QUANT_ARGUMENTS}, {_POOLS}",
        ("codes", "scales"),
        check_gathered_rope_quant,
        empty_gathered_rope_quant,
        reference.attention_gathered_rope_quant,
        MODES,
        _values("attention_gathered_rope_quant"),
    )
)
register(
    OpSpec(
        "attention_partials",
        f"Tensor q, Tensor kv, Tensor indices, float scale, int num_splits, {_POOLS}",
        ("partials", "lse"),
        check_partials,
        empty_partials,
        reference.attention_partials,
        ("check_inputs",),
        _values("attention_partials"),
    )
)
