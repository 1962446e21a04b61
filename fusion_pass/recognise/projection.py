"""The grouped contraction: which axes of the rotation are groups and heads, and FP8 weights with block scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from ..elements.contractions import Contraction
from ..elements.follow import Follower
from ..elements.layouts import Axis, probe, radix, row_major
from ..elements.moves import CASTS, Piece, broadcast_index, is_move
from ..elements.numeric import Numeric, Unevaluated, random_leaf
from ..elements.sizes import Sizes
from ..fx_access import args_of
from .anchors import Anchor
from .quant_path import FP8, QuantPath, dtype_of, is_eight_bit_cast
from .refusal import Refused
from .rotation import Rotation
from .structure import OuterAxis

aten = torch.ops.aten
E8M0 = torch.float8_e8m0fnu


@dataclass(frozen=True)
class Grouping:
    """Outer axes of the rotation by meaning: ``tokens`` (outermost first), and heads as ``groups`` x ``in_group``.

    ``head_stride``: stride of a head in the rotation's source. ``group_here``/``head_here``: strides in its node.
    """

    tokens: tuple[OuterAxis, ...]
    groups: int
    heads_per_group: int
    head_stride: int
    group_here: int
    head_here: int

    @property
    def heads(self) -> int:
        return self.groups * self.heads_per_group


def recognise_grouping(rotation: Rotation, anchors: list[Anchor], sizes: Sizes, follower: Follower,
                       path: QuantPath) -> Grouping | Refused:
    """Read from the contraction which heads one of its rows covers; they must be neighbours, and groups must follow
    one another. Contractions over parts of a head (one per quantisation block) are judged by what their sum reads."""
    anchor = anchors[0]
    found = anchor.contraction
    if found.extent % rotation.head_dim:
        return _grouping_of_sum(rotation, anchors, sizes)
    if found.extent == rotation.head_dim and len(anchors) > 1:
        summed = _grouping_of_sum(rotation, anchors, sizes)     # head by head, added up
        if isinstance(summed, Grouping) and summed.heads_per_group > 1:
            return summed
    lanes = found.indices(torch.zeros(1, dtype=torch.int64))[0][0]
    only = follower.follow(found.lhs, lanes, stop=frozenset([rotation.node]), through=path).only()
    node = anchor.node
    if only is None or only.node is not rotation.node:
        return Refused("bgemm", "the contraction runs over more than the rotated output", node)
    dim = rotation.head_dim
    per_group = found.extent // dim
    # An einsum over heads and channels may run through them in any order: it stays as it is, so only the set counts.
    read = only.index.sort().values
    heads = read[::dim]
    stride_here = int(heads[1] - heads[0]) if per_group > 1 else 0
    expected = int(read[0]) + torch.arange(found.extent) // dim * stride_here + torch.arange(found.extent) % dim
    if not bool((read == expected).all()):
        return Refused("bgemm", "the contraction does not run over the channels of neighbouring heads", node)
    fixed = [a for a in rotation.axes if not a.is_token]
    if per_group == 1:
        inner = _batch_axis(anchor, rotation, sizes, follower, path) if fixed else None
        if inner is None:
            inner = min(fixed, key=lambda a: abs(a.source), default=None)
        if inner is None:
            return Grouping(_ordered(rotation.axes), 1, 1, 0, 0, 0)
        tokens = [a for a in rotation.axes if a is not inner]
        return Grouping(_ordered(tokens), inner.size, 1, inner.source, inner.here, inner.here)
    inner = next((a for a in rotation.axes if a.here == stride_here), None)
    if inner is None:
        return Refused("bgemm", "the heads of a group are not an axis of the rotated output", node)
    if inner.is_token:
        return Refused("bgemm", "the contraction runs over tokens: heads and tokens are mixed (a missing transpose?)",
                       node)
    if inner.size % per_group:
        return Refused("bgemm", f"{inner.size} heads do not split into groups of {per_group}", node)
    if inner.size > per_group:
        tokens = [a for a in rotation.axes if a is not inner]
        return Grouping(_ordered(tokens), inner.size // per_group, per_group, inner.source, inner.here * per_group,
                        inner.here)
    outer = next((a for a in fixed if a is not inner and a.source == per_group * inner.source), None)
    if outer is not None and any(a.source * a.size == inner.source for a in fixed if a is not outer) and (
            _shares_weights(outer, anchor, rotation, sizes, follower, path)):
        outer = None            # a batch, that lies where groups would: there are heads between those of this group
    others = [a for a in fixed if a is not inner and a is not outer]
    if outer is None:
        lower = next((a for a in others if 0 < a.source < inner.source), None)
        if lower is not None:
            return Refused("bgemm", f"the heads of a group are {inner.source // lower.source} apart, expected "
                           "neighbouring heads in one group", node)
        tokens = [a for a in rotation.axes if a is not inner]
        return Grouping(_ordered(tokens), 1, per_group, inner.source, 0, inner.here)
    tokens = [a for a in rotation.axes if a is not inner and a is not outer]
    return Grouping(_ordered(tokens), outer.size, per_group, inner.source, outer.here, inner.here)


def _grouping_of_sum(rotation: Rotation, anchors: list[Anchor], sizes: Sizes) -> Grouping | Refused:
    """Which elements of the rotated output does one element of the finished projection read?"""
    node, dim = anchors[0].node, rotation.head_dim
    end = _finished_sum(node)
    read: list[torch.Tensor] = []

    def recording(index: torch.Tensor) -> torch.Tensor:
        read.append(index)
        return random_leaf(3)(index)

    leaves: dict[Any, Any] = {n: random_leaf(4 + i) for i, n in enumerate(node.graph.nodes)
                    if n.op in ("placeholder", "get_attr")}
    leaves[rotation.node] = recording
    try:
        Numeric(sizes, leaves).values(end, torch.zeros(1, dtype=torch.int64))
    except Unevaluated as error:
        return Refused("bgemm", f"the sum over parts of heads cannot be followed: {error}", node)
    index = torch.unique(torch.cat(read)) if read else torch.zeros(0, dtype=torch.int64)
    heads = index[::dim]
    per_group = len(heads)
    fixed = [a for a in rotation.axes if not a.is_token]
    inner = min(fixed, key=lambda a: a.source, default=None)
    if inner is None or not per_group or len(index) != per_group * dim or not bool(
            (index == (torch.arange(per_group) * inner.here)[:, None].add(torch.arange(dim)).flatten()).all()):
        return Refused("bgemm", f"the projection sums {len(index)} elements, expected the channels of neighbouring "
                       f"heads of {dim}", node)
    total = inner.size
    tokens = [a for a in rotation.axes if a is not inner]
    if total == per_group:
        outer = next((a for a in fixed if a is not inner and a.source == per_group * inner.source), None)
        if outer is not None:
            tokens.remove(outer)
            return Grouping(_ordered(tokens), outer.size, per_group, inner.source, outer.here, inner.here)
    if total % per_group:
        return Refused("bgemm", f"{total} heads do not split into groups of {per_group}", node)
    return Grouping(_ordered(tokens), total // per_group, per_group, inner.source, inner.here * per_group, inner.here)


def _shares_weights(axis: OuterAxis, anchor: Anchor, rotation: Rotation, sizes: Sizes, follower: Follower,
                    path: QuantPath) -> bool:
    """Are there outputs that multiply the same weights by different places of ``axis``? Groups have weights of their
    own; what shares them is a batch."""
    shape = sizes.shape(anchor.node)
    first = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(shape, row_major(shape)):
        if size == 1:
            continue
        lhs, rhs = anchor.contraction.indices(probe(size) * stride, first)
        trace = follower.follow(anchor.operand, lhs.flatten(), stop=frozenset([rotation.node]), through=path)
        for origin in trace.origins:
            if origin.node is not rotation.node:
                continue
            place = origin.index // axis.here % axis.size
            weights = rhs.flatten()[origin.lanes]
            if bool(((weights == weights[0]) & (place != place[0])).any()):
                return True
    return False


def _finished_sum(node: fx.Node) -> fx.Node:
    """Forward through sums, scalings, moves and casts, as long as there is one reader."""
    while True:
        users = [u for u in node.users if u.op == "call_function"]
        if len(users) != 1 or len(node.users) != 1:
            return node
        user = users[0]
        if not (is_move(user) or user.target in CASTS or user.target in (
                aten.add.Tensor, aten.mul.Tensor, aten.sum.dim_IntList)):
            return node
        node = user


def _ordered(axes: list[OuterAxis] | tuple[OuterAxis, ...]) -> tuple[OuterAxis, ...]:
    return tuple(sorted(axes, key=lambda a: -a.here))


def _batch_axis(anchor: Anchor, rotation: Rotation, sizes: Sizes, follower: Follower,
                path: QuantPath) -> OuterAxis | None:
    """With one head per group: the axis that a step of a bmm's batch dimension moves along."""
    shape = sizes.shape(anchor.node)
    if len(shape) < 3 or shape[0] == 1:
        return None
    step = sizes.numel(anchor.node) // shape[0]
    lanes = anchor.contraction.indices(torch.tensor([0, step]), torch.tensor([0]))[0].flatten()
    only = follower.follow(anchor.operand, lanes, stop=frozenset([rotation.node]), through=path).only()
    if only is None or only.node is not rotation.node:
        return None
    return next((a for a in rotation.axes if not a.is_token and a.here == int(only.index[1] - only.index[0])), None)


