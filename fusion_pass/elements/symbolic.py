"""Elements as polynomials over elements of chosen leaves.

A rotation, whatever its spelling (real or complex, stacked, strided writes, rotate-half, a small matrix product), is a
polynomial of degree two in the elements it reads. Everything that is not addition, multiplication or a move becomes
an atom itself, so the polynomial is exact about what it covers and opaque about the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

from ..fx_access import args_of, kwargs_of
from .constants import constant_values, signs
from .contractions import Contraction, contraction
from .moves import CASTS, broadcast_index, sources, unravel
from .polynomials import Atom, Complex, Poly, Value, add, multiply, real
from .sizes import Sizes

aten = torch.ops.aten
SMALL_CONTRACTION = 4
SPARSE_CONTRACTION = 128
SIGNS_LIMIT = 4096      # elements of a constant that is looked at


class Symbolic:
    """Evaluates elements to polynomials. ``leaves`` are never looked into; ``limit`` bounds a polynomial's terms.
    ``angles``: what is evaluated are arguments of cos and sin."""

    def __init__(self, sizes: Sizes, leaves: frozenset[fx.Node] = frozenset(), limit: int = 64, angles: bool = False):
        self.sizes = sizes
        self.leaves = leaves
        self.angles = angles        # no signs: position 0 or 1 is no sign
        self._of_angles: Symbolic | None = None
        self.limit = limit
        self.visits = 0
        self._memo: dict[tuple[fx.Node, bytes], list[Value]] = {}

    def values(self, node: fx.Node | float, index: torch.Tensor) -> list[Value]:
        """The polynomials of the elements ``index`` of ``node``."""
        if not isinstance(node, fx.Node):
            return [Poly.number(float(node))] * len(index)
        key = (node, index.numpy().tobytes())
        if key not in self._memo:
            self.visits += 1
            self._memo[key] = self._compute(node, index)
        return self._memo[key]

    def _atoms(self, node: fx.Node, index: torch.Tensor) -> list[Value]:
        if self.sizes.dtype(node).is_complex:
            return [Complex(Poly.atom(Atom(node, i, "re")), Poly.atom(Atom(node, i, "im"))) for i in index.tolist()]
        return [Poly.atom(Atom(node, i)) for i in index.tolist()]

    def _compute(self, node: fx.Node, index: torch.Tensor) -> list[Value]:
        if node in self.leaves:
            return self._atoms(node, index)
        if node.op != "call_function":
            numbers = None if self.angles else signs(node, index, self.sizes, SIGNS_LIMIT)
            return self._atoms(node, index) if numbers is None else [Poly.number(v) for v in numbers.tolist()]
        self.sizes.seen.add(node)
        if node.target in (aten.view_as_complex.default, aten.view_as_complex_copy.default):
            pairs = self.values(args_of(node)[0], torch.stack([index * 2, index * 2 + 1], 1).flatten())
            return [Complex(real(pairs[2 * i]), real(pairs[2 * i + 1])) for i in range(len(index))]
        if node.target in (aten.view_as_real.default, aten.view_as_real_copy.default):
            whole = self.values(args_of(node)[0], index // 2)
            return [_part(w, "re" if i % 2 == 0 else "im") for w, i in zip(whole, index.tolist())]
        if node.target is aten.view.dtype and (seen := self._seen_as_pairs(node, index)) is not None:
            return seen
        pieces = sources(node, index, self.sizes)
        if pieces is not None:
            result: list[Value] = [Poly.number(0.0)] * len(index)
            for piece in pieces:
                lanes = range(len(index)) if piece.lanes is None else piece.lanes.tolist()
                at = piece.index if piece.index is not None else torch.zeros(len(lanes), dtype=torch.int64)
                for lane, value in zip(lanes, self.values(piece.source, at)):
                    result[lane] = value
            return result
        if node.target in CASTS and not self.sizes.dtype(args_of(node)[0]).is_floating_point and (
                self.sizes.dtype(node).is_floating_point) and self.sizes.dtype(node).itemsize > 1:
            return self.values(args_of(node)[0], index)         # an integer position, widened
        numbers = None if self.angles else signs(node, index, self.sizes, SIGNS_LIMIT)
        if numbers is not None:
            return [Poly.number(v) for v in numbers.tolist()]
        rule = _POINTWISE.get(node.target) or (_fma if getattr(node.target, "__name__", "") == "fma.default" else None)
        found = rule(self, node, index) if rule is not None else None
        if found is None:
            found = self._small_contraction(node, index)
        if found is None or any(isinstance(v, Poly) and len(v.terms) > self.limit for v in found):
            return self._atoms(node, index)
        return found

    def operand(self, node: fx.Node, argument: object, index: torch.Tensor) -> list[Value] | None:
        """A (broadcast) operand of the pointwise ``node`` at ``index``."""
        if isinstance(argument, fx.Node) and isinstance(argument.meta.get("val"), torch.Tensor):
            if argument.meta["val"].dtype in (torch.bool,):
                return None
            at = broadcast_index(index, self.sizes.shape(node), self.sizes.shape(argument))
            return self.values(argument, at)
        return [Poly.number(float(self.sizes.number(argument)))] * len(index)

    def of_angles(self) -> Symbolic:
        """The engine for arguments of cos and sin."""
        if self.angles:
            return self
        if self._of_angles is None:
            self._of_angles = Symbolic(self.sizes, self.leaves, self.limit, angles=True)
        return self._of_angles

    def _seen_as_pairs(self, node: fx.Node, index: torch.Tensor) -> list[Value] | None:
        """``view(dtype)`` between pairs of floats and complex numbers."""
        source: fx.Node = args_of(node)[0]
        before, after = self.sizes.dtype(source), self.sizes.dtype(node)
        if (before, after) in _PAIRS:
            pairs = self.values(source, torch.stack([index * 2, index * 2 + 1], 1).flatten())
            return [Complex(real(pairs[2 * i]), real(pairs[2 * i + 1])) for i in range(len(index))]
        if (after, before) in _PAIRS:
            whole = self.values(source, index // 2)
            return [_part(w, "re" if i % 2 == 0 else "im") for w, i in zip(whole, index.tolist())]
        return None

    def _small_contraction(self, node: fx.Node, index: torch.Tensor) -> list[Value] | None:
        """A product of few terms, or of few that are not zero (by a matrix that is written down element by element)."""
        found = contraction(node, self.sizes)
        if found is None or found.addend is not None or found.scale_nodes or found.extent > SPARSE_CONTRACTION or (
                not len(index)):
            return None
        if found.extent > SMALL_CONTRACTION:
            for side in (found, found.swapped()):
                if not self._sparse(side, index):
                    continue
                return self._products(side, index)
            return None
        return self._products(found, index)

    def _sparse(self, found: Contraction, index: torch.Tensor) -> bool:
        """Are most elements that the first output takes from the right operand zero?"""
        if found.rhs.op != "call_function":
            return False
        row = self.values(found.rhs, found.indices(index[:1])[1].flatten())
        return sum(not isinstance(v, Poly) or bool(v.terms) for v in row) <= SMALL_CONTRACTION

    def _products(self, found: Contraction, index: torch.Tensor) -> list[Value]:
        left, right = found.indices(index)
        rhs = self.values(found.rhs, right.flatten())
        needed = [i for i, v in enumerate(rhs) if not isinstance(v, Poly) or v.terms]
        lhs = dict(zip(needed, self.values(found.lhs, left.flatten()[needed]) if needed else []))
        result: list[Value] = [Poly.number(0.0)] * len(index)
        for at in needed:
            row = at // found.extent
            result[row] = add(result[row], multiply(lhs[at], rhs[at]))
        if found.scale != 1.0:
            result = [multiply(v, Poly.number(found.scale)) for v in result]
        return result


def _part(value: Value, part: str) -> Poly:
    assert isinstance(value, Complex)
    return value.re if part == "re" else value.im


Rule = Callable[[Symbolic, fx.Node, torch.Tensor], list[Value] | None]


def _negative(value: Value) -> Value:
    return Complex(value.re.scaled(-1), value.im.scaled(-1)) if isinstance(value, Complex) else value.scaled(-1)


def _linear_rule(sign: float, reverse: bool = False) -> Rule:
    def rule(engine: Symbolic, node: fx.Node, index: torch.Tensor) -> list[Value] | None:
        given = args_of(node)[2] if len(args_of(node)) > 2 else 1
        alpha = float(engine.sizes.number(kwargs_of(node).get("alpha", given)))
        a, b = engine.operand(node, args_of(node)[0], index), engine.operand(node, args_of(node)[1], index)
        if a is None or b is None:
            return None
        if reverse:
            a, b = b, a
        return [add(x, y, sign * alpha) for x, y in zip(a, b)]
    return rule


def _mul_rule(engine: Symbolic, node: fx.Node, index: torch.Tensor) -> list[Value] | None:
    """A scalar factor (a number other than +-1, or a tensor without dimensions) of something without leaves stays
    inside an atom: a scaled cos table is a table."""
    a, b = engine.operand(node, args_of(node)[0], index), engine.operand(node, args_of(node)[1], index)
    if a is None or b is None:
        return None
    if engine.leaves and any(_is_scale(engine, argument) for argument in args_of(node)[:2]) and not any(
            _has_leaf(value, engine.leaves) for value in (*a[:1], *b[:1])):
        return None
    return [multiply(x, y) for x, y in zip(a, b)]


def _addcmul(engine: Symbolic, node: fx.Node, index: torch.Tensor) -> list[Value] | None:
    whole = [engine.operand(node, argument, index) for argument in args_of(node)[:3]]
    if any(values is None for values in whole):
        return None
    factor = float(engine.sizes.number(kwargs_of(node).get("value", 1)))
    return [add(a, multiply(b, c), factor) for a, b, c in zip(*(values or [] for values in whole))]


def _fma(engine: Symbolic, node: fx.Node, index: torch.Tensor) -> list[Value] | None:
    """Inductor's ``prims.fma(a, b, c)``: a * b + c."""
    whole = [engine.operand(node, argument, index) for argument in args_of(node)[:3]]
    if any(values is None for values in whole):
        return None
    return [add(c, multiply(a, b)) for a, b, c in zip(*(values or [] for values in whole))]


