"""Symbols that guards make equal without the ShapeEnv replacing one by the other."""

from types import SimpleNamespace

import pytest
import sympy

from fusion_pass.elements.sizes import _equalities

a, b, c, d = sympy.symbols("a b c d", integer=True, positive=True)


@pytest.mark.parametrize("guards, known", [
    ([sympy.Eq(a + a // 16, b + a // 16)], {b: a}),
    ([sympy.Eq(2 * a, b)], {b: 2 * a}),
    ([sympy.Eq(a, b), sympy.Eq(b, c)], {b: a, c: a}),
    ([sympy.Eq(b + c, d), sympy.Eq(a, b)], {d: a + c, b: a}),
    ([sympy.Eq(a * b, 6, evaluate=False), sympy.Ne(a, b), a > 2], {}),
])  # fmt: skip
def test_equalities(guards, known):
    found = _equalities(SimpleNamespace(guards=[SimpleNamespace(expr=guard) for guard in guards]))
    assert found == known
    assert not set(found) & set().union(*(expr.free_symbols for expr in found.values()), set())
