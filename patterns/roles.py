# SPDX-License-Identifier: Apache-2.0
"""The roles of the chain: name, reference function, and what a user's own function of the role looks like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .bgemm import bgemm
from .fmha import fmha
from .fp8_quant import fp8_quant
from .inverse_rope import inverse_rope
from .kv_merge import kv_merge

Function = Callable[..., Any]
Sample = tuple[Any, ...]  # the arguments of one call
Samples = Callable[[torch.dtype, torch.Generator], list[Sample]]


@dataclass(frozen=True)
class Role:
    """One step of the chain.

    reference: what the role means. parameters: its arguments in order, as (name, type of the op schema). returns: the
    schema's return types. options: keyword arguments of the reference that are fixed when a function is registered.
    samples: random arguments of several shapes in one dtype. Shapes and formulas: the reference's docstring.
    """

    name: str
    reference: Function
    parameters: tuple[tuple[str, str], ...]
    returns: str
    samples: Samples
    options: tuple[str, ...] = ()

    @property
    def schema(self) -> str:
        """Signature in the language of ``torch.library``."""
        arguments = ", ".join(f"{kind} {name}" for name, kind in self.parameters)
        return f"({arguments}) -> {self.returns}"

    @property
    def names(self) -> tuple[str, ...]:
        """The arguments' names."""
        return tuple(name for name, _ in self.parameters)


def _normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def _fmha_samples(dtype: torch.dtype, generator: torch.Generator) -> list[Sample]:
    samples = []
    for batch, queries, heads, dim, keys in ((1, 3, 4, 512, 9), (2, 1, 8, 512, 5), (1, 5, 2, 512, 17)):
        mask = torch.rand(batch, queries, keys, generator=generator) < 0.7
        mask[..., 0] = True
        additive = torch.zeros(batch, queries, keys).masked_fill(~mask, float("-inf"))
        samples.append((_normal(generator, batch, queries, heads, dim, dtype=dtype),
                        _normal(generator, batch, keys, dim, dtype=dtype), additive.to(dtype),
                        _normal(generator, heads), dim**-0.5))
    return samples


def _kv_merge_samples(dtype: torch.dtype, generator: torch.Generator) -> list[Sample]:
    samples = []
    for splits, tokens, heads, dim in ((2, 3, 4, 512), (5, 1, 8, 512), (3, 4, 2, 512)):
        samples.append((_normal(generator, splits, tokens, heads, dim, dtype=dtype),
                        _normal(generator, splits, tokens, heads) * 3, _normal(generator, heads)))
    return samples


def _inverse_rope_samples(dtype: torch.dtype, generator: torch.Generator) -> list[Sample]:
    samples = []
    for tokens, heads, dim, half in ((3, 4, 512, 32), (1, 8, 512, 32), (6, 2, 512, 32)):
        angles = _normal(generator, tokens, half) * 2
        samples.append((_normal(generator, tokens, heads, dim, dtype=dtype), angles.cos(), angles.sin()))
    return samples


def _fp8_quant_samples(dtype: torch.dtype, generator: torch.Generator) -> list[Sample]:
    samples = []
    for tokens, groups, width, spread in ((3, 2, 512, 1.0), (1, 4, 1024, 30.0), (5, 1, 512, 1e-3)):
        x = _normal(generator, tokens, groups, width) * spread
        x[0, 0, :128] = 0                    # a block of zeros shows the floor
        samples.append((x.to(dtype),))
    return samples


def _bgemm_samples(dtype: torch.dtype, generator: torch.Generator) -> list[Sample]:
    return [(_normal(generator, tokens, groups, width, dtype=dtype),
             _normal(generator, groups, rows, width, dtype=dtype))
            for tokens, groups, width, rows in ((3, 2, 512, 16), (1, 4, 1024, 8), (5, 1, 512, 24))]


ROLES: dict[str, Role] = {role.name: role for role in (
    Role("fmha", fmha, (("q", "Tensor"), ("kv", "Tensor"), ("mask", "Tensor?"), ("sink", "Tensor?"),
                        ("scale", "float")), "Tensor", _fmha_samples),
    Role("kv_merge", kv_merge, (("partials", "Tensor"), ("lse", "Tensor"), ("sink", "Tensor?")), "Tensor",
         _kv_merge_samples),
    Role("inverse_rope", inverse_rope, (("o", "Tensor"), ("cos", "Tensor"), ("sin", "Tensor")), "Tensor",
         _inverse_rope_samples),
    Role("fp8_quant", fp8_quant, (("x", "Tensor"),), "(Tensor, Tensor)", _fp8_quant_samples,
         ("block", "scale_rule", "floor")),
    Role("bgemm", bgemm, (("x", "Tensor"), ("weight", "Tensor")), "Tensor", _bgemm_samples),
)}


def role(name: str) -> Role:
    """The role of that name. Raises ValueError for a name that is none, naming the nearest one."""
    if name not in ROLES:
        import difflib
        nearest = difflib.get_close_matches(str(name), ROLES, n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown role {name!r}: the roles are {', '.join(ROLES)}; the nearest is {nearest!r}")
    return ROLES[name]
