"""Elements as numbers: evaluate many elements of a node from random values at chosen leaves.

Two graphs that agree on random values at sampled elements compute the same function (up to a chance that float64 makes
negligible), whatever the way there: online softmax, log-sum-exp rescaling, exponent bit tricks, packed bytes. Only the
elements that are asked for are computed, so a 1152-key softmax row costs vectors of 1152 numbers, not tensors.

Arithmetic is float64: roundings to bf16, fp16 and fp32 are skipped (they are recorded elsewhere), conversions to an
8-bit float, to integers, and reinterpretations of bits are carried out, because there they are the meaning.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

from ..fx_access import args_of, kwargs_of, target_of
from .contractions import Contraction, contraction
from .moves import SPLITTING, broadcast_index, ravel, sources, unravel
from .sizes import Sizes

aten = torch.ops.aten
Leaf = Callable[[torch.Tensor], torch.Tensor]
MAX_ELEMENTS = 1 << 22
UNTAGGED_POINTWISE = {aten.floor_divide.default, aten.floor_divide.Scalar}
EIGHT_BIT = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


class Unevaluated(Exception):
    """The value depends on ``node``, which this engine cannot evaluate and which no leaf value was given for."""

    def __init__(self, node: fx.Node, why: str):
        super().__init__(f"{node.name}: {why}")
        self.node = node


def random_leaf(seed: int, spread: float = 1.0) -> Leaf:
    """A value in (-spread, spread) for every index: reproducible, without a table, distinct for distinct seeds."""
    offset = (seed + 1) * 0x2545F4914F6CDD1D % (1 << 62)        # fits an int64 for every seed

    def leaf(index: torch.Tensor) -> torch.Tensor:
        x = (index + 1) * 0x9E3779B97F4A7C1 + offset
        x = (x ^ (x >> 29)) * 0x3C79AC492BA7B653
        x = (x ^ (x >> 32)) * 0x1C69B3F74AC4AE35
        x = x ^ (x >> 27)
        return ((x & 0xFFFFFFFFFFFF).to(torch.float64) / float(1 << 47) - 1.0) * spread
    return leaf


class Numeric:
    """Evaluates elements. ``leaves`` gives values to nodes that are not looked into.

    A graph input without a leaf value is an error (``Unevaluated``): what the value depends on must be known.
    ``constants`` resolves get_attr nodes to real tensors.
    """

    def __init__(self, sizes: Sizes, leaves: dict[fx.Node, Leaf], constants: Callable[[fx.Node], object] | None = None):
        self.sizes = sizes
        self.leaves = leaves
        self.constants = constants
        self.visits = 0
        self._memo: dict[tuple[fx.Node, bytes], torch.Tensor] = {}

    def values(self, node: fx.Node | float | bool | int, index: torch.Tensor) -> torch.Tensor:
        """Values (float64, complex128, int64 or bool) of the elements ``index`` [M] of ``node``."""
        if not isinstance(node, fx.Node):
            dtype = torch.bool if isinstance(node, bool) else torch.float64
            return torch.full((len(index),), node, dtype=dtype)
        leaf = self.leaves.get(node)
        if leaf is not None:
            return leaf(index)
        key = (node, index.numpy().tobytes())
        found = self._memo.get(key)
        if found is None:
            self.visits += 1
            self.sizes.seen.add(node)
            found = self._memo[key] = self._compute(node, index)
        return found

    def _compute(self, node: fx.Node, index: torch.Tensor) -> torch.Tensor:
        if len(index) > MAX_ELEMENTS:
            raise Unevaluated(node, "too many elements")
        if node.op in ("get_attr", "placeholder") and self.constants is not None:
            constant = self.constants(node)
            if isinstance(constant, torch.Tensor) and constant.device.type == "cpu":
                return widen(constant.detach().reshape(-1)[index])
        if node.op != "call_function":
            raise Unevaluated(node, "a graph input" + (", one number: under dynamic=True Dynamo makes inputs of Python "
                              "floats, module constants too" if self.sizes.numel(node) == 1 else ""))
        numel = self.sizes.numel(node)
        if len(index) > 64 and numel < len(index):
            # A broadcast reads the same elements again and again.
            unique, where = torch.unique(index, return_inverse=True)
            if len(unique) < len(index):
                return self.values(node, unique)[where]
        pieces = sources(node, index, self.sizes)
        if pieces is not None:
            return self._gathered(node, index, pieces)
        rule = operator_rules().get(node.target)
        if rule is not None:
            result: torch.Tensor = rule(self, node, index)
            return result
        found = contraction(node, self.sizes)
        if found is not None:
            return self._contract(found, index)
        if torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in UNTAGGED_POINTWISE:
            return self._pointwise(node, index)
        raise Unevaluated(node, f"{node.target} has no element rule")

    def _gathered(self, node: fx.Node, index: torch.Tensor, pieces: list[Any]) -> torch.Tensor:
        parts = []
        for piece in pieces:
            lanes = torch.arange(len(index)) if piece.lanes is None else piece.lanes
            at = piece.index if piece.index is not None else torch.zeros(len(lanes), dtype=torch.int64)
            parts.append((lanes, self.values(piece.source, at)))
        if not parts:
            return torch.zeros(len(index), dtype=torch.float64)
        if pieces[0].lanes is None:
            return cast_like(parts[0][1], self.sizes.dtype(node))
        dtype = parts[0][1].dtype
        for _, value in parts[1:]:
            dtype = torch.promote_types(dtype, value.dtype)
        result = torch.zeros(len(index), dtype=dtype)
        for lanes, value in parts:
            result[lanes] = value.to(dtype)
        return cast_like(result, self.sizes.dtype(node))

    def operand(self, node: fx.Node, argument: object, index: torch.Tensor) -> object:
        """A (broadcast) operand of the pointwise ``node``: values, or a Python number."""
        if isinstance(argument, fx.Node) and isinstance(argument.meta.get("val"), torch.Tensor):
            return self.values(argument, broadcast_index(index, self.sizes.shape(node), self.sizes.shape(argument)))
        return self.sizes.argument(argument)

    def _pointwise(self, node: fx.Node, index: torch.Tensor) -> torch.Tensor:
        args = [self.operand(node, a, index) for a in args_of(node)]
        kwargs = {k: self.sizes.argument(v) for k, v in kwargs_of(node).items()
                  if k not in ("dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking")}
        try:
            result = target_of(node)(*args, **kwargs)
        except Exception as error:
            raise Unevaluated(node, f"{node.target}: {error}") from error
        if not isinstance(result, torch.Tensor):
            raise Unevaluated(node, f"{node.target} gives no tensor")
        return widen(result.expand(len(index)) if result.dim() == 0 else result)

    def _contract(self, found: Contraction, index: torch.Tensor) -> torch.Tensor:
        if len(index) * found.extent > MAX_ELEMENTS:
            raise Unevaluated(found.node, "too many products")
        left, right = found.indices(index)
        lhs = self.values(found.lhs, left.flatten()).view(left.shape)
        rhs = self.values(found.rhs, right.flatten()).view(right.shape)
        result = (lhs * rhs).sum(1) * found.scale
        for scale in found.scale_nodes:
            result = result * self.values(scale, torch.zeros(1, dtype=torch.int64))
        if found.addend is not None and found.addend_scale:
            at = broadcast_index(index, self.sizes.shape(found.node), self.sizes.shape(found.addend))
            result = result + found.addend_scale * self.values(found.addend, at)
        return result

    def rows(self, node: fx.Node, source: fx.Node, dims: list[int], keepdim: bool,
             index: torch.Tensor) -> torch.Tensor:
        """The elements of ``source`` that the outputs ``index`` of a reduction over ``dims`` read, [M, R]."""
        shape = self.sizes.shape(source)
        kept = [d for d in range(len(shape)) if d not in dims]
        out_shape = tuple(1 if d in dims else shape[d] for d in range(len(shape))) if keepdim else tuple(
            shape[d] for d in kept)
        unique, where = torch.unique(index, return_inverse=True)
        coordinates = unravel(unique, out_shape)
        if keepdim:
            coordinates = [coordinates[d] for d in kept]
        reduced_shape = tuple(shape[d] for d in dims)
        total = 1
        for size in reduced_shape:
            total *= size
        if len(unique) * total > MAX_ELEMENTS:
            raise Unevaluated(node, "too many elements to reduce")
        inner = unravel(torch.arange(total), reduced_shape)
        full: list[torch.Tensor] = [torch.zeros(0)] * len(shape)
        for d, c in zip(kept, coordinates):
            full[d] = c[:, None].expand(len(unique), total)
        for d, c in zip(dims, inner):
            full[d] = c[None, :].expand(len(unique), total)
        at = ravel(full, shape) if full else torch.zeros(len(unique), total, dtype=torch.int64)
        values = self.values(source, at.reshape(-1)).view(len(unique), total)
        return values[where]


def widen(value: torch.Tensor) -> torch.Tensor:
    if value.dtype in EIGHT_BIT:
        return value.to(torch.float32).to(torch.float64)
    if value.is_complex():
        return value.to(torch.complex128)
    if value.is_floating_point():
        return value.to(torch.float64)
    return value if value.dtype == torch.bool else value.to(torch.int64)


def cast_like(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Give ``value`` the engine's type for ``dtype`` (a cat promotes, a zero fill has no type of its own)."""
    if dtype == torch.bool:
        return value.to(torch.bool)
    if dtype.is_complex:
        return value.to(torch.complex128)
    if dtype.is_floating_point:
        return value.to(torch.float64) if value.dtype != torch.float64 else value
    return value if value.dtype == torch.int64 else value.to(torch.int64)