@dataclass(frozen=True)
class FamilyOf:
    """Elements of ``node`` with row-major axes (see ``elements.layouts``)."""

    node: fx.Node
    offset: int
    axes: tuple[Axis, ...]


@dataclass(frozen=True)
class Fp8Weight:
    """E4M3 weight [G, R, K] and its scales [G, R/block, K/block], as families of elements of graph nodes."""

    codes: FamilyOf
    scales: FamilyOf
    block: int


def recognise_fp8_weight(found: Contraction, groups: int, sizes: Sizes, follower: Follower) -> Fp8Weight | None:
    """The weight operand of a batched contraction as FP8 codes times block scales, or None when it is anything else.

    The contraction must be a bmm over groups (either operand order), its rows the same tokens for all groups.
    """
    if found.node.target not in (aten.bmm.default, aten.bmm.dtype) or found.addend is not None:
        return None
    batch, m, n = sizes.shape(found.node)
    if batch != groups:
        return None
    weights_right = found.lhs is found.node.args[0]
    rows, row_step = (n, 1) if weights_right else (m, n)
    extent = found.extent

    def lanes(g: torch.Tensor, r: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        out = g * (m * n) + r * row_step
        return found.rhs_at(out, k)

    zero = torch.zeros(1, dtype=torch.int64)
    ways = {"g": (batch, lambda i: lanes(i, zero, zero)), "r": (rows, lambda i: lanes(zero, i, zero)),
            "k": (extent, lambda i: lanes(zero, zero, i))}
    codes_axes: dict[str, list[tuple[int, int]]] = {}
    scale_axes: dict[str, list[tuple[int, int]]] = {}
    origin: list[fx.Node | None] = [None, None]
    first = [0, 0]
    at: Callable[[torch.Tensor], torch.Tensor]
    for name, (size, at) in ways.items():
        read = _weight_elements(found.rhs, at(probe(size)).expand(len(probe(size))), sizes, follower)
        if read is None:
            return None
        for which, (node, index) in enumerate(read):
            if origin[which] is None:
                origin[which], first[which] = node, int(index[0])
            if origin[which] is not node:
                return None
            parts = radix(index - int(index[0]), size)
            if parts is None:
                return None
            (codes_axes if which == 0 else scale_axes)[name] = parts
    if any(len(codes_axes[name]) > 1 for name in ways) or len(scale_axes["g"]) > 1:
        return None
    blocks = set()
    for name in ("r", "k"):
        parts = scale_axes[name]
        if len(parts) == 2 and parts[1][1] == 0:
            blocks.add(parts[1][0])
        elif len(parts) == 1 and parts[0][1] == 0:
            pass                        # a single block along this way
        else:
            return None
    if len(blocks) != 1:
        return None
    block = blocks.pop()
    if any(scale_axes[name][0][1] == 0 and ways[name][0] > block for name in ("r", "k")):
        return None

    def axis(parts: list[tuple[int, int]], size: int) -> Axis:
        return Axis(size, parts[0][1] if parts else 0)

    assert origin[0] is not None and origin[1] is not None
    codes = FamilyOf(origin[0], first[0], (axis(codes_axes["g"], batch), axis(codes_axes["r"], rows),
                                           axis(codes_axes["k"], extent)))
    scales = FamilyOf(origin[1], first[1], (axis(scale_axes["g"], batch),
                                            axis(scale_axes["r"], -(-rows // block)),
                                            axis(scale_axes["k"], -(-extent // block))))
    return Fp8Weight(codes, scales, block) if _same_everywhere(found, codes, scales, block, lanes, sizes,
                                                               follower) else None


def _same_everywhere(found: Contraction, codes: FamilyOf, scales: FamilyOf, block: int,
                     lanes: Callable[..., torch.Tensor], sizes: Sizes, follower: Follower) -> bool:
    generator = torch.Generator().manual_seed(9)
    g, r, k = (torch.randint(0, a.size, (64,), generator=generator) for a in codes.axes)
    read = _weight_elements(found.rhs, lanes(g, r, k), sizes, follower)
    if read is None or read[0][0] is not codes.node or read[1][0] is not scales.node:
        return False
    want_codes = codes.offset + sum(i * a.stride for i, a in zip((g, r, k), codes.axes))
    want_scales = scales.offset + sum(i * a.stride for i, a in zip((g, r // block, k // block), scales.axes))
    return bool((read[0][1] == want_codes).all() and (read[1][1] == want_scales).all())


def _weight_elements(node: fx.Node, index: torch.Tensor, sizes: Sizes, follower: Follower
                     ) -> tuple[tuple[fx.Node, torch.Tensor], tuple[fx.Node, torch.Tensor]] | None:
    """(codes node, indices), (scale node, indices) of weight elements, when they are codes times a scale."""
    only = follower.follow(node, index).only()
    if only is None or not isinstance(only.node, fx.Node) or only.node.target is not aten.mul.Tensor:
        return None
    product = only.node
    operands = []
    for operand in product.args[:2]:
        if not isinstance(operand, fx.Node):
            return None
        at = broadcast_index(only.index, sizes.shape(product), sizes.shape(operand))
        end = follower.follow(operand, at, through=_from_eight_bits).only()
        if end is None or not isinstance(end.node, fx.Node):
            return None
        operands.append((end.node, end.index))
    if dtype_of(operands[1][0]) in FP8:
        operands.reverse()
    (codes, _), (scale, _) = operands
    if dtype_of(codes) is not torch.float8_e4m3fn or dtype_of(scale) not in (torch.float32, E8M0):
        return None
    return operands[0], operands[1]


def _from_eight_bits(node: fx.Node, index: torch.Tensor) -> list[Piece] | None:
    """Widening of E4M3 codes and of E8M0 scales is exact."""
    if node.target in CASTS and (dtype_of(args_of(node)[0]) is E8M0 or (
            is_eight_bit_cast(node) and dtype_of(args_of(node)[0]) is torch.float8_e4m3fn)):
        return [Piece(args_of(node)[0], index)]
    return None


__all__ = ["FamilyOf", "Fp8Weight", "Grouping", "recognise_fp8_weight", "recognise_grouping"]
