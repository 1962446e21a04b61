"""Contractions: one description for bmm, mm, linear, einsum, scaled_mm and multiply-then-sum.

A contraction computes ``out[i] = scale * sum_k lhs[l(i, k)] * rhs[r(i, k)] (+ addend[a(i)])``. What differs between
the operators is only the index maps ``l`` and ``r``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from ..fx_access import args_of, kwargs_of, target_of
from .moves import broadcast_index, is_float_cast, ravel, unravel
from .sizes import Sizes

aten = torch.ops.aten

IndexMap = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Contraction:
    """``lhs_at(index, k)`` and ``rhs_at(index, k)`` broadcast ``index`` [M, 1] against ``k`` [1, K]."""

    node: fx.Node
    lhs: fx.Node
    rhs: fx.Node
    extent: int
    lhs_at: IndexMap
    rhs_at: IndexMap
    scale: float = 1.0
    addend: fx.Node | None = None
    addend_scale: float = 1.0
    scale_nodes: tuple[fx.Node, ...] = ()

    def swapped(self) -> Contraction:
        """The same contraction with the operands' names exchanged."""
        return Contraction(self.node, self.rhs, self.lhs, self.extent, self.rhs_at, self.lhs_at, self.scale,
                           self.addend, self.addend_scale, self.scale_nodes)

    def indices(self, index: torch.Tensor, k: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Operand indices [M, K] of the outputs ``index`` [M] (all of K, or the given ``k``)."""
        k = torch.arange(self.extent) if k is None else k
        rows, columns = index[:, None], k[None, :]
        shape = (len(index), len(k))
        return self.lhs_at(rows, columns).expand(shape), self.rhs_at(rows, columns).expand(shape)

    def in_order(self) -> bool:
        """Do the left operand's elements follow one another, from the first k to the last?"""
        read = self.indices(torch.zeros(1, dtype=torch.int64))[0][0]
        return bool((read.diff() == 1).all())


def contraction(node: fx.Node, sizes: Sizes) -> Contraction | None:
    """Describe ``node`` as a contraction, or None."""
    rule = _RULES.get(target_of(node)) if node.op == "call_function" else None
    return None if rule is None else rule(node, sizes)


def _bmm(node: fx.Node, sizes: Sizes, lhs: fx.Node, rhs: fx.Node, **more: Any) -> Contraction:
    _, m, k = sizes.shape(lhs)
    n = sizes.shape(rhs)[2]
    return Contraction(
        node, lhs, rhs, k,
        lambda i, j: (i // (m * n) * m + i // n % m) * k + j,
        lambda i, j: (i // (m * n) * k + j) * n + i % n, **more)


def _mm(node: fx.Node, sizes: Sizes, lhs: fx.Node, rhs: fx.Node, **more: Any) -> Contraction:
    k, n = sizes.shape(rhs)
    return Contraction(node, lhs, rhs, k, lambda i, j: i // n * k + j, lambda i, j: j * n + i % n, **more)


def _linear(node: fx.Node, sizes: Sizes) -> Contraction:
    lhs, rhs = args_of(node)[0], args_of(node)[1]
    bias = args_of(node)[2] if len(args_of(node)) > 2 else kwargs_of(node).get("bias")
    n, k = sizes.shape(rhs)
    return Contraction(node, lhs, rhs, k, lambda i, j: i // n * k + j, lambda i, j: i % n * k + j, addend=bias)


def _matmul(node: fx.Node, sizes: Sizes) -> Contraction | None:
    lhs, rhs = args_of(node)[:2]
    a, b, out = sizes.shape(lhs), sizes.shape(rhs), sizes.shape(node)
    if len(a) < 2 or len(b) < 2:
        return None
    m, k, n = a[-2], a[-1], b[-1]
    batch = out[:-2]
    return Contraction(
        node, lhs, rhs, k,
        lambda i, j: (broadcast_index(i // (m * n), batch, a[:-2]) if batch else 0 * i) * m * k + i // n % m * k + j,
        lambda i, j: (broadcast_index(i // (m * n), batch, b[:-2]) if batch else 0 * i) * k * n + j * n + i % n)


def _einsum(node: fx.Node, sizes: Sizes) -> Contraction | None:
    equation, operands = args_of(node)[0].replace(" ", ""), args_of(node)[1]
    if len(operands) != 2 or "->" not in equation or "." in equation:
        return None
    terms, out_names = equation.split("->")
    lhs_names, rhs_names = terms.split(",")
    lhs, rhs = operands
    extents = dict(zip(lhs_names, sizes.shape(lhs))) | dict(zip(rhs_names, sizes.shape(rhs)))
    summed = [c for c in lhs_names if c not in out_names]
    if set(rhs_names) - set(out_names) != set(summed) or len(set(lhs_names)) != len(lhs_names):
        return None
    out_shape = tuple(extents[c] for c in out_names)
    k_shape = tuple(extents[c] for c in summed)
    extent = 1
    for size in k_shape:
        extent *= size

    def at(names: str, shape: tuple[int, ...]) -> IndexMap:
        def index_map(i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
            where = dict(zip(out_names, unravel(i, out_shape))) | dict(zip(summed, unravel(j, k_shape)))
            return ravel([where[c] + 0 * i + 0 * j for c in names], shape)
        return index_map

    return Contraction(node, lhs, rhs, extent, at(lhs_names, sizes.shape(lhs)), at(rhs_names, sizes.shape(rhs)))


def _scaled_mm(node: fx.Node, sizes: Sizes) -> Contraction | None:
    lhs, rhs, scale_a, scale_b = args_of(node)[:4]
    if sizes.numel(scale_a) != 1 or sizes.numel(scale_b) != 1:
        return None
    bias = args_of(node)[4] if len(args_of(node)) > 4 else kwargs_of(node).get("bias")
    if bias is not None:
        return None
    return _mm(node, sizes, lhs, rhs, scale_nodes=(scale_a, scale_b))


def _multiply_sum(node: fx.Node, sizes: Sizes) -> Contraction | None:
    """``(a * b).sum(dim)`` over one dimension, with both factors varying along it."""
    product = args_of(node)[0]
    sizes.seen.add(product)
    while is_float_cast(product):
        product = args_of(product)[0]
        sizes.seen.add(product)
    if product.target is not aten.mul.Tensor or not all(isinstance(a, fx.Node) for a in args_of(product)):
        return None
    dims = sizes.argument(args_of(node)[1]) if len(args_of(node)) > 1 else None
    shape = sizes.shape(product)
    if not dims or len(dims) != 1:
        return None
    dim = dims[0] % len(shape)
    kept = shape[:dim] + shape[dim + 1:]
    lhs, rhs = args_of(product)
    for operand in (lhs, rhs):
        operand_shape = (1,) * (len(shape) - len(sizes.shape(operand))) + sizes.shape(operand)
        if operand_shape[dim] != shape[dim] or shape[dim] == 1:
            return None

    def at(operand: fx.Node) -> IndexMap:
        def index_map(i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
            where = [c + 0 * j for c in unravel(i, kept)]
            where.insert(dim, j + 0 * i)
            return broadcast_index(ravel(where, shape), shape, sizes.shape(operand))
        return index_map

    return Contraction(node, lhs, rhs, shape[dim], at(lhs), at(rhs))


def _convolution(node: fx.Node, sizes: Sizes) -> Contraction | None:
    """A convolution whose kernel has one element is a product over the channels of a group."""
    data, weight, bias, stride, padding, _, transposed, _, groups = args_of(node)[:9]
    shape = sizes.shape(weight)
    plain = not transposed and all(s == 1 for s in shape[2:]) and all(
        sizes.number(s) == 1 for s in stride) and not any(sizes.number(p) for p in padding)
    if bias is not None or not plain or len(shape) < 3:
        return None
    channels, outputs, extent = sizes.shape(data)[1], shape[0], shape[1]
    places = 1
    for size in sizes.shape(data)[2:]:
        places *= size
    per_group = outputs // int(sizes.number(groups))

    def data_at(i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        group = i // places % outputs // per_group
        return (i // (places * outputs) * channels + group * extent + j) * places + i % places

    return Contraction(node, data, weight, extent, data_at, lambda i, j: i // places % outputs * extent + j)


def _baddbmm(node: fx.Node, sizes: Sizes) -> Contraction:
    addend, lhs, rhs = args_of(node)[:3]
    return _bmm(node, sizes, lhs, rhs, scale=float(sizes.number(kwargs_of(node).get("alpha", 1))),
                addend=addend, addend_scale=float(sizes.number(kwargs_of(node).get("beta", 1))))


def _addmm(node: fx.Node, sizes: Sizes) -> Contraction:
    addend, lhs, rhs = args_of(node)[:3]
    return _mm(node, sizes, lhs, rhs, scale=float(sizes.number(kwargs_of(node).get("alpha", 1))),
               addend=addend, addend_scale=float(sizes.number(kwargs_of(node).get("beta", 1))))


_RULES: dict[Any, Callable[[fx.Node, Sizes], Contraction | None]] = {
    aten.bmm.default: lambda n, s: _bmm(n, s, args_of(n)[0], args_of(n)[1]),
    aten.mm.default: lambda n, s: _mm(n, s, args_of(n)[0], args_of(n)[1]),
    aten.bmm.dtype: lambda n, s: _bmm(n, s, args_of(n)[0], args_of(n)[1]),
    aten.mm.dtype: lambda n, s: _mm(n, s, args_of(n)[0], args_of(n)[1]),
    aten.baddbmm.default: _baddbmm, aten.addmm.default: _addmm, aten.linear.default: _linear,
    aten.matmul.default: _matmul, aten.einsum.default: _einsum, aten._scaled_mm.default: _scaled_mm,
    aten.sum.dim_IntList: _multiply_sum, aten.convolution.default: _convolution,
}
