"""Elements as polynomials over elements of chosen leaves.

A rotation, whatever its spelling (real or complex, stacked, strided writes, rotate-half, a small matrix product), is a
polynomial of degree two in the elements it reads. Everything that is not addition, multiplication or a move becomes
an atom itself, so the polynomial is exact about what it covers and opaque about the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensor

from ..fx_access import args_of, kwargs_of
from .contractions import contraction
from .moves import CASTS, broadcast_index, sources, unravel
from .sizes import Sizes

aten = torch.ops.aten
SMALL_CONTRACTION = 4
SIGNS_LIMIT = 4096      # elements of a constant that is looked at


@dataclass(frozen=True)
class Atom:
    """One element of a node. ``part`` is "re"/"im" for complex values; ``negated`` marks sin(-x) read as -sin(x)."""

    node: fx.Node
    index: int
    part: str = ""
    negated: bool = False


class Poly:
    """Sum of monomials: ``terms`` maps a sorted tuple of atoms to its coefficient."""

    __slots__ = ("terms",)

    def __init__(self, terms: dict[tuple[Atom, ...], float]):
        self.terms = terms

    @staticmethod
    def number(value: float) -> Poly:
        return Poly({(): float(value)} if value else {})

    @staticmethod
    def atom(atom: Atom, coefficient: float = 1.0) -> Poly:
        return Poly({(atom,): coefficient})

    def __add__(self, other: Poly) -> Poly:
        terms = dict(self.terms)
        for monomial, coefficient in other.terms.items():
            total = terms.get(monomial, 0.0) + coefficient
            if total:
                terms[monomial] = total
            else:
                terms.pop(monomial, None)
        return Poly(terms)

    def __mul__(self, other: Poly) -> Poly:
        result = Poly({})
        for a, x in self.terms.items():
            for b, y in other.terms.items():
                result = result + Poly({tuple(sorted(a + b, key=_atom_order)): x * y})
        return result

    def scaled(self, factor: float) -> Poly:
        return Poly({m: c * factor for m, c in self.terms.items()} if factor else {})

    def constant(self) -> float | None:
        """The value, when the polynomial is a number."""
        if not self.terms:
            return 0.0
        return self.terms.get(()) if set(self.terms) == {()} else None

    def single_atom(self) -> Atom | None:
        """The atom, when the polynomial is exactly one atom."""
        if len(self.terms) == 1:
            (monomial, coefficient), = self.terms.items()
            if coefficient == 1.0 and len(monomial) == 1:
                return monomial[0]
        return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Poly) and self.terms == other.terms

    def __hash__(self) -> int:
        return hash(frozenset(self.terms.items()))


def _atom_order(atom: Atom) -> tuple[Any, ...]:
    return (atom.node.name, atom.index, atom.part, atom.negated)


@dataclass(frozen=True)
class Complex:
    """A complex-valued element."""

    re: Poly
    im: Poly


Value = Poly | Complex


class Symbolic:
    """Evaluates elements to polynomials. ``leaves`` are never looked into; ``limit`` bounds a polynomial's terms."""

    def __init__(self, sizes: Sizes, leaves: frozenset[fx.Node] = frozenset(), limit: int = 64):
        self.sizes = sizes
        self.leaves = leaves
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
        if node in self.leaves or node.op != "call_function":
            signs = None if node in self.leaves else _signs(node)
            return self._atoms(node, index) if signs is None else [Poly.number(v) for v in signs[index].tolist()]
        self.sizes.seen.add(node)
        if node.target in (aten.view_as_complex.default, aten.view_as_complex_copy.default):
            pairs = self.values(args_of(node)[0], torch.stack([index * 2, index * 2 + 1], 1).flatten())
            return [Complex(_real(pairs[2 * i]), _real(pairs[2 * i + 1])) for i in range(len(index))]
        if node.target in (aten.view_as_real.default, aten.view_as_real_copy.default):
            whole = self.values(args_of(node)[0], index // 2)
            return [_part(w, "re" if i % 2 == 0 else "im") for w, i in zip(whole, index.tolist())]
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
        rule = _POINTWISE.get(node.target)
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

    def _small_contraction(self, node: fx.Node, index: torch.Tensor) -> list[Value] | None:
        found = contraction(node, self.sizes)
        if found is None or found.extent > SMALL_CONTRACTION or found.addend is not None or found.scale_nodes:
            return None
        left, right = found.indices(index)
        lhs, rhs = self.values(found.lhs, left.flatten()), self.values(found.rhs, right.flatten())
        result = []
        for row in range(len(index)):
            total: Value = Poly.number(0.0)
            for k in range(found.extent):
                at = row * found.extent + k
                total = _add(total, _multiply(lhs[at], rhs[at]))
            result.append(total)
        return result


def _add(a: Value, b: Value, factor: float = 1.0) -> Value:
    if isinstance(a, Complex) or isinstance(b, Complex):
        a, b = _as_complex(a), _as_complex(b)
        return Complex(a.re + b.re.scaled(factor), a.im + b.im.scaled(factor))
    return a + b.scaled(factor)


def _multiply(a: Value, b: Value) -> Value:
    if isinstance(a, Complex) or isinstance(b, Complex):
        a, b = _as_complex(a), _as_complex(b)
        return Complex(a.re * b.re + (a.im * b.im).scaled(-1), a.re * b.im + a.im * b.re)
    return a * b


def _as_complex(value: Value) -> Complex:
    return value if isinstance(value, Complex) else Complex(value, Poly.number(0.0))


def _real(value: Value) -> Poly:
    assert isinstance(value, Poly)
    return value


def _part(value: Value, part: str) -> Poly:
    assert isinstance(value, Complex)
    return value.re if part == "re" else value.im


def _signs(node: fx.Node) -> torch.Tensor | None:
    """The values of a tensor literal of the source that holds -1, 0 and 1 only: signs, to be multiplied out. (Any other
    constant is a table and stays an atom.)"""
    if node.op == "get_attr" and "_tensor_constant" in str(node.target):
        value = getattr(node.graph.owning_module, str(node.target), None)
    else:
        value = node.meta.get("lifted_constant")
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or value.is_complex() or not (
            0 < value.numel() <= SIGNS_LIMIT) or isinstance(value, FakeTensor):
        return None
    flat = value.detach().flatten().double()
    return flat if bool(((flat == 0) | (flat.abs() == 1)).all()) else None


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
        return [_add(x, y, sign * alpha) for x, y in zip(a, b)]
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
    return [_multiply(x, y) for x, y in zip(a, b)]


def _addcmul(engine: Symbolic, node: fx.Node, index: torch.Tensor) -> list[Value] | None:
    whole = [engine.operand(node, argument, index) for argument in args_of(node)[:3]]
    if any(values is None for values in whole):
        return None
    factor = float(engine.sizes.number(kwargs_of(node).get("value", 1)))
    return [_add(a, _multiply(b, c), factor) for a, b, c in zip(*(values or [] for values in whole))]


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
    return None if a is None else [_multiply(x, Poly.number(1.0 / n)) for x, n in zip(a, numbers)]


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
        for at, argument in zip(index.tolist(), engine.values(args_of(node)[0], index)):
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
    angles = engine.operand(node, args_of(node)[1], index)
    if radius is None or angles is None or any(not isinstance(r, Poly) or r.constant() != 1.0 for r in radius):
        return None
    result: list[Value] = []
    for at, angle in zip(index.tolist(), map(_real, angles)):
        minus = bool(angle.terms) and all(c < 0 for c in angle.terms.values())
        im = Poly.atom(Atom(node, at, "im", negated=minus), -1.0 if minus else 1.0)
        result.append(Complex(Poly.atom(Atom(node, at, "re")), im))
    return result


def _complex(engine: Symbolic, node: fx.Node, index: torch.Tensor) -> list[Value] | None:
    re, im = engine.operand(node, args_of(node)[0], index), engine.operand(node, args_of(node)[1], index)
    return None if re is None or im is None else [Complex(_real(a), _real(b)) for a, b in zip(re, im)]


def _where(engine: Symbolic, node: fx.Node, index: torch.Tensor) -> list[Value] | None:
    a, b = engine.operand(node, args_of(node)[1], index), engine.operand(node, args_of(node)[2], index)
    if a is None or b is None or any(x != y for x, y in zip(a, b)):
        return None
    return a


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


