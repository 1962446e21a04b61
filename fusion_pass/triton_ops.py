"""Triton ops that are declared: kept whole until the pass has seen them.

``torch.library.triton_op`` (transformers' finegrained-fp8 kernels are such) is taken apart while AOTAutograd traces, so
that a compiler sees the Triton kernel; what the op *means* is lost with that. Where a graph calls a declared one, its
triton ops stay whole until the pass is done, and those that are left are taken apart then.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from . import compat
from .fx_access import target_of
from .patterns.opaque import declared

log = logging.getLogger(__name__)
_kept: contextvars.ContextVar[bool] = contextvars.ContextVar("fusion_pass_triton_ops_kept", default=False)


def is_triton_op(target: Any) -> bool:
    """Was this operator defined by ``torch.library.triton_op``?"""
    return isinstance(target, torch._ops.OpOverload) and target._schema.name in compat.triton_op_names()


@contextlib.contextmanager
def kept_whole(gm: fx.GraphModule, inputs: Sequence[Any]) -> Iterator[None]:
    """While AOTAutograd traces ``gm`` for inference: triton ops arrive at the pass as they are, if a declared one is
    among them."""
    if torch.is_grad_enabled() and any(isinstance(i, torch.Tensor) and i.requires_grad for i in inputs):
        yield
        return
    graphs = [m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)]
    if not any(is_triton_op(n.target) and declared(n.target) is not None for g in graphs for n in g.nodes):
        yield
        return
    token = _kept.set(True)
    try:
        with compat.triton_op_decomposition(False):
            yield
    finally:
        _kept.reset(token)


def take_apart(gm: fx.GraphModule) -> None:
    """After the pass: what :func:`kept_whole` kept becomes what it would have been, calls of Triton kernels."""
    if not _kept.get():
        return
    left = [node for node in gm.graph.nodes if node.op == "call_function" and is_triton_op(node.target)]
    for node in left:
        try:
            _take_apart(gm.graph, node)
        except Exception:       # a call of the op is right as well, only opaque to the compiler
            log.debug("triton op %s stays whole", node.name, exc_info=True)
    if left:
        gm.graph.eliminate_dead_code()
        gm.recompile()


def _take_apart(graph: fx.Graph, node: fx.Node) -> None:
    from torch._dispatch.python import enable_python_dispatcher
    from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._python_dispatch import _disable_current_modes

    from .recognise.declared import insert_traced
    from .recognise.written_call import read_call

    call = read_call(node)

    def run(*operands: Any) -> Any:
        def as_tuple(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            found = target_of(node)(*args, **kwargs)
            return found if isinstance(found, tuple) else (found,)
        return call.evaluate(as_tuple, dict(zip(call.operands, operands)).__getitem__)

    values = [n.meta["val"] for n in call.operands]
    mode = torch._guards.detect_fake_mode(values)
    with _disable_current_modes(), torch.no_grad(), compat.triton_op_decomposition(True):
        with mode or contextlib.nullcontext(), enable_python_dispatcher():
            traced = make_fx(dispatch_functionalize(run, FunctionalTensorMode()))(*values)
    _, results = insert_traced(graph, node, traced, call)
    for old, at in call.readers:
        new = results[at]
        if new is not None:
            old.replace_all_uses_with(new)
