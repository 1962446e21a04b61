"""From the segments of an attention to its operands: queries, key rows, masks, scale, as families of elements."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx

from ..elements.layouts import Axis, row_major
from ..elements.moves import broadcast_index
from ..elements.numeric import Leaf
from .attention_match import KeyPiece, Mask, Operand
from .attention_proof import Neutral, check_product, depends_on
from .attention_sites import Explorer, Fused, Segment
from .descent import Family, Reach, fit, is_tensor, tensor_operands
from .paths import Step, Unfollowed, advance, replay
from .refusal import Refused
from .region import constant_only

MAX_MASKS = 4
Element = Callable[..., torch.Tensor]


def _everywhere(value: float | bool, at: torch.Tensor) -> torch.Tensor:
    return torch.full((len(at),), value, dtype=torch.bool if isinstance(value, bool) else torch.float64)


@dataclass(frozen=True)
class Side:
    """An input of the scores on their way to the weights: elements ``element(tokens.., head, key)`` of ``ways[i]``,
    the furthest node first."""

    ways: tuple[Reach, ...]
    element: Callable[[Reach], Element]

    @property
    def leaf(self) -> fx.Node:
        return self.ways[0].node


@dataclass(frozen=True)
class Binding:
    """A segment with its operands: ``query`` axes (tokens.., H, D), ``piece`` rows and masks; ``extra`` are the
    families of the masks in the axes (tokens.., H, keys)."""

    segment: Segment
    query: Operand
    query_at: int
    piece: KeyPiece
    rows_at: int
    scale: float
    scale_node: fx.Node | None


class Binder:
    """Binds segments. ``region``: the nodes that depend on a score."""

    def __init__(self, explorer: Explorer, segments: Sequence[Segment], region: set[fx.Node],
                 constants: Callable[[fx.Node], object]):
        self.explorer, self.region, self.constants = explorer, region, constants
        self.sizes, self.axes = explorer.sizes, explorer.axes
        self.products = {s.scores.node: s.scores for s in segments}
        self.tokens = len(self.axes.tokens)

    # -- elements ---------------------------------------------------------------------------------------------------
    def site_index(self, segment: Segment, tokens: Sequence[torch.Tensor], head: torch.Tensor,
                   channel: torch.Tensor) -> torch.Tensor:
        return replay(segment.site.path, self.explorer.output_index(*tokens, head, channel), self.sizes)

    def weight(self, segment: Segment, coordinates: Sequence[torch.Tensor]) -> torch.Tensor:
        """Index of the weight of (tokens.., head, key of the segment)."""
        *tokens, head, key = coordinates
        at = self.site_index(segment, tokens, head, torch.zeros_like(head))
        return segment.site.values.lhs_at(at, key + segment.start)

    def row_element(self, segment: Segment, way: Reach) -> Element:
        def element(*coordinates: torch.Tensor) -> torch.Tensor:
            *tokens, head, key, channel = coordinates
            at = self.site_index(segment, tokens, head, channel)
            return replay(way.path, segment.site.values.rhs_at(at, key + segment.start), self.sizes)
        return element

    def query_element(self, segment: Segment, way: Reach) -> Element:
        def element(*coordinates: torch.Tensor) -> torch.Tensor:
            *tokens, head, channel = coordinates
            out = replay(segment.path, self.weight(segment, (*tokens, head, torch.zeros_like(head))), self.sizes)
            return replay(way.path, segment.scores.lhs_at(out, channel), self.sizes)
        return element

    # -- operands ---------------------------------------------------------------------------------------------------
    def fitted(self, ways: Sequence[Reach], element: Callable[[Reach], Element], extents: list[int],
               shared: bool = False) -> list[tuple[int, Family]]:
        """The furthest way whose elements have plain strides, and the nearest. ``shared``: preferably (and then only)
        ways that do not change with the head."""
        found: list[tuple[int, Family]] = []
        for number, way in enumerate(ways):
            if found and number != len(ways) - 1:
                continue
            family = fit(element(way), extents)
            if family is not None:
                found.append((number, family))
                if shared and family.strides[self.tokens] and found[0][1].strides[self.tokens] == 0:
                    found.pop()
        return found

    def _axes(self, node: fx.Node, strides: Sequence[int], own: Sequence[Axis], keys: int | None,
              channels: bool) -> tuple[Axis, ...]:
        """The token axes, then (keys), then (channels) with the strides of a family."""
        axes = [axis.with_stride(stride) for axis, stride in zip(own, strides)]
        rest = list(strides[len(own):])
        if keys is not None:
            axes.append(Axis(keys, rest[0], self.key_size_from(node, rest.pop(0), keys)))
        if channels:
            axes.append(self.axes.channels.with_stride(rest[0]))
        return tuple(axes)

    def key_size_from(self, node: fx.Node, stride: int, size: int) -> tuple[fx.Node, int] | None:
        shape = self.sizes.shape(node)
        for dim, (step, length) in enumerate(zip(row_major(shape), shape)):
            if step == stride and not isinstance(node.meta["val"].shape[dim], int):
                if length == size:
                    return node, dim
        return None

    def rows(self, segment: Segment) -> tuple[int, Operand] | Refused:
        extents = [*(a.size for a in self.axes.tokens), self.axes.heads.size, segment.count, self.axes.channels.size]
        found = self.fitted(segment.value_rows, lambda way: self.row_element(segment, way), extents, True)
        node = segment.value_rows[0].node
        if not found:
            return Refused("fmha", f"the key rows in {node.name} have no regular layout", node)
        operands = []
        for number, family in found:
            *tokens, head, key, channel = family.strides
            if head and self.axes.heads.size > 1:
                return Refused("fmha", f"every head has its own keys in {node.name}", node)
            way = segment.value_rows[number]
            if segment.rows[number].factor != segment.rows[found[0][0]].factor:
                continue
            operands.append(Operand(way.node, family.offset, self._axes(
                way.node, (*tokens, key, channel), self.axes.tokens, segment.count, True)))
        first = operands[0]
        return found[0][0], Operand(first.node, first.offset, first.axes, tuple(operands[1:]))

    def query(self, segment: Segment) -> tuple[int, Operand] | Refused:
        extents = [*(a.size for a in self.axes.tokens), self.axes.heads.size, self.axes.channels.size]
        found = self.fitted(segment.queries, lambda way: self.query_element(segment, way), extents)
        node = segment.queries[0].node
        if not found:
            return Refused("fmha", f"the queries in {node.name} have no regular layout", node)
        operands = []
        own = (*self.axes.tokens, self.axes.heads)
        for number, family in found:
            way = segment.queries[number]
            if way.factor != segment.queries[found[0][0]].factor:
                continue        # already multiplied by what the scale counts
            operands.append(Operand(way.node, family.offset, self._axes(way.node, family.strides, own, None, True)))
        first = operands[0]
        return found[0][0], Operand(first.node, first.offset, first.axes, tuple(operands[1:]))

    # -- what the scores meet on their way --------------------------------------------------------------------------
    def sides(self, segment: Segment) -> list[Side]:
        """The tensor inputs of the operators between the weights and the product, row statistics apart."""
        found: list[Side] = []
        zero = torch.zeros(1, dtype=torch.int64)

        def add(position: int, step: Step | None, operand: fx.Node) -> None:
            def near(*coordinates: torch.Tensor) -> torch.Tensor:
                index = replay(segment.path[:position], self.weight(segment, coordinates), self.sizes)
                if step is None:
                    shape = (segment.site.fused.shape if segment.site.fused is not None
                             else self.sizes.shape(segment.scores.node))
                    return broadcast_index(index, shape, self.sizes.shape(operand))
                return advance(step, index, self.sizes)

            keys = torch.arange(segment.count)
            base = near(*[zero.expand(len(keys))] * (self.tokens + 1), keys)
            ways = tuple(reversed(self.explorer.descent.chain(operand, base)))
            found.append(Side(ways, lambda way: lambda *c: replay(way.path, near(*c), self.sizes)))

        for position, step in enumerate(segment.path):
            for operand, kind in tensor_operands(step.node):
                if operand is not step.operand and operand not in self.region:
                    add(position, Step(step.node, operand, kind), operand)
        addend = segment.site.fused.mask if segment.site.fused is not None else segment.scores.addend
        if addend is not None and is_tensor(addend):
            add(len(segment.path), None, addend)
        unique: dict[fx.Node, Side] = {}
        for side in found:
            unique.setdefault(side.leaf, side)
        return list(unique.values())

    def mask_operand(self, segment: Segment, side: Side) -> Operand | Refused | None:
        """A side input as an operand with the axes (tokens.., keys); None when it does not change with the key."""
        extents = [*(a.size for a in self.axes.tokens), self.axes.heads.size, segment.count]
        found = self.fitted(side.ways, side.element, extents, True)
        if not found:
            return Refused("fmha", f"{depends_on(side.leaf)} changes with token and key in an irregular way", side.leaf)
        operands = []
        for number, family in found:
            *tokens, head, key = family.strides
            if key == 0 and (segment.count > 1 or self.sizes.numel(side.leaf) == 1):
                return None
            if head and self.axes.heads.size > 1:
                return Refused("fmha", f"{depends_on(side.leaf)} changes the scores of every head differently",
                               side.leaf)
            way = side.ways[number]
            operands.append(Operand(way.node, family.offset, self._axes(
                way.node, (*tokens, key), self.axes.tokens, segment.count, False)))
        first = operands[0]
        return Operand(first.node, first.offset, first.axes, tuple(operands[1:]))

    def _weights(self, segment: Segment, leaves: dict[fx.Node, float | bool], raw: float,
                 unknown: float = 1.0) -> torch.Tensor:
        """The (neutral) weights of the first, middle and last key."""
        keys = torch.tensor(sorted({0, segment.count // 2, segment.count - 1}))
        index = self.weight(segment, [torch.zeros_like(keys)] * (self.tokens + 1) + [keys])
        constant: dict[fx.Node, Leaf] = {node: functools.partial(_everywhere, value) for node, value in leaves.items()}
        engine = Neutral(self.sizes, constant, self.constants, self.products, self.region, raw, unknown)
        return engine.values(segment.site.values.lhs, index)

    def bind(self, segment: Segment) -> Binding | Refused:
        """All operands of a segment."""
        rows, query = self.rows(segment), self.query(segment)
        if isinstance(rows, Refused):
            return rows
        if isinstance(query, Refused):
            return query
        rows_at, row_operand = rows
        query_at, query_operand = query
        wrong = self._check_product(segment, query_at, rows_at, query_operand, row_operand)
        if wrong:
            return Refused("fmha", wrong, segment.scores.node)
        if segment.site.fused is not None:
            found = self._fused_masks(segment, segment.site.fused)
        else:
            found = self._masks(segment)
        if isinstance(found, Refused):
            return found
        masks, scale, scale_node = found
        scale *= segment.rows[rows_at].factor * segment.queries[query_at].factor
        return Binding(segment, query_operand, query_at, KeyPiece(row_operand, masks), rows_at, scale, scale_node)

    def _check_product(self, segment: Segment, query_at: int, rows_at: int, query: Operand,
                       rows: Operand) -> str | None:
        generator = torch.Generator().manual_seed(segment.count)
        extents = [*(a.size for a in self.axes.tokens), self.axes.heads.size, segment.count]
        where = [torch.randint(0, e, (12,), generator=generator) for e in extents]
        for at, extent in zip(where, extents):
            at[0], at[1] = 0, extent - 1
        try:
            out = replay(segment.path, self.weight(segment, where), self.sizes)
            wrong = check_product(segment, query_at, rows_at, out, self.axes.channels.size, query.axes[-1].stride,
                                  rows.axes[-1].stride, self.sizes)
            if wrong:
                return wrong
            first = replay(segment.rows[rows_at].path, segment.scores.rhs_at(out, torch.zeros_like(out)), self.sizes)
            start = replay(segment.queries[query_at].path, segment.scores.lhs_at(out, torch.zeros_like(out)),
                           self.sizes)
        except Unfollowed as error:
            return str(error)
        *tokens, head, key = where
        row_at = sum((c * a.stride for c, a in zip((*tokens, key), rows.axes)), torch.full_like(key, rows.offset))
        query_index = sum((c * a.stride for c, a in zip((*tokens, head), query.axes)),
                          torch.full_like(key, query.offset))
        if bool((first != row_at).any()):
            return f"a score multiplies another row of {rows.node.name} than its weight"
        if bool((start != query_index).any()):
            return f"a score multiplies another query of {query.node.name} than its token's and head's"
        return None

    def _fused_masks(self, segment: Segment, fused: Fused) -> tuple[tuple[Mask, ...], float, fx.Node | None] | Refused:
        if fused.causal:
            return Refused("fmha", "is_causal of a fused attention is not taken over", fused.node)
        masks = []
        for side in self.sides(segment):
            operand = self.mask_operand(segment, side)
            if isinstance(operand, Refused):
                return operand
            if operand is None:
                return Refused("fmha", f"{depends_on(side.leaf)} is the same for all keys", side.leaf)
            kind = "keep" if side.leaf.meta["val"].dtype == torch.bool else "add"
            masks.append(Mask(operand, kind))
        return tuple(masks), fused.scores.scale, None

    def _masks(self, segment: Segment) -> tuple[tuple[Mask, ...], float, fx.Node | None] | Refused:
        operands: dict[fx.Node, Operand] = {}
        others: list[fx.Node] = []
        for side in self.sides(segment):
            operand = self.mask_operand(segment, side)
            if isinstance(operand, Operand):
                operands[side.leaf] = operand
            elif constant_only(side.leaf):
                continue
            elif isinstance(operand, Refused):
                return operand
            else:
                others.append(side.leaf)
        bools = [n for n in operands if n.meta["val"].dtype == torch.bool]
        floats = [n for n in operands if n.meta["val"].dtype.is_floating_point]
        if len(bools) > MAX_MASKS:
            return Refused("fmha", "too many masks", segment.scores.node)
        passing = None
        for choice in itertools.product((True, False), repeat=len(bools)):
            leaves: dict[fx.Node, float | bool] = {**dict(zip(bools, choice)), **dict.fromkeys(floats, 0.0)}
            low, high = self._weights(segment, leaves, 0.0), self._weights(segment, leaves, 1.0)
            if bool((low > 0).all()) and bool((high > 0).all()) and bool((low != high).all()):
                passing = leaves
                break
        if passing is None:
            return Refused("fmha", "the weights are no exponential of the scores", segment.scores.node)
        slope = torch.log(high) - torch.log(low)
        if not _uniform(slope):
            return Refused("fmha", "the softmax scale differs from key to key", segment.scores.node)
        masks = []
        for node in (*bools, *floats):
            mask = self._mask_kind(segment, node, operands[node], passing, low, slope)
            if isinstance(mask, Refused):
                return mask
            if mask is not None:
                masks.append(mask)
        scale_node = self._scale_node(segment, passing, others, float(slope[0]))
        if isinstance(scale_node, Refused):
            return scale_node
        return tuple(masks), float(slope[0]), scale_node

    def _mask_kind(self, segment: Segment, node: fx.Node, operand: Operand, passing: dict[fx.Node, float | bool],
                   low: torch.Tensor, slope: torch.Tensor) -> Mask | Refused | None:
        if isinstance(passing[node], bool):
            flipped = self._weights(segment, {**passing, node: not passing[node]}, 0.0)
            if bool((flipped == 0).all()):
                return Mask(operand, "keep" if passing[node] else "drop")
            if constant_only(node):
                return None
            return Refused("fmha", f"{depends_on(node)} chooses between scores instead of masking them", node)
        moved = {**passing, node: 1.0}
        shift = torch.log(self._weights(segment, moved, 0.0)) - torch.log(low)
        other = torch.log(self._weights(segment, moved, 1.0)) - torch.log(low) - slope
        if _uniform(shift) and torch.allclose(shift, other, rtol=1e-9, atol=1e-12):
            return Mask(operand, "add", _tidy(float(shift[0]))) if float(shift[0]) else None
        if constant_only(node):
            return None
        return Refused("fmha", f"{depends_on(node)} is not added to the scores", node)

    def _scale_node(self, segment: Segment, passing: dict[fx.Node, float | bool], others: list[fx.Node],
                    slope: float) -> fx.Node | Refused | None:
        """The scalar that the scale is proportional to, when the source's scale is a tensor."""
        def scale_with(leaves: dict[fx.Node, float | bool], unknown: float = 1.0) -> float:
            low = self._weights(segment, {**passing, **leaves}, 0.0, unknown)
            high = self._weights(segment, {**passing, **leaves}, 1.0, unknown)
            return float((torch.log(high) - torch.log(low))[0])

        if not others or math.isclose(scale_with({}, 2.0), slope, rel_tol=1e-9):
            return None
        for node in others:
            double = scale_with({node: 2.0})
            if math.isclose(double, slope, rel_tol=1e-9):
                continue
            if self.sizes.numel(node) == 1 and math.isclose(double, 2 * slope, rel_tol=1e-9):
                return node
            return Refused("fmha", f"the softmax scale depends on {depends_on(node)}", node)
        return Refused("fmha", "the softmax scale depends on several inputs", segment.scores.node)


def _uniform(values: torch.Tensor) -> bool:
    return bool(torch.isfinite(values).all()) and bool((values - values[0]).abs().max() <= 1e-9 * (
        1 + values[0].abs()))


def _tidy(value: float) -> float:
    """1.0 for what is 1.0 up to float64 rounding."""
    return 1.0 if math.isclose(value, 1.0, rel_tol=1e-9) else value
