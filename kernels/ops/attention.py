# SPDX-License-Identifier: Apache-2.0
"""Ops of dense attention: ``attention``, ``attention_rope``, ``attention_rope_quant``.

Shapes: q [B, S, H, D] (any strides), kv [B or 1, N, D] in q's dtype (K and V at once, shared by all heads), mask
[B or 1, S, N] bool (True = attend) or floating (added to the scaled scores, -inf = not attended) or None, sink [H] or
None, cos and sin [B or 1, S, rope_dim / 2]: the forward tables of each query's own position.

``causal``: key n is visible to query s iff n <= s + N - S. ``window`` w > 0: additionally n > s + N - S - w. A row that
sees no key gives zeros. Softmax in fp32 (fp64 inputs: fp64, on the reference path).
"""

import torch
from torch import Tensor

from .. import reference
from . import checks, layout
from .registry import OpSpec, register

_TENSORS = "Tensor q, Tensor kv, Tensor? mask, Tensor? sink"
_VISIBLE = "bool causal=False, int window=0"
MODES = ("batch_invariant",)
QUANT_ARGUMENTS = 'int block=128, str scale_rule="fp32", float floor=1e-12, bool pack_scales=False'


def _check(
    op: str,
    q: Tensor,
    kv: Tensor,
    mask: Tensor | None,
    sink: Tensor | None,
    scale: float,
    window: int,
    **more: Tensor | None,
) -> None:
    checks.check_same_device(op, q, kv=kv, mask=mask, sink=sink, **more)
    checks.check_dtype(op, "q", q, checks.ACTIVATIONS)
    checks.check_same_dtype(op, "kv", kv, q)
    checks.check_shape(op, "q", q, (None, None, None, None), "[B, S, H, D]")
    batch, queries, heads, dim = q.shape
    checks.check_shape(op, "kv", kv, ((1, batch), None, dim), "[B or 1, N, D]", "One latent per key, used as K and V.")
    if mask is not None:
        checks.check_dtype(op, "mask", mask, (torch.bool, *checks.ACTIVATIONS))
        checks.check_shape(op, "mask", mask, ((1, batch), queries, kv.shape[1]), "[B or 1, S, N]")
    checks.check_sink(op, sink, heads)
    checks.check_scale(op, scale)
    checks.check_window(op, window)


def _check_rope(op: str, q: Tensor, cos: Tensor, sin: Tensor, groups: int) -> None:
    batch, queries, heads, dim = q.shape
    checks.check_batch_rope(op, cos, sin, batch, queries)
    checks.check_groups(op, heads, dim, groups, cos)


def check_attention(
    q: Tensor, kv: Tensor, mask: Tensor | None, sink: Tensor | None, scale: float, causal: bool, window: int
) -> None:
    _check("attention", q, kv, mask, sink, scale, window)


def empty_attention(
    q: Tensor, kv: Tensor, mask: Tensor | None, sink: Tensor | None, scale: float, causal: bool, window: int
) -> tuple[Tensor]:
    return (q.new_empty(q.shape),)


def check_attention_rope(
    q: Tensor,
    kv: Tensor,
    mask: Tensor | None,
    sink: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    groups: int,
    causal: bool,
    window: int,
) -> None:
    _check("attention_rope", q, kv, mask, sink, scale, window, cos=cos, sin=sin)
    _check_rope("attention_rope", q, cos, sin, groups)


def empty_attention_rope(
    q: Tensor,
    kv: Tensor,
    mask: Tensor | None,
    sink: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    groups: int,
    causal: bool,
    window: int,
) -> tuple[Tensor]:
    batch, queries, heads, dim = q.shape
    return layout.grouped(q, (batch * queries, heads, dim), groups)


def check_attention_rope_quant(
    q: Tensor,
    kv: Tensor,
    mask: Tensor | None,
    sink: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    groups: int,
    block: int,
    scale_rule: str,
    floor: float,
    pack_scales: bool,
    causal: bool,
    window: int,
) -> None:
    op = "attention_rope_quant"
    _check(op, q, kv, mask, sink, scale, window, cos=cos, sin=sin)
    _check_rope(op, q, cos, sin, groups)
    heads, dim = q.shape[2:]
    checks.check_quant(op, dim, block, scale_rule, floor, pack_scales, heads // groups * dim)


def empty_attention_rope_quant(
    q: Tensor,
    kv: Tensor,
    mask: Tensor | None,
    sink: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    groups: int,
    block: int,
    scale_rule: str,
    floor: float,
    pack_scales: bool,
    causal: bool,
    window: int,
) -> tuple[Tensor, Tensor]:
    batch, queries, heads, dim = q.shape
    return layout.quantised(q, batch * queries, heads // groups * dim, groups, block, pack_scales)


register(
    OpSpec(
        "attention",
        f"{_TENSORS}, float scale, {_VISIBLE}",
        ("out",),
        check_attention,
        empty_attention,
        reference.attention,
        MODES,
    )
)
register(
    OpSpec(
        "attention_rope",
        f"{_TENSORS}, Tensor cos, Tensor sin, float scale, int groups, {_VISIBLE}",
        ("out",),
        check_attention_rope,
        empty_attention_rope,
        reference.attention_rope,
        MODES,
    )
)
register(
    OpSpec(
        "attention_rope_quant",
        f"{_TENSORS}, Tensor cos, Tensor sin, float scale, int groups, {QUANT_ARGUMENTS}, {_VISIBLE}",
        ("codes", "scales"),
        check_attention_rope_quant,
        empty_attention_rope_quant,
        reference.attention_rope_quant,
        MODES,
    )
)
