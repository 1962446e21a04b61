"""Writes a recognised attention's operands down as nodes, in the layout of the fused ops."""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.fx as fx

from ..elements.layouts import Axis, Builder
from .attention_match import AttentionMatch, Gathered, KeyPiece, Mask, Operand

aten = torch.ops.aten


@dataclass(frozen=True)
class AttentionOperands:
    """q [B, S, H, D], kv [B, N, D], mask [B or 1, S, N] (bool, True = attend, or floating and additive), sink [H]."""

    q: fx.Node
    kv: fx.Node
    mask: fx.Node | None
    sink: fx.Node | None
    scale: float


@dataclass(frozen=True)
class MergeOperands:
    """partials [P, T, H, D], lse_or_max [P, T, H], sum [P, T, H] or None, sink [H] or None."""

    partials: fx.Node
    lse_or_max: fx.Node
    sum: fx.Node | None
    sink: fx.Node | None
    stat_scale: float


@dataclass(frozen=True)
class Pool:
    """kv [N, D], indices [T, K] (negative: masked)."""

    kv: fx.Node
    indices: fx.Node


@dataclass(frozen=True)
class GatheredOperands:
    """q [T, H, D], one or two pools, sink [H] or None."""

    q: fx.Node
    pools: tuple[Pool, ...]
    sink: fx.Node | None
    scale: float


def batch_axes(match: AttentionMatch) -> tuple[int, ...]:
    """The token axes (by number) that make up B: up to the last one that the keys depend on."""
    tokens = match.axes.tokens
    last = -1
    for piece in match.kv:
        for number, axis in enumerate(piece.rows.axes[:len(tokens)]):
            if axis.stride and axis.size > 1:
                last = max(last, number)
    return tuple(range(last + 1))


class _Writer:
    """Operands as views, with the token axes split into B (the axes that the keys depend on) and S (the others)."""

    def __init__(self, match: AttentionMatch, builder: Builder):
        self.match, self.builder = match, builder
        self.batch = batch_axes(match)
        self.rest = tuple(range(len(self.batch), len(match.axes.tokens)))

    def take(self, operand: Operand) -> fx.Node | None:
        """One dimension per axis; axes of stride 0 have size 1."""
        for candidate in (operand, *operand.fallbacks):
            source = candidate.node
            for cut in candidate.cuts:
                end = sys.maxsize if cut.end is None else cut.end
                source = self.builder.call(aten.slice.Tensor, source, cut.dim, cut.start, end)
            axes = [replace(a, size_from=(source, a.size_from[1]))
                    if a.size_from is not None and a.size_from[0] is candidate.node else a for a in candidate.axes]
            node = self.builder.take(source, candidate.offset, axes)
            if node is not None:
                return node
        return None

    def length(self, node: fx.Node, dim: int) -> int | fx.Node:
        """A dimension's size as an argument."""
        dim %= len(node.meta["val"].shape)
        size = node.meta["val"].shape[dim]
        return size if isinstance(size, int) else self.builder.symbol(size, node, dim)

    def size(self, axes: Sequence[Axis]) -> int | fx.Node:
        """The product of the axes' sizes, as an argument."""
        total: int | fx.Node = 1
        for axis in axes:
            size = self.builder.size(axis)
            if isinstance(total, int) and isinstance(size, int):
                total *= size
            else:
                total = size if total == 1 else self.builder.call(operator.mul, total, size)
        return total

    def tokens(self, numbers: Sequence[int]) -> list[Axis]:
        return [self.match.axes.tokens[i] for i in numbers]

    def widened(self, node: fx.Node, axes: Sequence[Axis], numbers: Sequence[int]) -> fx.Node:
        """Expand the token dimensions ``numbers`` of ``node`` that are 1 because nothing depends on them, unless none
        of them is needed: then they stay 1."""
        needed = [i for i in numbers if axes[i].stride == 0 and axes[i].size != 1]
        if not needed:
            return node
        shape: list[int | fx.Node] = [-1] * len(axes)
        for i in needed:
            shape[i] = self.builder.size(self.match.axes.tokens[i])
        return self.builder.call(aten.expand.default, node, shape)

    def grouped(self, node: fx.Node, tail: int, batch_is_one: bool = False) -> fx.Node:
        """[t.., tail..] -> [B, S, tail..]; B is 1 when ``batch_is_one`` (the dimensions of B are all 1)."""
        builder = self.builder
        if len(self.batch) == 1 and len(self.rest) == 1:
            return node
        value = node.meta["val"]
        shape = [self.length(node, i) for i in range(len(value.shape) - tail, len(value.shape))]
        batch = 1 if batch_is_one else self.size(self.tokens(self.batch))
        rest = self.size(self.tokens(self.rest))
        return builder.view(node, [batch, rest, *shape])

    def q(self) -> fx.Node | None:
        operand = self.match.q
        node = None if operand is None else self.take(operand)
        if operand is None or node is None:
            return None
        node = self.widened(node, operand.axes, range(len(self.match.axes.tokens)))
        return self.grouped(node, 2)

    def rows(self, piece: KeyPiece) -> fx.Node | None:
        """[B, n, D] of one piece."""
        node = self.take(piece.rows)
        if node is None:
            return None
        node = self.widened(node, piece.rows.axes, self.batch)
        shape = [self.size(self.tokens(self.batch)), self.length(node, -2), self.match.axes.channels.size]
        if not self.batch:
            shape[0] = 1
        return self.builder.view(node, shape)

    def mask(self, mask: Mask, batched: bool) -> fx.Node | None:
        """[B or 1, S, n] of one mask as it is in the source."""
        node = self.take(mask.operand)
        if node is None:
            return None
        node = self.widened(node, mask.operand.axes, (*(self.batch if batched else ()), *self.rest))
        return self.grouped(node, 1, batch_is_one=not batched)


