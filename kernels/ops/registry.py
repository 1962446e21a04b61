# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-calls
"""Turns an :class:`OpSpec` into a registered PyTorch op: schema, fake, default implementation and out-variant.

One Python implementation (:mod:`.calls`) serves every device (dispatch key CompositeExplicitAutograd): it validates,
asks :mod:`.dispatch` for a kernel, and falls back to the pure-torch reference. Definitions are kept alive by
``torch.library`` itself, and a name that is already defined is left alone, so importing this package again (under its
second name from a source checkout, or after a reload) is harmless.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..modes import Modes, current, modes_of
from . import calls
from .checks import check_out

NAMESPACE = "fusion_pass"


@dataclass(frozen=True)
class OpSpec:
    """Everything that defines one op.

    ``arguments`` is the schema's argument list; ``outputs`` names its results (one or two tensors). ``check``,
    ``empty`` and ``reference`` take exactly these arguments: ``check`` raises ValueError or TypeError and must accept
    symbolic sizes, ``empty`` returns the tuple of uninitialised outputs, ``reference`` returns the result.

    ``modes`` names the fields of :class:`fusion_pass.kernels.modes.Modes` that the op takes as further keyword-only
    arguments. ``check_values`` (for an op with the mode ``check_inputs``) takes the arguments and reads real values.
    """

    name: str
    arguments: str
    outputs: tuple[str, ...]
    check: Callable[..., None]
    empty: Callable[..., tuple[Tensor, ...]]
    reference: Callable[..., Any]
    modes: tuple[str, ...] = ()
    check_values: Callable[..., None] | None = None

    @property
    def schema_arguments(self) -> str:
        """The whole argument list of the functional overload."""
        named = ", ".join(f"bool {name}=False" for name in self.modes)
        return f"{self.arguments}, *, {named}" if named else self.arguments

    def take_modes(self, kwargs: dict[str, Any]) -> Modes:
        """Remove the modes from ``kwargs`` and return them; those of the surrounding call where none is on."""
        given = {name: kwargs.pop(name) for name in self.modes if name in kwargs}
        return modes_of(**given) if any(given.values()) else current()

    @cached_property
    def into(self) -> str:
        """Name of the out-variant."""
        return f"{self.name}.out"

    @cached_property
    def signature(self) -> inspect.Signature:
        return inspect.signature(self.reference)

    @cached_property
    def defaults(self) -> tuple[Any, ...]:
        """Defaults of the trailing arguments, aligned to the end of the argument list."""
        given = (p.default for p in self.signature.parameters.values())
        return tuple(value for value in given if value is not inspect.Parameter.empty)

    @cached_property
    def arity(self) -> int:
        return len(self.signature.parameters)

    def complete(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Positional arguments with every default filled in (the dispatcher drops trailing defaults)."""
        if kwargs:
            bound = self.signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return bound.args
        missing = self.arity - len(args)
        return args if missing == 0 else (*args, *self.defaults[len(self.defaults) - missing :])


SPECS: dict[str, OpSpec] = {}
_fragments: list[torch.library.Library] = []  # a library's registrations go with it


def _register_autograd(name: str, impl: Callable[..., Any]) -> None:
    try:
        kernel = calls.autograd_kernel(getattr(getattr(torch.ops, NAMESPACE), name).default, impl)
    except AttributeError:  # a torch that names its dispatch keys in another way
        qualname = f"{NAMESPACE}::{name}"
        torch.library.register_autograd(qualname, lambda ctx, *grads: calls.refuse_backward(qualname))
        return
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    _fragments.append(library)
    library.impl(name, kernel, "Autograd", with_keyset=True)


def register(spec: OpSpec) -> OpSpec:
    """Register ``spec`` as ``fusion_pass::<name>`` and ``fusion_pass::<name>.out``; returns it."""
    SPECS[spec.name] = spec
    qualname = f"{NAMESPACE}::{spec.name}"
    if hasattr(getattr(torch.ops, NAMESPACE), spec.name):
        return spec
    tags = (torch.Tag.pt2_compliant_tag,)
    result = "Tensor" if len(spec.outputs) == 1 else "(" + ", ".join(["Tensor"] * len(spec.outputs)) + ")"
    torch.library.define(qualname, f"({spec.schema_arguments}) -> {result}", tags=tags)

    def default(*args: Any, **kwargs: Any) -> Any:
        how = spec.take_modes(kwargs) if kwargs else current()
        return calls.compute(spec, spec.complete(args, kwargs), how)

    def fake(*args: Any, **kwargs: Any) -> Any:
        spec.take_modes(kwargs)
        args = spec.complete(args, kwargs)
        spec.check(*args)
        return calls.unpack(spec.empty(*args))

    torch.library.impl(qualname, "default", default)
    torch.library.register_fake(qualname, fake)
    _register_autograd(spec.name, default)

    outs = ", ".join(f"Tensor({'abc'[i]}!) {name}" for i, name in enumerate(spec.outputs))
    # Without torch.Tag.out, by which Inductor of torch 2.13 would call the out-variant itself: it then passes all
    # tensors before all other arguments (a None between two tensors shifts them), leaves out a buffer that nobody
    # reads, and in C++ (AOTInductor) calls a C function that only torch's own ops have.
    results = ", ".join(f"Tensor({'abc'[i]}!)" for i in range(len(spec.outputs)))
    results = results if len(spec.outputs) == 1 else f"({results})"
    torch.library.define(
        f"{qualname}.out",
        f"({spec.schema_arguments}{', ' if spec.modes else ', *, '}{outs}) -> {results}",
        tags=tags,
    )

    def into(*args: Any, **kwargs: Any) -> Any:
        given = tuple(kwargs.pop(name) for name in spec.outputs)
        how = spec.take_modes(kwargs) if kwargs else current()
        calls.compute_into(spec, spec.complete(args, kwargs), given, how)
        return calls.unpack(given)

    def fake_into(*args: Any, **kwargs: Any) -> Any:
        given = tuple(kwargs.pop(name) for name in spec.outputs)
        spec.take_modes(kwargs)
        args = spec.complete(args, kwargs)
        spec.check(*args)
        for name, out, like in zip(spec.outputs, given, spec.empty(*args)):
            check_out(spec.name, name, out, like)
        return calls.unpack(given)

    torch.library.impl(f"{qualname}.out", "default", into)
    torch.library.register_fake(f"{qualname}.out", fake_into)
    return spec
