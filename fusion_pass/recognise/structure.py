"""Partly changed copies: which channels of a tensor are those of another one, and how the rest of it is laid out.

A rotated attention output is the attention output with the last channels of every head changed. Its other channels say
which tensor that is, how long a head is, and where every token and head lies in both.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx

from ..elements.follow import Follower, Through, Trace
from ..elements.layouts import probe, radix, row_major
from ..elements.moves import Piece, sources
from ..elements.sizes import Sizes
from .anchors import JOINS
from .unchanged import may_leave_unchanged, unchanged

ROW = 2048
JOIN_LIMIT = 64
MAX_JOINS = 8


@dataclass(frozen=True)
class OuterAxis:
    """An axis of the rotated output other than the channels: strides in the source, in the node, in the tables."""

    size: int
    source: int
    here: int
    cos: int
    sin: int
    size_from: tuple[fx.Node, int] | None = None

    @property
    def is_token(self) -> bool:
        """The rotation changes along it, so it runs over tokens."""
        return bool(self.cos or self.sin)


@dataclass(frozen=True)
class Structure:
    """Where the untouched channels of ``node`` come from, before anything is known of the rotated ones."""

    node: fx.Node
    source: fx.Node
    offset: int
    axes: tuple[OuterAxis, ...]
    head_dim: int
    channel_stride: int
    rope_start: int

    def source_index(self, outer: torch.Tensor, channel: torch.Tensor) -> torch.Tensor:
        """``outer``: coordinates [M, number of axes]; ``channel`` [M]."""
        strides = torch.tensor([a.source for a in self.axes], dtype=torch.int64)
        return self.offset + (outer * strides).sum(1) + channel * self.channel_stride

    def here_index(self, outer: torch.Tensor, channel: torch.Tensor) -> torch.Tensor:
        strides = torch.tensor([a.here for a in self.axes], dtype=torch.int64)
        return (outer * strides).sum(1) + channel

    def random_outer(self, count: int, seed: int = 0) -> torch.Tensor:
        """``count`` random coordinates of the outer axes, [count, axes]."""
        generator = torch.Generator().manual_seed(seed)
        columns = [torch.randint(0, a.size, (count,), generator=generator) for a in self.axes]
        return torch.stack(columns, 1) if columns else torch.zeros(count, 0, dtype=torch.int64)


def read_structure(node: fx.Node, sizes: Sizes, follower: Follower, through: Through | None) -> Structure | None:
    """The layout of the untouched channels, or None when ``node`` is not a partly changed copy of one tensor.

    That tensor may itself be put together of parts that are computed apart (a loop over heads, or over groups): then it
    is the nearest node at which they come together. Or all channels are computed, those too that stay as they are."""
    trace = follower.follow(node, torch.arange(min(sizes.numel(node), ROW)), through=through)
    found = _read(node, sizes, follower, through, frozenset(), trace)
    if found is not None:
        return found
    ends = [origin.node for origin in trace.origins]
    if len(ends) < 2 and not any(isinstance(end, fx.Node) and may_leave_unchanged(end) for end in ends):
        return None
    way = unchanged(sizes, through)
    stops = [frozenset([join]) for join in _joins(node, sizes, way)]
    if _looks_through(node, sizes, follower, through, way):
        stops.insert(0, frozenset())
    for stop in stops:
        found = _read(node, sizes, follower, way, stop)
        if found is not None:
            return found
    return None


def _looks_through(node: fx.Node, sizes: Sizes, follower: Follower, through: Through | None, way: Through) -> bool:
    """Whether ``way`` goes on where ``through`` ends, for the first or the last element: two tell whether a whole row
    is worth reading."""
    used = False

    def counted(here: fx.Node, index: torch.Tensor) -> list[Piece] | None:
        nonlocal used
        pieces = None if through is None else through(here, index)
        if pieces is None:
            pieces = way(here, index)
            used = used or pieces is not None
        return pieces

    count = sizes.numel(node)
    if count:
        follower.follow(node, torch.tensor([0, count - 1]), through=counted)
    return used


def _joins(node: fx.Node, sizes: Sizes, through: Through | None) -> list[fx.Node]:
    """Where elements of several nodes come together on the way of the first element, nearest first."""
    index = torch.zeros(1, dtype=torch.int64)
    result: list[fx.Node] = []
    here: object = node
    for _ in range(JOIN_LIMIT):
        if not isinstance(here, fx.Node) or len(result) == MAX_JOINS:
            break
        pieces = sources(here, index, sizes)
        if pieces is None and through is not None:
            pieces = through(here, index)
        if not pieces or pieces[0].index is None:
            break
        if here is not node and here.target in JOINS:
            result.append(here)
        here, index = pieces[0].source, pieces[0].index
    return result


def _read(node: fx.Node, sizes: Sizes, follower: Follower, through: Through | None,
          stop: frozenset[fx.Node], trace: Trace | None = None) -> Structure | None:
    numel, shape = sizes.numel(node), sizes.shape(node)
    row = torch.arange(min(numel, ROW))
    trace = trace or follower.follow(node, row, stop, through)
    if not trace.origins or not isinstance(trace.origins[0].node, fx.Node) or int(trace.origins[0].lanes[0]) != 0:
        return None
    source = trace.origins[0].node
    index = torch.full((len(row),), -1, dtype=torch.int64)
    index[trace.origins[0].lanes] = trace.origins[0].index
    inside = index >= 0
    if len(row) < 2 or not inside[1]:
        return None
    stride = int(index[1] - index[0])
    run = inside & (index == index[0] + row * stride)
    changed = (~run).nonzero()
    if len(changed) == 0 or bool(inside[int(changed[0])]):
        return None
    start = int(changed[0])
    back = inside[start:].nonzero()
    if len(back) == 0 and len(row) < numel:
        return None
    head_dim = start + int(back[0]) if len(back) else len(row)
    if (head_dim - start) % 2 or stride == 0:
        return None
    outer, inner = list(shape), 1
    while outer:
        inner *= outer.pop()
        if inner % head_dim == 0:
            break
    if inner % head_dim:
        return None
    outer_dims = len(outer)
    if inner // head_dim > 1:
        outer.append(inner // head_dim)
    axes: list[OuterAxis] = []
    for dim, (size, here) in enumerate(zip(outer, [s * head_dim for s in row_major(outer)])):
        if size == 1:
            continue
        only = follower.follow(node, probe(size) * here, stop, through).only()
        if only is None or only.node is not source:
            return None
        parts = radix(only.index - int(index[0]), size)
        if parts is None:
            return None
        parts = _split_at_source_dims(parts, source, sizes)
        axes.extend(_axes(node, source, dim if dim < outer_dims else None, parts, here, sizes))
    found = Structure(node, source, int(index[0]), tuple(axes), head_dim, stride, start)
    outer_at = found.random_outer(48)
    channel = torch.randint(0, start, (48,), generator=torch.Generator().manual_seed(1))
    only = follower.follow(node, found.here_index(outer_at, channel), stop, through).only()
    if only is None or only.node is not source or not bool(
            (only.index == found.source_index(outer_at, channel)).all()):
        return None
    return found


def _split_at_source_dims(parts: list[tuple[int, int]], source: fx.Node, sizes: Sizes) -> list[tuple[int, int]]:
    """An axis that runs over two dimensions of the source (tokens and groups of heads, say) becomes two axes."""
    borders = row_major(sizes.shape(source))
    result = []
    for size, stride in parts:
        inner: list[tuple[int, int]] = []
        for border in sorted(borders):
            count = border // stride if stride > 0 else 0
            if stride > 0 and border % stride == 0 and 1 < count < size and size % count == 0:
                inner.append((count, stride))
                size, stride = size // count, border
        result.extend([(size, stride), *reversed(inner)])
    return result


def _axes(node: fx.Node, source: fx.Node, dim: int | None, parts: list[tuple[int, int]], here: int,
          sizes: Sizes) -> list[OuterAxis]:
    """Axes of one dimension of ``node``; a symbolic size is read from the source's own dimension if it is one."""
    symbolic = dim is not None and not isinstance(node.meta["val"].shape[dim], int)
    strides = row_major(sizes.shape(source))
    axes, step = [], here
    for size, stride in reversed(parts):
        size_from: tuple[fx.Node, int] | None = None
        if dim is not None and symbolic:
            for at, (own, length) in enumerate(zip(strides, source.meta["val"].shape)):
                if own == stride and sizes.shape(source)[at] == size and not isinstance(length, int):
                    size_from = (source, at)
            if size_from is None and len(parts) == 1:
                size_from = (node, dim)
            if size_from is None:
                size_from = _input_of_size(node, dim, size, sizes)
        axes.append(OuterAxis(size, stride, step, 0, 0, size_from))
        step *= size
    return axes[::-1]


def _input_of_size(node: fx.Node, dim: int, size: int, sizes: Sizes) -> tuple[fx.Node, int] | None:
    """A graph input's dimension that is the part of ``size`` elements of a dimension joining several axes (batch and
    tokens, say): it has that size, and the joint dimension is a multiple of it whatever the symbols are."""
    joint = node.meta["val"].shape[dim].node.expr
    for value in node.graph.find_nodes(op="placeholder"):
        shape = value.meta["val"].shape if isinstance(value.meta.get("val"), torch.Tensor) else ()
        for at, length in enumerate(shape):
            if isinstance(length, torch.SymInt) and not length.node.is_constant() and sizes.number(length) == size:
                if sympy.cancel(joint / length.node.expr).is_polynomial(*joint.free_symbols):
                    return value, at
    return None
