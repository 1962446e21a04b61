"""A query-key product that is written as a sum of products over parts of the channels.

``q_nope @ k_nope.T + q_pe @ k_pe.T`` multiplies the same queries and keys as one product over all channels does. What
is added up is followed through moves and factors to contractions; when they run over the same queries and keys, output
by output, they are described as one contraction of the joined operands. The joined operands are nodes (``cat``) that
the context keeps apart: they go away again unless a fused op reads them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.fx as fx

from ..elements.contractions import Contraction, contraction
from ..elements.layouts import Builder, row_major
from ..elements.moves import ravel, sources, unravel
from ..elements.sizes import Sizes
from ..fx_access import args_of, kwargs_of
from .context import Context
from .descent import is_tensor, number_factor
from .paths import Path, Step, replay

aten = torch.ops.aten
MAX_PARTS = 16
SAMPLES = 256


@dataclass(frozen=True)
class _Part:
    """One of the products: ``path`` leads from the sum to it; what arrives is ``factor`` times it."""

    product: Contraction
    path: Path
    factor: float


@dataclass(frozen=True)
class _Side:
    """An operand as rows of channels: ``rows`` are the rows that the sampled outputs read, in a tensor of the shape
    ``outer`` + (channels,) once dimension ``dim`` of ``node`` is moved to the end. Its first element comes from
    element ``first`` of ``origin``."""

    node: fx.Node
    dim: int
    outer: tuple[int, ...]
    rows: torch.Tensor
    origin: fx.Node
    first: int


def sum_of_products(node: fx.Node, context: Context, sizes: Sizes, least: int) -> Contraction | None:
    """``node`` as one contraction over at least ``least`` channels, or None."""
    key = (node, sizes)
    if key not in context.sums:
        context.sums[key] = _joined(node, context, sizes)
    found = context.sums[key]
    return found if found is not None and found.extent >= least else None


def _joined(node: fx.Node, context: Context, sizes: Sizes) -> Contraction | None:
    parts: list[_Part] = []
    if not _starts(node) or not _collect(node, node, (), 1.0, parts, sizes) or len(parts) < 2:
        return None
    if any(not math.isclose(p.factor, parts[0].factor, rel_tol=1e-12) for p in parts):
        return None
    index = _samples(sizes.numel(node))
    both = [_oriented(parts[0], index, sizes)]
    if both[0] is None:
        return None
    for part in parts[1:]:
        found = _oriented(part, index, sizes, both[0])
        if found is None:
            return None
        both.append(found)
    every = [b for b in both if b is not None]
    order = sorted(range(len(every)), key=lambda i: (context.order(every[i][1].origin), every[i][1].first))
    parts, every = [parts[i] for i in order], [every[i] for i in order]
    lhs, rhs = (_operand([b[side] for b in every], node, context, sizes) for side in (0, 1))
    total = sum(p.product.extent for p in parts)
    first = parts[0]
    for part in parts:
        sizes.seen.update((step.node for step in part.path), (part.product.node,))

    def at(side: int, i: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        shape = i.shape
        return _rows(first, side, every[0][side], i.reshape(-1), sizes).view(shape) * total + k

    return Contraction(node, lhs, rhs, total, lambda i, k: at(0, i, k), lambda i, k: at(1, i, k), scale=first.factor)


def _starts(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in (aten.add.Tensor, aten.sub.Tensor, aten.baddbmm.default,
                                                          aten.addmm.default, aten.sum.dim_IntList)


def _collect(node: fx.Node, top: fx.Node, path: Path, factor: float, parts: list[_Part], sizes: Sizes) -> bool:
    """Everything that ``node`` adds up, as products; False when it is not only products."""
    while True:
        if node.op != "call_function" or len(parts) > MAX_PARTS or len(path) > 64 or not sizes.numel(node):
            return False
        pieces = sources(node, torch.zeros(1, dtype=torch.int64), sizes)
        if pieces is not None:
            if len(pieces) != 1 or pieces[0].lanes is not None or not isinstance(pieces[0].source, fx.Node):
                return False
            path, node = (*path, Step(node, pieces[0].source, "move")), pieces[0].source
            continue
        scaled = number_factor(node, sizes)
        if scaled is None:
            break
        path, node, factor = (*path, Step(node, scaled[0], "point")), scaled[0], factor * scaled[1]
    found = contraction(node, sizes)
    if found is not None:
        if found.scale_nodes or found.extent < 2:
            return False
        parts.append(_Part(found, path, factor * found.scale))
        if found.addend is None or not found.addend_scale:
            return True
        return _collect(found.addend, top, (*path, Step(node, found.addend, "point")), factor * found.addend_scale,
                        parts, sizes)
    if node.target in (aten.add.Tensor, aten.sub.Tensor):
        sign = -1.0 if node.target is aten.sub.Tensor else 1.0
        alpha = float(sizes.number(kwargs_of(node).get("alpha", 1)))
        for operand, own in zip(args_of(node)[:2], (1.0, sign * alpha)):
            if is_tensor(operand):
                if not _collect(operand, top, (*path, Step(node, operand, "point")), factor * own, parts, sizes):
                    return False
            elif sizes.number(operand) != 0:
                return False
        return True
    return False


def _samples(count: int) -> torch.Tensor:
    if count <= SAMPLES:
        return torch.arange(count)
    some = torch.randint(0, count, (SAMPLES,), generator=torch.Generator().manual_seed(3))
    some[0], some[1], some[2] = 0, 1, count - 1
    return some


def _oriented(part: _Part, index: torch.Tensor, sizes: Sizes,
              like: tuple[_Side, _Side] | None = None) -> tuple[_Side, _Side] | None:
    """The operands of a part, the one that reads the same rows as those of ``like`` in the same place."""
    sides = [_side(part, number, index, sizes) for number in (0, 1)]
    if sides[0] is None or sides[1] is None:
        return None
    pair = (sides[0], sides[1])
    if like is None or all(a.outer == b.outer and bool((a.rows == b.rows).all()) for a, b in zip(pair, like)):
        return pair
    return None


def _side(part: _Part, number: int, index: torch.Tensor, sizes: Sizes) -> _Side | None:
    node = (part.product.lhs, part.product.rhs)[number]
    at = (part.product.lhs_at, part.product.rhs_at)[number]
    shape = sizes.shape(node)
    zero = torch.zeros(1, dtype=torch.int64)
    along = at(zero[:, None], torch.arange(part.product.extent)[None, :]).flatten()
    stride = int(along[1] - along[0])
    dim = next((d for d, s in enumerate(row_major(shape)) if s == stride and shape[d] == part.product.extent), None)
    if dim is None or bool((along.diff() != stride).any()) or int(along[0]) // stride % shape[dim]:
        return None
    outer = tuple(s for d, s in enumerate(shape) if d != dim)
    side = _Side(node, dim, outer, zero, *_first(node, sizes))
    return replace(side, rows=_rows(part, number, side, index, sizes))


def _first(node: fx.Node, sizes: Sizes) -> tuple[fx.Node, int]:
    """Where the first element comes from: parts of one tensor are put in its order."""
    index = torch.zeros(1, dtype=torch.int64)
    while True:
        pieces = sources(node, index, sizes)
        scaled = number_factor(node, sizes) if pieces is None else None
        if scaled is not None and sizes.shape(scaled[0]) == sizes.shape(node):
            node = scaled[0]
            continue
        if not pieces or not isinstance(pieces[0].source, fx.Node):
            return node, int(index[0])
        node, index = pieces[0].source, pieces[0].index


def _rows(part: _Part, number: int, side: _Side, index: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    at = (part.product.lhs_at, part.product.rhs_at)[number]
    out = replay(part.path, index, sizes)
    coordinates = unravel(at(out, torch.zeros_like(out)), sizes.shape(side.node))
    del coordinates[side.dim]
    return ravel(coordinates, side.outer) if coordinates else torch.zeros_like(out)


def _operand(sides: list[_Side], before: fx.Node, context: Context, sizes: Sizes) -> fx.Node:
    """The parts of an operand, channels last, as one tensor."""
    key = (before, tuple((s.node, s.dim) for s in sides))
    if key not in context.joined:
        graph = before.graph
        last = before.prev
        builder = Builder(graph, sizes, before)
        turned = []
        for side in sides:
            rank = len(side.outer) + 1
            turned.append(builder.permute(side.node, [d for d in range(rank) if d != side.dim] + [side.dim]))
        context.joined[key] = builder.call(aten.cat.default, turned, len(sides[0].outer))
        node = last.next
        while node is not before:
            context.scratch.append(node)
            node = node.next
    return context.joined[key]
