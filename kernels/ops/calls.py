# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-calls
"""Runs one call of an op: validation and choice of a kernel as remembered, then a replay, a launch or the reference."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..modes import Modes, current, using
from . import decisions, dispatch
from .checks import check_out

if TYPE_CHECKING:
    from .registry import OpSpec


def unpack(outs: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    """The result of an op with these outputs."""
    return outs[0] if len(outs) == 1 else outs


def _under(how: Modes) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if how is current() else using(how)


def compute(spec: OpSpec, args: tuple[Any, ...], how: Modes) -> Any:
    """The results of ``spec`` for complete arguments under the modes ``how``."""
    key, addresses = decisions.signature(spec.name, args, how)
    decision = decisions.recall(key)
    if decision is not None:
        if how.check_inputs and spec.check_values is not None:
            spec.check_values(*args)
        plan = decision.plan_for(addresses)
        if plan is not None:
            return plan.replay(args, addresses)
    with _under(how):
        if decision is None:
            decision = decisions.remember(key, _decide(spec, args, how))
        if decision.launcher is None:
            return spec.reference(*args)
        outs = spec.empty(*args)
        if outs[0].numel():
            decision.run(outs, args)
        return unpack(outs)


def _decide(spec: OpSpec, args: tuple[Any, ...], how: Modes) -> dispatch.Launcher | None:
    """Validate the arguments, read their values where asked to, and choose a kernel (None: the reference)."""
    spec.check(*args)
    launcher = dispatch.select(spec.name, args)
    if how.check_inputs and spec.check_values is not None:
        spec.check_values(*args)
    return launcher


def compute_into(spec: OpSpec, args: tuple[Any, ...], outs: tuple[Tensor, ...], how: Modes) -> None:
    """:func:`compute` into tensors of the caller's, which are checked."""
    everything = (*args, *outs)
    key, addresses = decisions.signature(spec.into, everything, how)
    decision = decisions.recall(key)
    if decision is not None and decision.launcher is not None:
        if how.check_inputs and spec.check_values is not None:
            spec.check_values(*args)
        given = len(addresses) - len(outs)
        plan = decision.plan_for(addresses[:given])
        if plan is not None:
            plan.replay(args, addresses[:given], outs)
            return
        with _under(how):
            decision.run(outs, args)
        return
    with _under(how):
        launcher = _decide(spec, args, how)
        expected = spec.empty(*(_meta(a) for a in args))
        for name, out, like in zip(spec.outputs, outs, expected):
            check_out(spec.name, name, out, like)
        if launcher is not None and all(out.is_contiguous() for out in outs):
            if outs[0].numel():
                decisions.remember(key, launcher).run(outs, args)
            return
        result = compute(spec, args, how)
    for out, value in zip(outs, result if len(outs) > 1 else (result,)):
        out.copy_(value)


def _meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


def autograd_kernel(op: Any, impl: Callable[..., Any]) -> Callable[..., Any]:
    """What runs for the overload ``op`` at the dispatch key Autograd (with the key set): ``impl`` itself wherever no
    gradient is asked for and nothing but the backend's kernel would follow; a node that refuses to run backward
    otherwise.

    ``torch.library.register_autograd`` goes through the dispatcher once more for every call, which costs as much host
    time as a launch.
    """
    below, keys = torch._C._after_autograd_keyset, torch._C.DispatchKey
    backends = sum(torch._C.DispatchKeySet(key).raw_repr() for key in (keys.CUDA, keys.ADInplaceOrView))
    backends |= torch._C.DispatchKeySet(keys.CPU).raw_repr()
    plain: dict[int, bool] = {}  # by key set

    def redispatch(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & below, *args, **kwargs)

    class Refusing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keyset: Any, kwargs: Any, *args: Any) -> Any:
            return redispatch(keyset, args, kwargs)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> None:
            refuse_backward(op.name())

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            return Refusing.apply(keyset, kwargs, *args)
        number = keyset.raw_repr()
        direct = plain.get(number)
        if direct is None:
            direct = plain[number] = (keyset & below).raw_repr() & ~backends == 0
        return impl(*args, **kwargs) if direct else redispatch(keyset, args, kwargs)

    return kernel


def refuse_backward(name: str) -> None:
    """Raise NotImplementedError: the op of this qualified name has no backward."""
    raise NotImplementedError(
        f"{name} has no backward: it is an inference op. Run under torch.no_grad(), or keep this graph unfused (the "
        f"pass does so for graphs that need gradients)."
    )