def _is_scale(engine: Symbolic, argument: object) -> bool:
    if isinstance(argument, fx.Node) and isinstance(argument.meta.get("val"), torch.Tensor):
        return len(engine.sizes.shape(argument)) == 0
    return abs(float(engine.sizes.number(argument))) != 1.0


def _has_leaf(value: Value, leaves: frozenset[fx.Node]) -> bool:
    polys = (value.re, value.im) if isinstance(value, Complex) else (value,)
    return any(atom.node in leaves for poly in polys for monomial in poly.terms for atom in monomial)


def _div_rule(engine: Symbolic, node: fx.Node, index: torch.Tensor) -> list[Value] | None:
    b = engine.operand(node, args_of(node)[1], index)
    constants = [] if b is None else [v.constant() if isinstance(v, Poly) else None for v in b]
    numbers = [n for n in constants if n]
    if b is None or len(numbers) < len(constants):
        return None
    a = engine.operand(node, args_of(node)[0], index)
    return None if a is None else [multiply(x, Poly.number(1.0 / n)) for x, n in zip(a, numbers)]


def _unary(function: Callable[[Value], Value]) -> Rule:
    def rule(engine: Symbolic, node: fx.Node, index: torch.Tensor) -> list[Value] | None:
        return [function(v) for v in engine.values(args_of(node)[0], index)]
    return rule


