"""Elements as polynomials."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import inputs, result, trace

from fusion_pass.elements.sizes import Sizes
from fusion_pass.elements.symbolic import Atom, Poly, Symbolic, describe


def polynomial(fn, *args, at=0):
    gm = trace(fn, *args)
    value, = Symbolic(Sizes(), frozenset(inputs(gm))).values(result(gm), torch.tensor([at]))
    return gm, value


def text(fn, *args, at=0, names="xcs"):
    gm, value = polynomial(fn, *args, at=at)
    return describe(value, Sizes(), dict(zip(inputs(gm), names)))


X, C, S = torch.randn(6), torch.randn(3), torch.randn(3)


def test_rotations_of_any_spelling_are_one_polynomial():
    def stacked(x, c, s):
        even, odd = x[::2], x[1::2]
        return torch.stack([even * c + odd * s, odd * c - even * s], -1).flatten()

    def complex_product(x, c, s):
        return torch.view_as_real(torch.view_as_complex(x.view(3, 2)) * torch.complex(c, s).conj()).flatten()

    def rotate_half(x, c, s):
        pairs = x.view(3, 2)
        turned = torch.stack([-pairs[:, 1], pairs[:, 0]], -1)
        return (pairs * c[:, None] - turned * s[:, None]).flatten()

    def written(x, c, s):
        out = torch.empty_like(x)
        out[::2] = x[::2] * c + x[1::2] * s
        out[1::2] = x[1::2] * c - x[::2] * s
        return out

    for fn in (stacked, complex_product, rotate_half, written):
        assert sorted(text(fn, X, C, S, at=2).split(" + ")) == ["c[1]*x[2]", "s[1]*x[3]"], fn.__name__
        odd = text(fn, X, C, S, at=3)
        assert "c[1]*x[3]" in odd and ("- s[1]*x[2]" in odd or odd.startswith("-s[1]*x[2]")), odd
    assert "- s" in text(lambda x, c, s: stacked(x, c, -s), X, C, S, at=2)


def test_constants_fold_and_terms_cancel():
    assert text(lambda x: x + x - 2 * x, X) == "0"
    assert text(lambda x: (x * 3 + 1) / 2, X, at=4) in ("1.5*x[4] + 0.5", "0.5 + 1.5*x[4]")
    assert text(lambda x: 5 - x.neg(), X) in ("5 + x[0]", "x[0] + 5")


def test_what_is_no_polynomial_is_an_atom():
    gm, value = polynomial(lambda x: x.exp() + 2, X, at=1)
    atom, = {a for monomial in value.terms for a in monomial}
    assert atom.index == 1 and "exp" in atom.node.name


def test_cos_and_sin_take_the_sign_outside():
    assert "-sin" in text(lambda x: torch.sin(-x), X)
    assert not text(lambda x: torch.cos(-x), X).startswith("-")


NODES = inputs(trace(lambda x, c: x[:3] * c, X, C))
polynomials = st.dictionaries(
    st.lists(st.tuples(st.sampled_from(NODES), st.integers(0, 2)), max_size=2).map(
        lambda atoms: tuple(sorted((Atom(n, i) for n, i in atoms), key=lambda a: (a.node.name, a.index, "", False)))),
    st.integers(-3, 3).filter(bool).map(float), max_size=4).map(Poly)


def number(poly, values):
    total = 0.0
    for monomial, coefficient in poly.terms.items():
        for atom in monomial:
            coefficient *= values[atom.node][atom.index]
        total += coefficient
    return total


@settings(max_examples=200, deadline=None)
@given(polynomials, polynomials, polynomials)
def test_arithmetic_is_a_ring(a, b, c):
    assert a + b == b + a and a * b == b * a
    assert (a + b) + c == a + (b + c) and (a * b) * c == a * (b * c)
    assert a * (b + c) == a * b + a * c
    assert a + a.scaled(-1) == Poly.number(0) and a * Poly.number(1) == a
    values = {node: torch.randn(3, dtype=torch.float64).tolist() for node in NODES}
    assert abs(number(a * b + c, values) - (number(a, values) * number(b, values) + number(c, values))) < 1e-9
