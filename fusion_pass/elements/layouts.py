"""Where a family of elements lives inside a tensor, and the view operators that rebuild it.

A family is a set of axes, each with a size and a stride *in row-major index space* of its tensor (not storage strides).
``radix`` reads the axes off sampled indices; ``take`` writes them down again as slice / select / view / permute
nodes; ``arrange`` turns a tensor whose dimensions are those axes into a given layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from .fakes import metadata_mode
from .sizes import Sizes

aten = torch.ops.aten
PROBE_LIMIT = 1 << 16
END = (1 << 63) - 1


@dataclass(frozen=True)
class Axis:
    """``size`` elements, ``stride`` apart in row-major index space. ``size_from`` = (node, dim) where that size can be
    read at run time when it is symbolic; None when it is a constant of the graph."""

    size: int
    stride: int
    size_from: tuple[fx.Node, int] | None = None

    def with_stride(self, stride: int) -> Axis:
        return Axis(self.size, stride, self.size_from)


def probe(size: int) -> torch.Tensor:
    """Positions at which an axis of ``size`` is sampled: all of them unless it is very long."""
    if size <= PROBE_LIMIT:
        return torch.arange(size)
    some: torch.Tensor = torch.unique(torch.tensor([0, 1, 2, 3, 5, size // 3, size // 2, size - 2, size - 1]))
    return some


def radix(values: torch.Tensor, size: int) -> list[tuple[int, int]] | None:
    """Mixed-radix form of ``values[i]`` (sampled at ``probe(size)``, ``values[0] == 0``): (size, stride) pairs,
    outermost first, with ``values[i] = sum_j digit_j(i) * stride_j``. None when there is no such form."""
    if size == 1:
        return []
    if size > PROBE_LIMIT:
        stride = int(values[1])
        return [(size, stride)] if bool((values == probe(size) * stride).all()) else None
    parts: list[tuple[int, int]] = []
    step = 1
    while step < size:
        along = values[::step]
        stride = int(along[1])
        wrong = (along != torch.arange(len(along)) * stride).nonzero()
        count = len(along) if len(wrong) == 0 else int(wrong[0])
        if size % (step * count):
            return None
        parts.append((count, stride))
        step *= count
    parts.reverse()
    index, total = torch.arange(size), torch.zeros(size, dtype=torch.int64)
    for count, stride in reversed(parts):
        total += index % count * stride
        index = index // count
    return parts if bool((total == values).all()) else None


def row_major(shape: Sequence[int]) -> list[int]:
    strides, running = [], 1
    for size in reversed(shape):
        strides.append(running)
        running *= size
    return strides[::-1]


class Builder:
    """Inserts view nodes before ``anchor`` and gives them their metadata."""

    def __init__(self, graph: fx.Graph, sizes: Sizes, before: fx.Node):
        self.graph, self.sizes, self.before = graph, sizes, before

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call_function node with ``meta["val"]`` computed on the operands' fake tensors."""
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(target, args, kwargs)
        values = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        tensors = [v for v in _leaves(values) if isinstance(v, torch.Tensor)]
        if not tensors:     # a factory: the graph's own mode
            tensors = [v for n in self.graph.nodes if isinstance(v := n.meta.get("val"), torch.Tensor)][:1]
        with metadata_mode(tensors):
            node.meta["val"] = target(*values[0], **values[1])
        return node

    def size(self, axis: Axis) -> int | fx.Node:
        """The axis's size as an argument: a number, or a node that reads it at run time."""
        if axis.size_from is None:
            return axis.size
        node, dim = axis.size_from
        return self.symbol(node.meta["val"].shape[dim], node, dim)

    def symbol(self, size: torch.SymInt, node: fx.Node, dim: int) -> fx.Node:
        """A node with the value of a symbolic size: a graph input or an earlier node that has it, else read from a
        graph input of that size, and only as the last resort from ``node`` (which that would keep alive)."""
        expr = size.node.expr
        tensors = []
        other: fx.Node
        for other in self.graph.nodes:
            if other is self.before:
                break
            value = other.meta.get("val")
            if isinstance(value, torch.SymInt) and value.node.expr == expr:
                return other
            if other.op == "placeholder" and isinstance(value, torch.Tensor):
                tensors.append((other, value))
        for other, value in tensors:
            for at, length in enumerate(value.shape):
                if isinstance(length, torch.SymInt) and length.node.expr == expr:
                    return self.call(aten.sym_size.int, other, at)
        return self.call(aten.sym_size.int, node, dim)

    def sizes_of(self, axes: Sequence[Axis]) -> list[int | fx.Node]:
        """Sizes for a view: a single symbolic one is written as -1."""
        symbolic = [a for a in axes if a.size_from is not None]
        if len(symbolic) == 1:
            return [-1 if a.size_from is not None else a.size for a in axes]
        return [self.size(a) for a in axes]

    def view(self, node: fx.Node, shape: Sequence[int | fx.Node]) -> fx.Node:
        old = node.meta["val"].shape
        if len(old) == len(shape) and all(isinstance(a, int) and isinstance(b, int) and a == b
                                          for a, b in zip(old, shape)):
            return node
        return self.call(aten.reshape.default, node, list(shape))

    def permute(self, node: fx.Node, order: Sequence[int]) -> fx.Node:
        if list(order) == list(range(len(order))):
            return node
        return self.call(aten.permute.default, node, list(order))

    def take(self, node: fx.Node, offset: int, axes: Sequence[Axis]) -> fx.Node | None:
        """A view of ``node`` with the dimensions ``axes`` (stride-0 axes become size 1), or None when its elements
        cannot be reached by slicing, splitting, merging and permuting dimensions."""
        shape = list(self.sizes.shape(node))
        strides = row_major(shape)
        starts = [offset // s % n for s, n in zip(strides, shape)]
        pieces: list[tuple[int, int, int, int]] = []        # (dim, step inside dim, count, asked axis)
        for number, axis in enumerate(axes):
            if axis.stride == 0 or axis.size == 1:
                continue
            size, stride = axis.size, axis.stride
            parts = []
            while size > 1:
                dim = next((d for d in range(len(shape)) if strides[d] <= stride < strides[d] * shape[d]
                            and stride % strides[d] == 0 and shape[d] > 1), None)
                if dim is None:
                    return None
                step = stride // strides[dim]
                room = (shape[dim] - starts[dim] + step - 1) // step
                if size <= room:
                    parts.append((dim, step, size, number))
                    break
                if shape[dim] % step or starts[dim] >= step or size % (shape[dim] // step):
                    return None
                parts.append((dim, step, shape[dim] // step, number))
                size //= shape[dim] // step
                stride = strides[dim] * shape[dim]
            pieces.extend(reversed(parts))
        current, order = node, []
        position = 0
        for dim in range(len(shape)):
            mine = sorted((p for p in pieces if p[0] == dim), key=lambda p: -p[1])
            if not mine:
                if shape[dim] == 1 and starts[dim] == 0:
                    current = self.call(aten.squeeze.dim, current, position)
                else:
                    current = self.call(aten.select.int, current, position, starts[dim])
                continue
            split = self._split(current, position, shape[dim], starts[dim], mine, axes)
            if split is None:
                return None
            current = split
            order.extend(mine)
            position += len(mine)
        wanted = [order.index(p) for p in sorted(order, key=lambda p: (p[3], -p[1] * strides[p[0]]))]
        current = self.permute(current, wanted)
        return self.view(current, self.sizes_of(
            [a if a.stride else Axis(1, 0) for a in axes]))

    def _split(self, node: fx.Node, position: int, size: int, start: int, parts: list[tuple[int, int, int, int]],
               axes: Sequence[Axis]) -> fx.Node | None:
        """Dimension ``position`` as one dimension per part (outermost first)."""
        _, step, count, _ = parts[-1]
        inner = 1
        for _, part_step, part_count, _ in reversed(parts):
            if part_step != step * inner:
                return self._split_gapped(node, position, size, start, parts, axes)
            inner *= part_count
        found = [self._count(part, axes) for part in parts]
        counts = [count for count in found if count is not None]
        if len(counts) < len(found):
            return None
        if not (start == 0 and step == 1 and inner == size):
            stop: int = start + (inner - 1) * step + 1
            if any(not isinstance(count, int) for count in counts):
                if stop + step <= size:
                    return None         # ends inside a dimension, at a place that depends on a symbolic size
                stop = END
            node = self.call(aten.slice.Tensor, node, position, start, stop, step)
        if len(parts) > 1:
            node = self.view(node, self._shape_with(node, position, counts))
        return node

    def _count(self, part: tuple[int, int, int, int], axes: Sequence[Axis]) -> int | fx.Node | None:
        """The length of a part: a node when its axis is symbolic, None when a part of a symbolic axis has no name."""
        axis = axes[part[3]]
        if axis.size_from is None:
            return part[2]
        return self.size(axis) if part[2] == axis.size else None

    def _shape_with(self, node: fx.Node, position: int, counts: Sequence[int | fx.Node]) -> list[int | fx.Node]:
        """``node``'s shape with ``counts`` in place of dimension ``position``."""
        shape: list[int | fx.Node] = []
        for dim, length in enumerate(node.meta["val"].shape):
            if dim == position:
                shape.extend(counts)
            else:
                shape.append(length if isinstance(length, int) else self.symbol(length, node, dim))
        return shape

    def _split_gapped(self, node: fx.Node, position: int, size: int, start: int,
                      parts: list[tuple[int, int, int, int]], axes: Sequence[Axis]) -> fx.Node | None:
        _, outer_step, outer_count, _ = parts[0]
        if size % outer_step or start % outer_step + (parts[1][2] - 1) * parts[1][1] >= outer_step:
            return None
        counts: list[int | fx.Node] = [size // outer_step, outer_step]
        if not isinstance(node.meta["val"].shape[position], int):
            outer = self._count(parts[0], axes)
            if outer is None or outer_count != size // outer_step:
                return None
            counts[0] = outer
        node = self.view(node, self._shape_with(node, position, counts))
        first = start // outer_step
        if first or outer_count != size // outer_step:
            node = self.call(aten.slice.Tensor, node, position, first, first + outer_count)
        return self._split(node, position + 1, outer_step, start % outer_step, parts[1:], axes)

    def arrange(self, node: fx.Node, axes: Sequence[Axis], like: fx.Node) -> fx.Node | None:
        """``node`` has one dimension per axis; put its elements where ``axes`` say they live in ``like``'s row-major
        order, and give it ``like``'s shape. None when the axes do not tile ``like`` exactly."""
        order = sorted(range(len(axes)), key=lambda i: -axes[i].stride if axes[i].size > 1 else 0)
        order = [i for i in order if axes[i].size > 1] + [i for i in order if axes[i].size == 1]
        running = 1
        for i in reversed([i for i in order if axes[i].size > 1]):
            if axes[i].stride != running:
                return None
            running *= axes[i].size
        if running != self.sizes.numel(like):
            return None
        node = self.permute(node, order)
        shape: list[int | fx.Node] = []
        symbolic = 0
        for size in like.meta["val"].shape:
            symbolic += not isinstance(size, int)
            shape.append(size if isinstance(size, int) else -1)
        if symbolic > 1:
            shape = [size if isinstance(size, int) else self.symbol(size, like, dim)
                     for dim, size in enumerate(like.meta["val"].shape)]
        return self.view(node, shape)


def _leaves(values: object) -> list[object]:
    return torch.utils._pytree.tree_leaves(values)
