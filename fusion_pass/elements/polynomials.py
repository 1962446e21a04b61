"""Polynomials over elements of tensors, and complex numbers of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.fx as fx


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


def add(a: Value, b: Value, factor: float = 1.0) -> Value:
    if isinstance(a, Complex) or isinstance(b, Complex):
        a, b = as_complex(a), as_complex(b)
        return Complex(a.re + b.re.scaled(factor), a.im + b.im.scaled(factor))
    return a + b.scaled(factor)


def multiply(a: Value, b: Value) -> Value:
    if isinstance(a, Complex) or isinstance(b, Complex):
        a, b = as_complex(a), as_complex(b)
        return Complex(a.re * b.re + (a.im * b.im).scaled(-1), a.re * b.im + a.im * b.re)
    return a * b


def as_complex(value: Value) -> Complex:
    return value if isinstance(value, Complex) else Complex(value, Poly.number(0.0))


def real(value: Value) -> Poly:
    assert isinstance(value, Poly)
    return value