def to_dtype(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A conversion whose meaning is the rounding: to 8-bit floats and integers; other floats stay float64."""
    if dtype in EIGHT_BIT:
        return value.to(torch.float32).to(dtype).to(torch.float32).to(torch.float64)
    if dtype == torch.bool:
        return value != 0
    if dtype.is_complex:
        return value.to(torch.complex128)
    if dtype.is_floating_point:
        return value.to(torch.float64)
    if value.is_floating_point():
        value = value.trunc()
    narrow = value.to(dtype)
    return narrow.to(torch.int64)


@functools.cache
def operator_rules() -> dict[Any, Any]:
    """Element rules by operator (in their own module, which needs this one)."""
    from .numeric_rules import RULES
    return RULES


def evaluable(node: fx.Node, sizes: Sizes) -> bool:
    """Whether the engine has a rule for a node (its inputs may still be unknown)."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        from .numeric_rules import TUPLE_RULES
        parent = args_of(node)[0]
        return parent.target in TUPLE_RULES or parent.target in SPLITTING
    if not isinstance(node.meta.get("val"), torch.Tensor):
        from .numeric_rules import TUPLE_RULES
        return node.target in TUPLE_RULES
    if node.target in operator_rules() or torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return True
    zero = torch.zeros(1, dtype=torch.int64)
    return (sizes.numel(node) > 0 and sources(node, zero, sizes) is not None) or contraction(node, sizes) is not None
