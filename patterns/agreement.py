# SPDX-License-Identifier: Apache-2.0
"""Does a user's function compute its role? Random inputs, several shapes, fp32 and bf16; a difference is explained."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .fp8_quant import E4M3
from .roles import Function, Role, Sample

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
# Codes on a rounding border may fall to either side.
CODES_THAT_MAY_DIFFER = 2e-3


def check_agreement(label: str, function: Function, role: Role, reference: Function, rtol: float | None) -> None:
    """Raises ValueError when ``function`` and ``reference`` differ on the role's random samples."""
    for dtype, tolerance in TOLERANCE.items():
        generator = torch.Generator().manual_seed(0)
        for sample in role.samples(dtype, generator):
            _compare(label, function, role, reference, sample, dtype, tolerance if rtol is None else rtol)


def _compare(label: str, function: Function, role: Role, reference: Function, sample: Sample, dtype: torch.dtype,
             tolerance: float) -> None:
    shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in zip(role.names, sample)
                       if isinstance(value, Tensor))
    where = f"register_pattern({role.name!r}): {label} with {dtype}, {shapes}"
    given = pytree.tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, sample)
    with torch.no_grad():
        want = reference(*sample)
        try:
            found = function(*given)
        except Exception as error:
            raise ValueError(f"{where}: raises {type(error).__name__}: {error}") from error
    for name, before, after in zip(role.names, sample, given):
        if isinstance(before, Tensor) and not torch.equal(before, after):
            raise ValueError(f"{where}: changes its argument {name} in place: work on a clone")
    wants, founds = pytree.tree_leaves(want), pytree.tree_leaves(found)
    if len(wants) != len(founds):
        raise ValueError(f"{where}: expected {len(wants)} results, got {len(founds)}")
    for number, (one, other) in enumerate(zip(wants, founds)):
        result = "the result" if len(wants) == 1 else f"result {number}"
        if not isinstance(other, Tensor):
            raise ValueError(f"{where}: {result} is a {type(other).__name__}, expected a tensor")
        if one.shape != other.shape:
            raise ValueError(f"{where}: {result} has shape {list(other.shape)}, expected {list(one.shape)}")
        if one.dtype != other.dtype:
            raise ValueError(f"{where}: {result} has dtype {other.dtype}, expected {one.dtype}")
        at = _first_difference(one, other, tolerance)
        if at is not None:
            text = f"{where}: {result}: element {list(at)} is {float(other[at]):.6g}, expected {float(one[at]):.6g}"
            raise ValueError(text + _expressions(function, reference, role, sample, number, at))


def _first_difference(want: Tensor, found: Tensor, tolerance: float) -> tuple[int, ...] | None:
    a, b = want.double(), found.double()
    wrong = (a - b).abs() > tolerance * a.abs().max().clamp(min=1e-30)
    if want.dtype == E4M3:
        wrong = a != b
        if int(wrong.sum()) <= CODES_THAT_MAY_DIFFER * wrong.numel() + 1:
            return None
    wrong |= torch.isnan(a) != torch.isnan(b)
    first = wrong.nonzero()
    return tuple(first[0].tolist()) if len(first) else None


def _expressions(function: Function, reference: Function, role: Role, sample: Sample, number: int,
                 at: tuple[int, ...]) -> str:
    """Both sides of the difference as expressions of the arguments, where the function can be traced and read."""
    found = _expression(function, role, sample, number, at)
    want = _expression(reference, role, sample, number, at)
    if found is None or want is None or found == want or max(len(found), len(want)) > 300:
        return ""
    return f" (it computes {found}, the role {want})"


def _expression(function: Function, role: Role, sample: Sample, number: int, at: tuple[int, ...]) -> str | None:
    from torch.fx.experimental.proxy_tensor import make_fx

    # Late: the evaluator belongs to the pass, which imports this package.
    from ..elements.sizes import Sizes
    from ..elements.symbolic import Symbolic, describe

    tensors = [v for v in sample if isinstance(v, Tensor)]

    def of_tensors(*values: Tensor) -> Any:
        rest = iter(values)
        return pytree.tree_leaves(function(*[next(rest) if isinstance(v, Tensor) else v for v in sample]))

    try:
        with torch.no_grad():
            graph = make_fx(of_tensors)(*tensors).graph
        output = next(n for n in graph.nodes if n.op == "output").args[0][number]
        index = 0
        for coordinate, size in zip(at, output.meta["val"].shape):
            index = index * size + coordinate
        sizes = Sizes()
        value, = Symbolic(sizes).values(output, torch.tensor([index]))
        places = [n for n in graph.nodes if n.op == "placeholder"]
        names = [name for name, v in zip(role.names, sample) if isinstance(v, Tensor)]
        text = describe(value, sizes, dict(zip(places, names)))
    except Exception:
        return None          # an explanation only: a function that cannot be traced has none
    opaque = {n.name for n in graph.nodes if n.op != "placeholder"}
    return None if any(f"{name}[" in text for name in opaque) else text
