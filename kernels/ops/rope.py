# SPDX-License-Identifier: Apache-2.0
"""Ops ``inverse_rope`` and ``inverse_rope_quant``: the epilogue alone, for graphs whose attention is opaque.

Shapes: o [T, H, D], cos and sin [T, rope_dim / 2] (forward tables). Results as in the fused attention ops.
"""

from torch import Tensor

from .. import reference
from . import checks, layout
from .attention import QUANT_ARGUMENTS
from .registry import OpSpec, register


def _check(op: str, o: Tensor, cos: Tensor, sin: Tensor, groups: int) -> None:
    checks.check_same_device(op, o, cos=cos, sin=sin)
    checks.check_dtype(op, "o", o, checks.ACTIVATIONS)
    checks.check_shape(op, "o", o, (None, None, None), "[T, H, D]")
    checks.check_token_rope(op, cos, sin, o.shape[0])
    checks.check_groups(op, o.shape[1], o.shape[2], groups, cos)


def check_inverse_rope(o: Tensor, cos: Tensor, sin: Tensor, groups: int) -> None:
    _check("inverse_rope", o, cos, sin, groups)


def empty_inverse_rope(o: Tensor, cos: Tensor, sin: Tensor, groups: int) -> tuple[Tensor]:
    return layout.grouped(o, o.shape, groups)


def check_inverse_rope_quant(
    o: Tensor, cos: Tensor, sin: Tensor, groups: int, block: int, scale_rule: str, floor: float, pack_scales: bool
) -> None:
    op = "inverse_rope_quant"
    _check(op, o, cos, sin, groups)
    _, heads, dim = o.shape
    checks.check_quant(op, dim, block, scale_rule, floor, pack_scales, heads // groups * dim)


def empty_inverse_rope_quant(
    o: Tensor, cos: Tensor, sin: Tensor, groups: int, block: int, scale_rule: str, floor: float, pack_scales: bool
) -> tuple[Tensor, Tensor]:
    tokens, heads, dim = o.shape
    return layout.quantised(o, tokens, heads // groups * dim, groups, block, pack_scales)


register(
    OpSpec(
        "inverse_rope",
        "Tensor o, Tensor cos, Tensor sin, int groups",
        ("out",),
        check_inverse_rope,
        empty_inverse_rope,
        reference.inverse_rope,
    )
)
register(
    OpSpec(
        "inverse_rope_quant",
        f"Tensor o, Tensor cos, Tensor sin, int groups, {QUANT_ARGUMENTS}",
        ("codes", "scales"),
        check_inverse_rope_quant,
        empty_inverse_rope_quant,
        reference.inverse_rope_quant,
    )
)
