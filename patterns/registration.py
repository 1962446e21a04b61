# SPDX-License-Identifier: Apache-2.0
"""``register_pattern``: a function or op of the user's own that is a role of the chain.

For code whose spelling the pass cannot read (its own kernels, NumPy, a compiled extension). The function is compared
with the role's reference when it is registered; from then on it is one op in every traced graph, whose written-out form
is the reference, and where no chain is fused it is called as it always was.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch.utils import _pytree as pytree

from . import opaque
from .agreement import check_agreement
from .roles import Function, Role, role

NAMESPACE = "fusion_pass_user"
_registered: dict[str, Registered] = {}
_count = itertools.count()


@dataclass(frozen=True)
class Registered:
    """One registration: under which name, for which role with which options, and the op that stands in graphs."""

    name: str
    role: str
    options: tuple[tuple[str, Any], ...]
    op: str

    def __str__(self) -> str:
        options = "".join(f", {key}={value!r}" for key, value in self.options)
        return f"{self.name}: {self.role}{options} (op {self.op})"


def register_pattern(
    role_name: str, *, name: str | None = None, rtol: float | None = None, **options: Any
) -> Callable[[Any], Any]:
    """Decorator: this function (or this ``OpOverload``) computes the role ``role_name``.

    role_name: ``fmha``, ``kv_merge``, ``inverse_rope``, ``fp8_quant`` or ``bgemm``; shapes, dtypes and formula are
    those of ``fusion_pass.patterns.<role>.<role>``, whose arguments the function takes in that order. options: keyword
    arguments of the reference that the function has built in (``fp8_quant``: ``block``, ``scale_rule``, ``floor``).
    name: for reports and ``Config(disable_rules=...)``; the function's own name when None. rtol: tolerance of the
    comparison relative to the largest value (default by dtype: 1e-4 in fp32, 2e-2 in bf16).

    Returns a function of the same signature that is traced as one op (an ``OpOverload`` is returned as it is). Calls
    that autograd records go to the original function, which keeps its gradient.

    Raises ValueError when the function disagrees with the reference (naming the first differing element, both values
    and, where the function can be traced, both expressions), changes an argument in place, or when the name is taken;
    TypeError for an object that is neither a function nor an op, or a function with other arguments.
    """
    chosen = role(role_name)
    unknown = set(options) - set(chosen.options)
    if unknown:
        raise ValueError(f"register_pattern: {role_name} has no option {sorted(unknown)[0]!r}, "
                         f"its options are {chosen.options or 'none'}")
    reference = functools.partial(chosen.reference, **options)

    def decorate(function: Any) -> Any:
        overload = _overload(function)
        label = str(name or (overload._schema.name if overload is not None else getattr(function, "__name__", "")))
        if overload is None:
            _check_signature(function, chosen)
        if label in _registered:
            raise ValueError(f"register_pattern: {label!r} is registered already: call unregister_pattern({label!r})")
        check_agreement(label, function if overload is None else overload, chosen, reference, rtol)
        if overload is not None:
            op_name, result = overload._schema.name, function
        else:
            op_name, result = _make_op(label, function, chosen, reference)
        many = chosen.returns.startswith("(")

        def expand(*arguments: Any, **defaults: Any) -> tuple[Any, ...]:
            values = (*arguments, *defaults.values())
            found = reference(*values)
            return found if many else (found,)

        opaque.add(opaque.OpaqueOp(op_name, "registered", (role_name,), f"register_pattern({label!r})", expand,
                                   label=label))
        _registered[label] = Registered(label, role_name, tuple(sorted(options.items())), op_name)
        return result

    return decorate


def unregister_pattern(name: str) -> None:
    """Forget a registration; graphs that are compiled from now on treat its op as unknown. Raises KeyError."""
    if name not in _registered:
        raise KeyError(f"no pattern {name!r} is registered; registered: {', '.join(_registered) or 'none'}")
    opaque.remove(_registered.pop(name).op)


def registered_patterns() -> list[Registered]:
    """What is registered in this process, oldest first."""
    return list(_registered.values())


def fingerprint() -> str:
    """Changes with every registration; part of cache keys ("" when nothing is registered)."""
    if not _registered:
        return ""
    return hashlib.sha256("\n".join(map(repr, _registered.values())).encode()).hexdigest()


def _overload(function: Any) -> torch._ops.OpOverload | None:
    if isinstance(function, torch._ops.OpOverload):
        return function
    if isinstance(function, torch._ops.OpOverloadPacket):
        return function.default
    if isinstance(function, CustomOpDef):
        return function._opoverload
    if not callable(function):
        raise TypeError(f"register_pattern: expected a function or an op, got {type(function).__name__}")
    return None


def _check_signature(function: Function, chosen: Role) -> None:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return                                  # a built-in without a signature: the comparison will tell
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    required = [p for p in positional if p.default is p.empty]
    count = len(chosen.names)
    if not variadic and not len(required) <= count <= len(positional):
        raise TypeError(f"register_pattern: a function of the role {chosen.name!r} takes {count} arguments "
                        f"({', '.join(chosen.names)}), {getattr(function, '__name__', function)} takes "
                        f"{len(positional)} ({', '.join(p.name for p in positional)})")


def _make_op(label: str, function: Function, chosen: Role, reference: Function) -> tuple[str, Function]:
    """A custom op around the function, and the function that calls it."""
    op_name = f"{NAMESPACE}::{re.sub(r'[^0-9A-Za-z_]', '_', label).lstrip('0123456789') or 'pattern'}_{next(_count)}"

    traceable = _runs_on_fake_tensors(function, chosen)

    def body(*arguments: Any) -> Any:
        found = _unaliased(function(*arguments), arguments)
        return found if traceable else pytree.tree_map(lambda t: t.contiguous(), found)

    def fake(*arguments: Any) -> Any:
        # A function that cannot run without data has the metadata of the reference.
        found = (function if traceable else reference)(*arguments)
        return pytree.tree_map(torch.empty_like if traceable else _contiguous_like, found)

    op = torch.library.custom_op(op_name, body, mutates_args=(), schema=chosen.schema)
    op.register_fake(fake)
    overload = op._opoverload
    names = _parameter_names(function, chosen)

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        arguments = arguments + tuple(named[n] for n in names[len(arguments):] if n in named)
        if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in arguments):
            return function(*arguments)
        return overload(*arguments)

    return op_name, call


def _parameter_names(function: Function, chosen: Role) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)[: len(chosen.names)]
    except (TypeError, ValueError):
        return chosen.names


def _unaliased(result: Any, arguments: tuple[Any, ...]) -> Any:
    """Results of an op must not share memory with its arguments, as results of a function may."""
    storages = {a.untyped_storage()._cdata for a in arguments if isinstance(a, Tensor)}

    def own(value: Any) -> Any:
        shared = isinstance(value, Tensor) and value.untyped_storage()._cdata in storages
        return value.clone() if shared else value

    return pytree.tree_map(own, result)


def _contiguous_like(value: Tensor) -> Tensor:
    return torch.empty_like(value, memory_format=torch.contiguous_format)


def _runs_on_fake_tensors(function: Function, chosen: Role) -> bool:
    from torch._subclasses.fake_tensor import FakeTensorMode

    sample = chosen.samples(torch.float32, torch.Generator().manual_seed(0))[0]
    try:
        with FakeTensorMode() as mode, torch.no_grad():
            found = function(*[mode.from_tensor(a) if isinstance(a, Tensor) else a for a in sample])
        return all(isinstance(t, torch._subclasses.FakeTensor) for t in pytree.tree_leaves(found))
    except Exception:
        return False


__all__ = ["Registered", "fingerprint", "register_pattern", "registered_patterns", "unregister_pattern"]
