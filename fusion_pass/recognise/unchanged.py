"""Elements that arithmetic leaves as they are: x * 1, x + 0, (x + iy) * (1 + 0i), where(positions, x, ..).

A rotation may be written over all channels of a head, with a table that is padded with cos = 1 and sin = 0 for the
channels that it does not turn. Their values are those of the tensor in front; here they are followed to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

from ..elements.constants import FACTORIES, constant_values
from ..elements.dependence import has_property, tensor_inputs
from ..elements.follow import Through
from ..elements.loads import INDEXED, STORES
from ..elements.moves import CASTS, Piece, broadcast_index, is_float_cast, is_move, sources
from ..elements.sizes import Sizes
from ..fx_access import args_of, kwargs_of

aten = torch.ops.aten
DEPTH = 48
TO_REAL = {aten.view_as_real.default, aten.view_as_real_copy.default}
TO_COMPLEX = {aten.view_as_complex.default, aten.view_as_complex_copy.default}
_SAME = {aten.resolve_conj.default, aten.resolve_neg.default}


def is_fma(node: fx.Node) -> bool:
    """Inductor's ``prims.fma(a, b, c)``: a * b + c."""
    return getattr(node.target, "__name__", "") == "fma.default"


class Known:
    """What is known of elements without looking at any input: numbers that the source filled or padded in, and what
    arithmetic makes of them; not-a-number where nothing is known."""

    def __init__(self, sizes: Sizes):
        self.sizes = sizes
        self._memo: dict[tuple[fx.Node, bytes], torch.Tensor] = {}

    def values(self, node: object, index: torch.Tensor, depth: int = 0) -> torch.Tensor:
        """complex128 values of the elements ``index`` of ``node``."""
        if not isinstance(node, fx.Node):
            return torch.full((len(index),), complex(self.sizes.number(node)), dtype=torch.complex128)
        if not self.possible(node):
            return torch.full((len(index),), complex(math.nan, math.nan), dtype=torch.complex128)
        key = (node, index.numpy().tobytes())
        if key not in self._memo:
            self._memo[key] = self._compute(node, index, depth)
        return self._memo[key]

    def possible(self, node: fx.Node) -> bool:
        """Whether any element can be known: some number must be filled in on a way that is looked at. Most tensors have
        none, and are not looked at element by element."""
        return has_property(node, self.sizes.may_be_known, _possible, decided_by=True)

    def _compute(self, node: fx.Node, index: torch.Tensor, depth: int) -> torch.Tensor:
        unknown = torch.full((len(index),), complex(math.nan, math.nan), dtype=torch.complex128)
        if node.op != "call_function" or depth > DEPTH:
            return unknown
        pieces = sources(node, index, self.sizes)
        if pieces is not None:
            for piece in pieces:
                lanes = torch.arange(len(index)) if piece.lanes is None else piece.lanes
                at = torch.zeros(len(lanes), dtype=torch.int64) if piece.index is None else piece.index
                unknown[lanes] = self.values(piece.source, at, depth + 1)
            return unknown
        if node.target in TO_REAL:
            whole = self.values(args_of(node)[0], index // 2, depth + 1)
            return torch.where(index % 2 == 0, whole.real, whole.imag).to(torch.complex128)
        if node.target in TO_COMPLEX:
            re, im = (self.values(args_of(node)[0], index * 2 + part, depth + 1).real for part in (0, 1))
            return torch.complex(re, im)
        if node.target in CASTS:        # those that are no moves, from integers; a second argument may be a dtype
            kept = node.meta["val"].dtype.is_floating_point
            return self.values(args_of(node)[0], index, depth + 1) if kept else unknown
        rule = _KNOWN.get(node.target)
        if rule is None and is_fma(node):
            rule = lambda a, b, c: product(a, b) + c  # noqa: E731
        if rule is None or any(float(self.sizes.number(kwargs_of(node).get(k, 1))) != 1 for k in ("alpha", "value")):
            return unknown
        return rule(*(self.operand(node, a, index, depth) for a in args_of(node)[:3]))

    def operand(self, node: fx.Node, argument: object, index: torch.Tensor, depth: int = 0) -> torch.Tensor:
        """A (broadcast) operand of the pointwise ``node``."""
        if isinstance(argument, fx.Node) and isinstance(argument.meta.get("val"), torch.Tensor):
            at = broadcast_index(index, self.sizes.shape(node), self.sizes.shape(argument))
            return self.values(argument, at, depth + 1)
        return self.values(argument, index, depth + 1)


def _possible(node: fx.Node) -> bool | None:
    if node.op != "call_function":
        return False
    if node.target in FACTORIES or node.target is aten.constant_pad_nd.default:
        return True
    if not tensor_inputs(node):
        return True
    return None if is_move(node) or node.target in _LOOKED_THROUGH or is_fma(node) else False


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a * b, zero also where the other factor is unknown."""
    return torch.where((a == 0) | (b == 0), 0.0, a * b)


_KNOWN: dict[Any, Callable[..., torch.Tensor]] = {
    aten.mul.Tensor: product, aten.mul.Scalar: product, aten.add.Tensor: torch.add, aten.sub.Tensor: torch.sub,
    aten.addcmul.default: lambda a, b, c: a + product(b, c), aten.neg.default: torch.neg,
    aten.cos.default: torch.cos, aten.sin.default: torch.sin, aten._conj.default: torch.conj_physical,
    aten.polar.default: lambda r, a: product(r, torch.complex(torch.cos(a.real), torch.sin(a.real))),
    aten.complex.default: lambda re, im: torch.complex(re.real, im.real),
    aten.resolve_conj.default: lambda a: a, aten.resolve_neg.default: lambda a: a,
    aten.conj_physical.default: torch.conj_physical, aten._conj_physical.default: torch.conj_physical,
}


_ARITHMETIC = {aten.where.self, aten.add.Tensor, aten.sub.Tensor, aten.addcmul.default} | TO_REAL


def may_leave_unchanged(node: fx.Node) -> bool:
    """Whether ``node`` is an operator that a rotation over all channels ends with."""
    return node.target in _ARITHMETIC or is_fma(node)


_LOOKED_THROUGH = {*_KNOWN, *CASTS, *INDEXED, *STORES, *TO_REAL, *TO_COMPLEX}


def unchanged(sizes: Sizes, through: Through | None) -> Through:
    """``through``, and through arithmetic that leaves an element as it is."""
    known = Known(sizes)

    def way(node: fx.Node, index: torch.Tensor) -> list[Piece] | None:
        pieces = None if through is None else through(node, index)
        if pieces is not None or node.op != "call_function":
            return pieces
        if node.target in TO_REAL:
            return _parts(node, index, known)
        ways = _operands(node, index, known)
        return None if ways is None else _pieces(node, index, ways)

    return way


def _pieces(node: fx.Node, index: torch.Tensor,
            ways: list[tuple[object, torch.Tensor | None, torch.Tensor]]) -> list[Piece] | None:
    """(operand or number, its elements, for which lanes), the first that holds; other lanes stay at ``node``."""
    left = torch.ones(len(index), dtype=torch.bool)
    pieces = []
    for source, at, holds in ways:
        lanes = (holds & left).nonzero().flatten()
        if len(lanes) and isinstance(source, (fx.Node, float)):
            pieces.append(Piece(source, None if at is None else at[lanes], lanes))
            left[lanes] = False
    if not pieces:
        return None
    rest = left.nonzero().flatten()
    return [*pieces, Piece(node, index[rest], rest)] if len(rest) else pieces


def _operands(node: fx.Node, index: torch.Tensor,
              known: Known) -> list[tuple[object, torch.Tensor | None, torch.Tensor]] | None:
    target, given = node.target, args_of(node)
    if target is aten.where.self:
        at = broadcast_index(index, known.sizes.shape(node), known.sizes.shape(given[0]))
        condition = constant_values(given[0], at, known.sizes)
        if condition is None:
            return None
        return [(given[1], _at(node, given[1], index, known), condition),
                (given[2], _at(node, given[2], index, known), ~condition)]
    if target in (aten.mul.Tensor, aten.mul.Scalar):
        a, b = (known.operand(node, x, index) for x in given[:2])
        return [(0.0, None, product(a, b) == 0), (given[0], _at(node, given[0], index, known), b == 1),
                (given[1], _at(node, given[1], index, known), a == 1)]
    if target in (aten.add.Tensor, aten.sub.Tensor) and kwargs_of(node).get("alpha", 1) == 1:
        a, b = (known.operand(node, x, index) for x in given[:2])
        ways = [(given[0], _at(node, given[0], index, known), b == 0)]
        if target is aten.add.Tensor:
            ways.append((given[1], _at(node, given[1], index, known), a == 0))
        return ways
    if target is aten.addcmul.default or is_fma(node):
        addend, *factors = given[:3] if target is aten.addcmul.default else (given[2], *given[:2])
        c, a, b = (known.operand(node, x, index) for x in (addend, *factors))
        ways = [(addend, _at(node, addend, index, known), product(a, b) == 0)]
        if float(known.sizes.number(kwargs_of(node).get("value", 1))) == 1:
            ways += [(factors[0], _at(node, factors[0], index, known), (c == 0) & (b == 1)),
                     (factors[1], _at(node, factors[1], index, known), (c == 0) & (a == 1))]
        return ways
    return None


def _at(node: fx.Node, argument: object, index: torch.Tensor, known: Known) -> torch.Tensor | None:
    if isinstance(argument, fx.Node) and isinstance(argument.meta.get("val"), torch.Tensor):
        return broadcast_index(index, known.sizes.shape(node), known.sizes.shape(argument))
    return None


def _parts(node: fx.Node, index: torch.Tensor, known: Known) -> list[Piece] | None:
    """Real and imaginary parts of complex elements that are pairs of some real tensor, times one."""
    pieces: list[Piece] = []
    rest: list[torch.Tensor] = []
    work = [(args_of(node)[0], index // 2, torch.arange(len(index)), 0)]
    while work:
        here, at, lanes, depth = work.pop()
        if not isinstance(here, fx.Node) or depth > DEPTH or here.op != "call_function":
            rest.append(lanes)
            continue
        if here.target in TO_COMPLEX:
            pieces.append(Piece(args_of(here)[0], at * 2 + index[lanes] % 2, lanes))
            continue
        if here.target is aten.complex.default:
            for part in (0, 1):
                mine = (index[lanes] % 2 == part).nonzero().flatten()
                operand = args_of(here)[part]
                if len(mine):
                    where = broadcast_index(at[mine], known.sizes.shape(here), known.sizes.shape(operand))
                    pieces.append(Piece(operand, where, lanes[mine]))
            continue
        moved = sources(here, at, known.sizes)
        if here.target in _SAME or is_float_cast(here):
            moved = [Piece(args_of(here)[0], at)]
        if moved is None and here.target is aten.mul.Tensor:
            moved = _pieces(here, at, [w for w in _operands(here, at, known) or [] if w[1] is not None])
        if moved is None or all(p.source is here for p in moved):
            rest.append(lanes)
            continue
        for piece in moved:
            mine = lanes if piece.lanes is None else lanes[piece.lanes]
            if piece.source is here:
                rest.append(mine)
            else:
                work.append((piece.source, piece.index, mine, depth + 1))
    if not pieces:
        return None
    left = torch.cat(rest) if rest else torch.zeros(0, dtype=torch.int64)
    return [*pieces, Piece(node, index[left], left)] if len(left) else pieces