def _conj(value: Value) -> Value:
    return Complex(value.re, value.im.scaled(-1)) if isinstance(value, Complex) else value


def _trigonometric(odd: bool) -> Rule:
    """cos(-x) = cos(x) and sin(-x) = -sin(x): a leading minus of the argument is taken outside."""
    function = math.sin if odd else math.cos

    def rule(engine: Symbolic, node: fx.Node, index: torch.Tensor) -> list[Value] | None:
        result: list[Value] = []
        for at, argument in zip(index.tolist(), engine.of_angles().values(args_of(node)[0], index)):
            if isinstance(argument, Complex):
                return None
            number = argument.constant()
            if number is not None:
                result.append(Poly.number(function(number)))
                continue
            minus = all(c < 0 for c in argument.terms.values())
            atom = Atom(node, at, negated=minus and odd)
            result.append(Poly.atom(atom, -1.0 if minus and odd else 1.0))
        return result
    return rule


def _polar(engine: Symbolic, node: fx.Node, index: torch.Tensor) -> list[Value] | None:
    radius = engine.operand(node, args_of(node)[0], index)
    angles = engine.of_angles().operand(node, args_of(node)[1], index)
    if radius is None or angles is None or any(not isinstance(r, Poly) or r.constant() != 1.0 for r in radius):
        return None
    result: list[Value] = []
    for at, angle in zip(index.tolist(), map(real, angles)):
        number = angle.constant()
        if number is not None:
            result.append(Complex(Poly.number(math.cos(number)), Poly.number(math.sin(number))))
            continue
        minus = bool(angle.terms) and all(c < 0 for c in angle.terms.values())
        im = Poly.atom(Atom(node, at, "im", negated=minus), -1.0 if minus else 1.0)
        result.append(Complex(Poly.atom(Atom(node, at, "re")), im))
    return result


