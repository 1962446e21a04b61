"""The way back from a contraction's operand through dequantisation and quantisation to what was quantised.

Values are not preserved on this way, so nothing is proved here: it only finds the candidates (the tensor that was
quantised, the conversion to 8 bits, the scale operands) that ``quantisation`` then proves by value.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.fx as fx

from ..elements.moves import CASTS, Piece, broadcast_index, is_float_cast
from ..elements.sizes import Sizes
from ..fx_access import args_of

aten = torch.ops.aten

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
CLAMPS = {aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.nan_to_num.default,
          aten.clamp.Tensor, aten.hardtanh.default}
EXTREMA = {aten.minimum.default, aten.maximum.default}
ABS_MAX = {aten.amax.default, aten.max.dim, aten.max.default}
CONTRACTIONS = {aten.bmm.default, aten.mm.default, aten.addmm.default, aten.baddbmm.default, aten.matmul.default,
                aten.linear.default, aten.einsum.default, aten._scaled_mm.default, aten.bmm.dtype, aten.mm.dtype,
                aten.convolution.default}


def dtype_of(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def is_eight_bit_cast(node: fx.Node) -> bool:
    """A conversion to or from an 8-bit float."""
    if node.target not in CASTS or not isinstance(node.args[0], fx.Node):
        return False
    return not is_float_cast(node) and (dtype_of(node) in FP8 or dtype_of(node.args[0]) in FP8)


class Cones:
    """What lies behind a node, up to the next contraction: an 8-bit conversion, a maximum of absolute values."""

    def __init__(self) -> None:
        self._flags: dict[fx.Node, int] = {}
        self.visits = 0

    def has_codes(self, node: object) -> bool:
        return bool(self.flags(node) & 1)

    def has_block_maximum(self, node: object) -> bool:
        return bool(self.flags(node) & 2)

    def flags(self, node: object) -> int:
        if not isinstance(node, fx.Node):
            return 0
        stack = [node]
        while stack:
            here = stack[-1]
            if here in self._flags:
                stack.pop()
                continue
            if here.op != "call_function" or here.target in CONTRACTIONS:
                self._flags[here] = 0
                stack.pop()
                continue
            missing = [n for n in here.all_input_nodes if n not in self._flags]
            if missing:
                stack.extend(missing)
                continue
            self.visits += 1
            flags = 0
            for operand in here.all_input_nodes:
                flags |= self._flags[operand]
            if is_eight_bit_cast(here) and dtype_of(here) in FP8:
                flags |= 1
            if _is_largest_magnitude(here):
                flags |= 2
            self._flags[here] = flags
            stack.pop()
        return self._flags[node]


def _is_largest_magnitude(node: fx.Node) -> bool:
    """max |x|: of absolute values, as a norm, or as the larger of max x and -min x."""
    if node.target is aten.linalg_vector_norm.default:
        return len(node.args) > 1 and node.args[1] in (float("inf"), "inf")
    if node.target is aten.aminmax.default:
        return True
    if node.target not in ABS_MAX:
        return False
    source = node.args[0]
    return _is_absolute(source) or (isinstance(source, fx.Node) and any(
        user.target in (aten.amin.default, aten.min.dim, aten.min.default) for user in source.users))


def _is_absolute(node: object) -> bool:
    while isinstance(node, fx.Node):
        if node.target is aten.abs.default or (node.target is aten.pow.Tensor_Scalar and node.args[1] == 2) or (
                node.target is aten.mul.Tensor and node.args[0] is node.args[1]):
            return True                 # |x|, or x * x, whose root is taken later
        if is_float_cast(node) or node.target in (aten.view.default, aten.reshape.default, aten.permute.default,
                                                  aten.transpose.int, aten._unsafe_view.default, aten.clone.default,
                                                  aten.slice.Tensor, aten.unsqueeze.default):
            node = node.args[0]
            continue
        return False
    return False


@dataclass
class ScaleUse:
    """A multiplication or division by a scale: its other operand goes on towards the quantised tensor."""

    node: fx.Node
    scale: fx.Node
    divides: bool
    index: torch.Tensor
    scale_index: torch.Tensor


@dataclass
class QuantPath:
    """A ``through`` rule for ``Follower.follow`` that records what it passed."""

    sizes: Sizes
    cones: Cones
    casts: list[fx.Node] = field(default_factory=list)
    scales: list[ScaleUse] = field(default_factory=list)

    def __call__(self, node: fx.Node, index: torch.Tensor) -> list[Piece] | None:
        if node.op != "call_function":
            return None
        if is_eight_bit_cast(node):
            if node not in self.casts:
                self.casts.append(node)
            return [Piece(args_of(node)[0], index)]
        if node.target is aten.view.dtype and all(
                dtype is not None and dtype.itemsize == 1 for dtype in (dtype_of(node), dtype_of(args_of(node)[0]))):
            return [Piece(args_of(node)[0], index)]         # codes looked at as bytes and back
        if node.target in CLAMPS and self.cones.has_block_maximum(node):
            return [Piece(args_of(node)[0], index)]
        if node.target in EXTREMA:
            for operand, other in (args_of(node)[:2], args_of(node)[1::-1]):
                if self.sizes.numel(other) == 1 and self.sizes.numel(operand) == self.sizes.numel(node):
                    return [Piece(operand, index)]
            return None
        if node.target in (aten.div.Tensor, aten.mul.Tensor):
            return self._scale(node, index)
        return None

    def _scale(self, node: fx.Node, index: torch.Tensor) -> list[Piece] | None:
        a, b = node.args[:2]
        if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
            return None
        divides = node.target is aten.div.Tensor
        main, scale = a, b
        if not divides:
            codes = self.cones.has_codes(a), self.cones.has_codes(b)
            if codes == (False, True) or (codes == (False, False) and self.cones.has_block_maximum(a)
                                          and not self.cones.has_block_maximum(b)):
                main, scale = b, a
        if not self.cones.has_block_maximum(scale):
            return None
        shape = self.sizes.shape(node)
        scale_index = broadcast_index(index, shape, self.sizes.shape(scale))
        self.scales.append(ScaleUse(node, scale, divides, index, scale_index))
        return [Piece(main, broadcast_index(index, shape, self.sizes.shape(main)))]


__all__ = ["CONTRACTIONS", "FP8", "Cones", "QuantPath", "ScaleUse", "dtype_of", "is_eight_bit_cast"]