def _convert(builder: Builder, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    if node.meta["val"].dtype == dtype:
        return node
    return builder.call(torch.ops.prims.convert_element_type.default, node, dtype)


def emit_attention(match: AttentionMatch, builder: Builder) -> AttentionOperands | None:
    """The operands of a dense attention, or None when one of them is no view of its node."""
    writer = _Writer(match, builder)
    q = writer.q()
    pieces = [rows for piece in match.kv if (rows := writer.rows(piece)) is not None]
    if q is None or len(pieces) < len(match.kv):
        return None
    dtype = q.meta["val"].dtype
    for piece in pieces:
        dtype = torch.promote_types(dtype, piece.meta["val"].dtype)
    q = _convert(builder, q, dtype)
    pieces = [_convert(builder, piece, dtype) for piece in pieces]
    kv = pieces[0] if len(pieces) == 1 else builder.call(aten.cat.default, pieces, 1)
    sink = writer.take(match.sink) if match.sink is not None else None
    if match.sink is not None and sink is None:
        return None
    mask = None
    if match.sink_gate or any(piece.masks for piece in match.kv):
        mask = _emit_mask(match, writer, pieces)
        if mask is None:
            return None
    scaled = _scaled(match, writer, q)
    return None if scaled is None else AttentionOperands(scaled[0], kv, mask, sink, scaled[1])


def _scaled(match: AttentionMatch, writer: _Writer, q: fx.Node) -> tuple[fx.Node, float] | None:
    """(queries, scale as a number)."""
    if match.scale_node is None:
        return q, match.scale
    # The op's scale is a number; what the tensor deviates from the usual 1/sqrt(D) goes into q. For a tensor that
    # holds just that, the factor is 1 and q keeps its bits.
    builder, dtype = writer.builder, q.meta["val"].dtype
    scale = match.axes.channels.size ** -0.5
    factor = writer.take(match.scale_node)
    if factor is None:
        return None
    factor = builder.call(aten.mul.Tensor, _convert(builder, factor, torch.float32), match.scale / scale)
    return _convert(builder, builder.call(aten.mul.Tensor, _convert(builder, q, torch.float32), factor), dtype), scale


# Added to all scores of a token whose sink is masked: the softmax over keys stays, the sink's share vanishes.
NO_SINK_SHIFT = 1000.0


def _emit_mask(match: AttentionMatch, writer: _Writer, rows: list[fx.Node]) -> fx.Node | None:
    builder = writer.builder
    tokens = len(match.axes.tokens)
    every = [mask for piece in match.kv for mask in piece.masks] + list(match.sink_gate)
    batched = any(axis.stride and axis.size > 1 for mask in every
                  for i, axis in enumerate(mask.operand.axes[:tokens]) if i in writer.batch)
    additive = bool(match.sink_gate) or any(mask.kind == "add" for mask in every)
    parts: list[fx.Node] = []
    for piece, keys in zip(match.kv, rows):
        part = None
        for mask in piece.masks:
            node = writer.mask(mask, batched)
            if node is None:
                return None
            node = _normalised(builder, mask, node, additive)
            if part is None:
                part = node
            else:
                part = builder.call(aten.add.Tensor if additive else aten.bitwise_and.Tensor, part, node)
        if part is None:
            part = _no_mask(writer, keys, batched, additive)
        parts.append(part)
    if additive:
        dtype = parts[0].meta["val"].dtype
        for part in parts[1:]:
            dtype = torch.promote_types(dtype, part.meta["val"].dtype)
        parts = [_convert(builder, part, dtype) for part in parts]
    whole = parts[0] if len(parts) == 1 else builder.call(aten.cat.default, parts, 2)
    for gate in match.sink_gate:
        node = writer.mask(gate, batched)
        if node is None:
            return None
        keep = node if gate.kind == "keep" else builder.call(aten.logical_not.default, node)
        shift = _select(builder, keep, 0.0, NO_SINK_SHIFT)
        whole = builder.call(aten.add.Tensor, whole, shift)
    return whole


def _select(builder: Builder, keep: fx.Node, yes: float, no: float) -> fx.Node:
    # where and full, not masked_fill and full_like: those Inductor lowers only by a decomposition that runs before this
    # pass.
    one = builder.call(aten.full.default, [], yes, dtype=torch.float32, device=keep.meta["val"].device)
    return builder.call(aten.where.ScalarOther, keep, one, no)


def _normalised(builder: Builder, mask: Mask, node: fx.Node, additive: bool) -> fx.Node:
    """As a bool mask (True = attend), or as an additive one when any mask of this attention is additive."""
    if mask.kind == "add":
        return node if mask.coefficient == 1.0 else builder.call(aten.mul.Tensor, node, mask.coefficient)
    keep = node if mask.kind == "keep" else builder.call(aten.logical_not.default, node)
    return _select(builder, keep, 0.0, float("-inf")) if additive else keep


def _no_mask(writer: _Writer, rows: fx.Node, batched: bool, additive: bool) -> fx.Node:
    """The mask of keys that everybody sees; ``rows`` [B, n, D]."""
    batch = writer.size(writer.tokens(writer.batch)) if batched else 1
    shape = [batch, writer.size(writer.tokens(writer.rest)), writer.length(rows, 1)]
    device = rows.meta["val"].device
    if additive:
        return writer.builder.call(aten.full.default, shape, 0.0, dtype=torch.float32, device=device)
    return writer.builder.call(aten.full.default, shape, True, dtype=torch.bool, device=device)


def emit_merge(match: AttentionMatch, builder: Builder) -> MergeOperands | None:
    """The operands of a merge of split-KV partials."""
    writer = _Writer(match, builder)
    partials = match.partials
    assert partials is not None

    def gather(operands: tuple[Operand, ...], tail: int) -> fx.Node | None:
        nodes = [node for operand in operands if (node := writer.take(operand)) is not None]
        if len(nodes) < len(operands):
            return None
        if not partials.stacked:
            nodes = [builder.call(aten.unsqueeze.default, node, 0) for node in nodes]
            dtype = nodes[0].meta["val"].dtype
            for node in nodes[1:]:
                dtype = torch.promote_types(dtype, node.meta["val"].dtype)
            nodes = [_convert(builder, node, dtype) for node in nodes]
        node = nodes[0] if len(nodes) == 1 else builder.call(aten.cat.default, nodes, 0)
        value = node.meta["val"]
        keep = range(len(value.shape) - tail, len(value.shape))
        shape = [value.shape[0], writer.size(match.axes.tokens), *(value.shape[i] for i in keep)]
        return builder.view(node, [s if isinstance(s, (int, fx.Node)) else -1 for s in shape])

    parts = gather(partials.parts, 2)
    top = gather(partials.top, 1)
    total = gather(partials.total, 1) if partials.total is not None else None
    sink = writer.take(match.sink) if match.sink is not None else None
    if parts is None or top is None or (partials.total is not None and total is None):
        return None
    if match.sink is not None and sink is None:
        return None
    return MergeOperands(parts, _convert(builder, top, torch.float32),
                         None if total is None else _convert(builder, total, torch.float32), sink,
                         partials.stat_scale)


def emit_gathered(match: AttentionMatch, builder: Builder) -> GatheredOperands | None:
    """The operands of the gathered form."""
    writer = _Writer(match, builder)
    writer.batch, writer.rest = (), tuple(range(len(match.axes.tokens)))
    every = writer.rest
    q = None if match.q is None else writer.take(match.q)
    if match.q is None or q is None:
        return None
    q = writer.widened(q, match.q.axes, every)
    channels = match.axes.channels.size
    q = builder.view(q, [writer.size(match.axes.tokens), match.axes.heads.size, channels])
    dtype = q.meta["val"].dtype
    for found in match.gathered:
        dtype = torch.promote_types(dtype, found.pool.meta["val"].dtype)
    pools = []
    for found, piece in zip(match.gathered, match.kv):
        pool = _pool(match, writer, found, piece, dtype)
        if pool is None:
            return None
        pools.append(pool)
    sink = writer.take(match.sink) if match.sink is not None else None
    scaled = _scaled(match, writer, _convert(builder, q, dtype))
    if scaled is None or (match.sink is not None and sink is None):
        return None
    return GatheredOperands(scaled[0], tuple(pools), sink, scaled[1])


def _pool(match: AttentionMatch, writer: _Writer, found: Gathered, piece: KeyPiece, dtype: torch.dtype) -> Pool | None:
    builder, tokens = writer.builder, len(match.axes.tokens)
    kv = _convert(builder, builder.view(found.pool, [-1, match.axes.channels.size]), dtype)
    indices = writer.take(found.indices)
    if indices is None:
        return None
    indices = writer.widened(indices, found.indices.axes, range(tokens))
    if found.wrapped:
        wrapped = builder.call(aten.add.Tensor, indices, found.wrapped)
        indices = builder.call(aten.where.self, builder.call(aten.lt.Scalar, indices, 0), wrapped, indices)
    if found.first:
        indices = builder.call(aten.add.Tensor, indices, found.first)
    for axis, step in enumerate(found.steps):
        if step:
            value = indices.meta["val"]
            rows = builder.call(aten.arange.start_step, 0, match.axes.tokens[axis].size * step, step,
                                dtype=value.dtype, device=value.device)
            rows = builder.view(rows, [-1 if i == axis else 1 for i in range(tokens + 1)])
            indices = builder.call(aten.add.Tensor, indices, rows)
    for mask in piece.masks:
        hidden = writer.take(mask.operand)
        if hidden is None:
            return None
        if mask.kind == "keep":
            hidden = builder.call(aten.logical_not.default, hidden)
        indices = builder.call(aten.where.ScalarSelf, hidden, -1, indices)
    return Pool(kv, builder.view(indices, [writer.size(match.axes.tokens), writer.length(indices, -1)]))