def _complex(engine: Symbolic, node: fx.Node, index: torch.Tensor) -> list[Value] | None:
    re, im = engine.operand(node, args_of(node)[0], index), engine.operand(node, args_of(node)[1], index)
    return None if re is None or im is None else [Complex(real(a), real(b)) for a, b in zip(re, im)]


def _where(engine: Symbolic, node: fx.Node, index: torch.Tensor) -> list[Value] | None:
    a, b = engine.operand(node, args_of(node)[1], index), engine.operand(node, args_of(node)[2], index)
    if a is None or b is None:
        return None
    condition: fx.Node = args_of(node)[0]
    at = broadcast_index(index, engine.sizes.shape(node), engine.sizes.shape(condition))
    chosen = constant_values(condition, at, engine.sizes)
    if chosen is not None:
        return [x if yes else y for yes, x, y in zip(chosen.tolist(), a, b)]
    return None if any(x != y for x, y in zip(a, b)) else a


_PAIRS = {(torch.float32, torch.complex64), (torch.float64, torch.complex128), (torch.float16, torch.complex32)}
_POINTWISE: dict[Any, Rule] = {
    aten.add.Tensor: _linear_rule(1), aten.add.Scalar: _linear_rule(1),
    aten.sub.Tensor: _linear_rule(-1), aten.sub.Scalar: _linear_rule(-1),
    aten.rsub.Scalar: _linear_rule(-1, reverse=True), aten.rsub.Tensor: _linear_rule(-1, reverse=True),
    aten.mul.Tensor: _mul_rule, aten.mul.Scalar: _mul_rule, aten.div.Tensor: _div_rule, aten.div.Scalar: _div_rule,
    aten.neg.default: _unary(_negative), aten._conj.default: _unary(_conj), aten.conj.default: _unary(_conj),
    aten._conj_physical.default: _unary(_conj), aten.conj_physical.default: _unary(_conj),
    aten.resolve_conj.default: _unary(lambda v: v), aten.resolve_neg.default: _unary(lambda v: v),
    aten.real.default: _unary(lambda v: v.re if isinstance(v, Complex) else v),
    aten.imag.default: _unary(lambda v: v.im if isinstance(v, Complex) else Poly.number(0.0)),
    aten.cos.default: _trigonometric(False), aten.sin.default: _trigonometric(True), aten.polar.default: _polar,
    aten.complex.default: _complex, aten.where.self: _where, aten.addcmul.default: _addcmul,
}


def describe(value: Value, sizes: Sizes, names: dict[fx.Node, str] | None = None) -> str:
    """A polynomial for people: ``o[448]*cos[0] + o[449]*sin[0]``; indices are the coordinates of each element."""
    if isinstance(value, Complex):
        return f"({describe(value.re, sizes, names)}) + i*({describe(value.im, sizes, names)})"
    if not value.terms:
        return "0"
    text = ""
    for monomial, coefficient in value.terms.items():
        factors = "*".join(_describe_atom(atom, sizes, names or {}) for atom in monomial)
        size = abs(coefficient)
        number = "" if size == 1.0 and factors else f"{size:.6g}"
        joined = "*".join(part for part in (number, factors) if part)
        sign = "-" if coefficient < 0 else "+"
        text += (f" {sign} " if text else ("-" if sign == "-" else "")) + joined
    return text


def _describe_atom(atom: Atom, sizes: Sizes, names: dict[fx.Node, str]) -> str:
    where = ",".join(str(int(c)) for c in unravel(torch.tensor(atom.index), sizes.shape(atom.node)))
    name = names.get(atom.node, atom.node.name)
    text = f"{name}[{where}]"
    if atom.part:
        text = f"{atom.part}({text})"
    return text


