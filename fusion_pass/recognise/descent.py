"""Searches back from elements, for the contractions that they are made of; what is found comes with its way
(``paths.py``), so that it can be gone again for other elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.fx as fx

from ..elements.contractions import Contraction, contraction
from ..elements.layouts import probe, radix
from ..elements.moves import Piece, broadcast_index, sources
from ..elements.sizes import Sizes
from ..fx_access import args_of, kwargs_of
from .paths import MEETING_DEPTH, Path, Step, Unfollowed, advance, reduced

aten = torch.ops.aten
SOFTMAX = {aten._softmax.default, aten.softmax.int, aten._safe_softmax.default}
LOG_SOFTMAX = {aten._log_softmax.default, aten.log_softmax.int}
VISIT_LIMIT = 2000
MAX_TERMS = 512


def is_pointwise(node: fx.Node) -> bool:
    return node.op == "call_function" and torch.Tag.pointwise in getattr(node.target, "tags", ())


def is_tensor(value: object) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)


def tensor_operands(node: fx.Node) -> list[tuple[fx.Node, str]]:
    """The operands of a pointwise operator, a softmax or a boolean assignment, with the kind of step to them."""
    if node.target in SOFTMAX or node.target in LOG_SOFTMAX:
        return [(args_of(node)[0], "same")]
    if node.target is aten.index_put.default:
        base, indices, value = args_of(node)[:3]
        if len(indices) == 1 and is_tensor(indices[0]) and indices[0].meta["val"].dtype == torch.bool:
            return [(base, "same"), (indices[0], "rows"), (value, "scalar")]
        return []
    if is_pointwise(node):
        return [(a, "point") for a in (*args_of(node), *kwargs_of(node).values()) if is_tensor(a)]
    return []


@dataclass(frozen=True)
class Reach:
    """``index`` [L] of ``node`` is what the asked elements ``lanes`` [L] come to along ``path``. They are ``factor``
    times those elements."""

    node: fx.Node
    lanes: torch.Tensor
    index: torch.Tensor
    path: Path
    factor: float = 1.0


class Descent:
    """Searches for the contractions that an element is made of. ``visits`` counts nodes."""

    def __init__(self, sizes: Sizes):
        self.sizes = sizes
        self.visits = 0

    def _moved(self, node: fx.Node, index: torch.Tensor) -> list[tuple[fx.Node, torch.Tensor, torch.Tensor]] | None:
        """(operand, positions, index) for every operand node that the elements move from."""
        self.sizes.seen.add(node)
        pieces = sources(node, index, self.sizes)
        if pieces is None:
            return None
        every = torch.arange(len(index))
        return [(p.source, every if p.lanes is None else p.lanes, p.index) for p in pieces
                if isinstance(p.source, fx.Node)]

    def scores(self, node: fx.Node, index: torch.Tensor, is_score: Callable[[fx.Node], bool]) -> list[Reach]:
        """The score products that elements of the attention weights are pointwise functions of: through softmax
        (element by element), exponentials, masks, scales and moves, but not through row statistics."""
        found: list[Reach] = []
        seen: set[tuple[fx.Node, bytes]] = set()

        def visit(here: fx.Node, at: torch.Tensor, lanes: torch.Tensor, path: Path) -> None:
            key = (here, at.numpy().tobytes())
            if key in seen or self.visits > VISIT_LIMIT or not is_tensor(here):
                return
            seen.add(key)
            self.visits += 1
            if is_score(here):
                found.append(Reach(here, lanes, at, path))
                return
            moved = self._moved(here, at)
            if moved is not None:
                for operand, positions, inner in moved:
                    visit(operand, inner, lanes[positions], (*path, Step(here, operand, "move")))
                return
            for operand, kind in tensor_operands(here):
                if operand.meta["val"].dtype == torch.bool or kind == "scalar":
                    continue
                step = Step(here, operand, kind)
                visit(operand, advance(step, at, self.sizes), lanes, (*path, step))

        visit(node, index, torch.arange(len(index)), ())
        return found

    def linear(self, node: fx.Node, index: torch.Tensor) -> Iterator[Reach]:
        """The nodes whose elements enter ``index`` (elements that differ in the channel only) linearly, channel by
        channel: contractions, fused attention, or whatever cannot be looked into."""
        work: list[tuple[fx.Node, torch.Tensor, torch.Tensor, Path]] = [(node, index, torch.arange(len(index)), ())]
        while work:
            here, at, lanes, path = work.pop()
            self.visits += 1
            if self.visits > VISIT_LIMIT:
                return
            moved = self._moved(here, at)
            if moved is not None:
                for operand, positions, inner in moved:
                    work.append((operand, inner, lanes[positions], (*path, Step(here, operand, "move"))))
                continue
            operands = self._linear_operands(here, at)
            if operands is None:
                yield Reach(here, lanes, at, path)
                continue
            for operand, kind, term in operands:
                step = Step(here, operand, kind, term)
                work.append((operand, advance(step, at, self.sizes), lanes, (*path, step)))

    def _linear_operands(self, node: fx.Node, index: torch.Tensor) -> list[tuple[fx.Node, str, int]] | None:
        if node.target is aten.sum.dim_IntList and contraction(node, self.sizes) is None:
            _, terms, _ = reduced(node, self.sizes)
            return [(args_of(node)[0], "term", k) for k in range(terms)] if terms <= MAX_TERMS else None
        if node.target is aten.addcmul.default or getattr(node.target, "__name__", "") == "fma.default":
            return self._added_product(node, index)
        if node.target not in _LINEAR:
            return None
        operands = [a for a in args_of(node) if is_tensor(a)]
        if node.target is aten.where.self:
            operands = operands[1:]
        varying = [a for a in operands
                   if varies(broadcast_index(index, self.sizes.shape(node), self.sizes.shape(a)))]
        if node.target in _PRODUCTS and (len(varying) != 1 or (node.target in _QUOTIENTS
                                                               and varying[0] is not node.args[0])):
            return None
        return [(a, "point", 0) for a in varying]

    def _added_product(self, node: fx.Node, index: torch.Tensor) -> list[tuple[fx.Node, str, int]] | None:
        """a + b * c, where at most one of b and c changes with the channel."""
        operands: list[fx.Node] = list(args_of(node)[:3])
        if node.target is not aten.addcmul.default:
            operands = [operands[2], *operands[:2]]     # prims.fma(b, c, a)
        varying = [is_tensor(a) and varies(broadcast_index(index, self.sizes.shape(node), self.sizes.shape(a)))
                   for a in operands]
        if all(varying[1:]):
            return None
        return [(a, "point", 0) for a, moves in zip(operands, varying) if moves]

    def chain(self, node: fx.Node, index: torch.Tensor, scaled: bool = False) -> list[Reach]:
        """``node`` and the nodes that its elements come from through moves, as long as all come from one node; with
        ``scaled``, also through multiplications by numbers."""
        every = torch.arange(len(index))
        result = [Reach(node, every, index, ())]
        while True:
            last = result[-1]
            moved = self._moved(last.node, last.index)
            self.visits += 1
            if moved is None and scaled and (found := number_factor(last.node, self.sizes)) is not None:
                operand, factor = found
                step = Step(last.node, operand, "point")
                result.append(Reach(operand, every, advance(step, last.index, self.sizes), (*last.path, step),
                                    last.factor * factor))
                continue
            if moved is not None and len(moved) > 1 and (source := self._meeting_point(moved)) is not None:
                step = Step(last.node, source, "meet")
                result.append(Reach(source, every, advance(step, last.index, self.sizes), (*last.path, step),
                                    last.factor))
                continue
            if moved is None or len(moved) != 1 or len(moved[0][1]) != len(index):
                return result
            operand, _, inner = moved[0]
            result.append(Reach(operand, every, inner, (*last.path, Step(last.node, operand, "move")), last.factor))


    def _meeting_point(self, moved: list[tuple[fx.Node, torch.Tensor, torch.Tensor]]) -> fx.Node | None:
        """The tensor that all parts of a joined one are taken from."""
        common: list[fx.Node] | None = None
        for operand, _, index in moved:
            way, here, at = [operand], operand, index[:1]
            while len(way) < MEETING_DEPTH:
                pieces = sources(here, at, self.sizes)
                if not pieces or not isinstance(pieces[0].source, fx.Node):
                    break
                self.sizes.seen.add(here)
                here, at = pieces[0].source, pieces[0].index
                way.append(here)
            common = way if common is None else [n for n in common if n in way]
        return common[0] if common else None


def number_factor(node: fx.Node, sizes: Sizes) -> tuple[fx.Node, float] | None:
    """(operand, factor) when ``node`` is a tensor times, or divided by, a number."""
    if node.op != "call_function" or node.target not in _PRODUCTS:
        return None
    a, b = args_of(node)[:2]
    if is_tensor(a) and not is_tensor(b):
        number = float(sizes.number(b))
        if node.target in _QUOTIENTS:
            return (a, 1.0 / number) if number and len(args_of(node)) == 2 else None
        return (a, number) if number else None
    if is_tensor(b) and not is_tensor(a) and node.target not in _QUOTIENTS:
        number = float(sizes.number(a))
        return (b, number) if number else None
    return None


def number_factors(sizes: Sizes) -> Callable[[fx.Node, torch.Tensor], list[Piece] | None]:
    """For ``Follower.follow``: lets elements pass through multiplications by numbers."""
    def through(node: fx.Node, index: torch.Tensor) -> list[Piece] | None:
        found = number_factor(node, sizes)
        if found is None:
            return None
        return [Piece(found[0], broadcast_index(index, sizes.shape(node), sizes.shape(found[0])))]
    return through


def varies(index: torch.Tensor) -> bool:
    return bool((index != index[0]).any())


_QUOTIENTS = {aten.div.Tensor, aten.div.Scalar}
_PRODUCTS = {aten.mul.Tensor, aten.mul.Scalar} | _QUOTIENTS
_LINEAR = _PRODUCTS | {
    aten.add.Tensor, aten.sub.Tensor, aten.neg.default, aten.where.self, aten.nan_to_num.default,
    aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.add.Scalar, aten.sub.Scalar,
}


@dataclass(frozen=True)
class Family:
    """Offset and strides of elements along axes."""

    offset: int
    strides: tuple[int, ...]


def fit(element: Callable[..., torch.Tensor], extents: list[int]) -> Family | None:
    """The strides of ``element(coordinates of axis 0, of axis 1, ..)`` when it is a plain sum of stride * coordinate;
    None when it is not. Every axis is sampled in full unless it is very long, the sum at random coordinates."""
    zero = torch.zeros(1, dtype=torch.int64)
    try:
        base = int(element(*[zero for _ in extents])[0])
        strides = []
        for axis, extent in enumerate(extents):
            if extent == 1:
                strides.append(0)
                continue
            along = probe(extent)
            values = element(*[along if a == axis else torch.zeros_like(along) for a in range(len(extents))]) - base
            parts = radix(values, extent)
            if parts is None or len(parts) != 1:
                return None
            strides.append(parts[0][1])
        generator = torch.Generator().manual_seed(len(extents))
        where = [torch.randint(0, extent, (8,), generator=generator) for extent in extents]
        for a, extent in enumerate(extents):
            where[a][-1] = extent - 1
        expected = sum((w * s for w, s in zip(where, strides)), torch.full((8,), base))
        return Family(base, tuple(strides)) if bool((element(*where) == expected).all()) else None
    except Unfollowed:
        return None


def as_contraction(node: fx.Node, sizes: Sizes, least: int) -> Contraction | None:
    """``node`` as a contraction over at least ``least`` terms, without scale tensors."""
    found = contraction(node, sizes) if node.op == "call_function" else None
    return found if found is not None and found.extent >= least and not found.scale_nodes else None
