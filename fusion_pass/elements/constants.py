"""What a graph makes from nothing: positions, index patterns, signs, conditions on positions.

Such tensors decide which element goes where (``x[..., lane ^ 1]``), or with which sign, so their values are computed
for the elements that are asked for. Tables of a rotation are not among them, even where a graph computes them from
nothing: they stay what they are, elements with an address.
"""

from __future__ import annotations

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensor

from .dependence import has_property, is_tensors
from .sizes import Sizes, Unsized

aten = torch.ops.aten
CONE_LIMIT = 128
LIMIT = 1 << 16         # elements that are asked for at a time
# Their operand gives a shape, not a value.
FACTORIES = {aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.new_zeros.default,
             aten.new_ones.default, aten.new_full.default}
# What makes tables of numbers out of positions, and memory without a value.
_NOT_FOLLOWED = {aten.cos.default, aten.sin.default, aten.polar.default, aten.exp.default, aten.tan.default,
                 aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default,
                 aten.empty_strided.default, aten.empty_permuted.default}


def literal(node: fx.Node) -> torch.Tensor | None:
    """The value of a tensor literal of the source (not of a parameter or a buffer)."""
    if node.op == "get_attr" and "_tensor_constant" in str(node.target):
        value = getattr(node.graph.owning_module, str(node.target), None)
    else:
        value = node.meta.get("lifted_constant")
    real = isinstance(value, torch.Tensor) and value.device.type == "cpu" and not isinstance(value, FakeTensor)
    return value if real else None


def made_from_nothing(node: fx.Node, sizes: Sizes) -> bool:
    """Whether a tensor depends on literals and sizes only."""
    return has_property(node, sizes.from_nothing, _made_from_nothing, decided_by=False, limit=CONE_LIMIT)


def _made_from_nothing(node: fx.Node) -> bool | None:
    if node.op != "call_function":
        return literal(node) is not None
    if node.target in FACTORIES:
        return True
    if node.target in _NOT_FOLLOWED or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return False
    return None if is_tensors(node.meta.get("val")) else False


def constant_values(node: fx.Node, index: torch.Tensor, sizes: Sizes) -> torch.Tensor | None:
    """The elements ``index`` of a tensor that is made from nothing (float64, int64 or bool), else None."""
    if len(index) > LIMIT or not made_from_nothing(node, sizes):
        return None
    from .numeric import Numeric, Unevaluated
    try:
        return Numeric(sizes, {}, literal).values(node, index)
    except (Unevaluated, Unsized):
        sizes.from_nothing[node] = False
        return None


def signs(node: fx.Node, index: torch.Tensor, sizes: Sizes, limit: int) -> torch.Tensor | None:
    """The elements ``index`` of a tensor made from nothing that holds -1, 0 and 1 only, and not only zeros: a factor
    that is a sign, a choice of lanes, a matrix that exchanges them. (Any other constant is a table.)"""
    if not 0 < sizes.numel(node) <= limit or not made_from_nothing(node, sizes):
        return None
    if node not in sizes.are_signs:
        every = constant_values(node, torch.arange(sizes.numel(node)), sizes)
        good = every is not None and not every.is_complex() and every.dtype != torch.bool and bool(
            ((every == 0) | (every.abs() == 1)).all()) and bool((every != 0).any())
        sizes.are_signs[node] = every.double() if good and every is not None else None
    found = sizes.are_signs[node]
    return None if found is None else found[index]
