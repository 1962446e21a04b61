"""After a replacement: the new value may have other strides than the old one.

Readers that only look at it differently (views, casts, pointwise operators) get their metadata anew, and an
``aten.view`` that was possible on the old strides only becomes ``aten.reshape``. A graph output keeps the strides that
the caller was promised when those were contiguous.
"""

from __future__ import annotations

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx

from .elements.fakes import metadata_mode
from .fx_access import target_of

aten = torch.ops.aten


def propagate_strides(old: torch.Tensor, new: fx.Node) -> None:
    """Bring the metadata behind ``new`` up to date, where ``new`` now stands for a value with the metadata ``old``."""
    work = [(new, old)]
    while work:
        node, before = work.pop()
        after = node.meta["val"]
        if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor) or _same(before, after):
            continue
        for user in list(node.users):
            if user.op == "output":
                _keep_contiguous(node, user, before)
            elif user.op == "call_function" and isinstance(user.target, torch._ops.OpOverload):
                stale = user.meta.get("val")
                if isinstance(stale, torch.Tensor):
                    _recompute(user)
                    work.append((user, stale))


def same_shape(old: torch.Tensor, new: torch.Tensor) -> bool:
    """The same dimensions for all values of the size symbols (a number in the place of a symbol is another shape)."""
    return len(old.shape) == len(new.shape) and all(
        a == b if isinstance(a, int) and isinstance(b, int) else sympy.expand(_expression(a) - _expression(b)) == 0
        for a, b in zip(old.shape, new.shape))


def _expression(size: int | torch.SymInt) -> sympy.Expr:
    return sympy.Integer(size) if isinstance(size, int) else size.node.expr


def _same(before: torch.Tensor, after: torch.Tensor) -> bool:
    return before.dtype == after.dtype and all(
        str(a) == str(b) for a, b in zip(before.stride(), after.stride()))


def _recompute(node: fx.Node) -> None:
    try:
        node.meta["val"] = _evaluate(node)
    except (RuntimeError, ValueError):
        if node.target not in (aten.view.default, aten._unsafe_view.default):
            raise
        node.target = aten.reshape.default
        node.meta["val"] = _evaluate(node)


def _evaluate(node: fx.Node) -> object:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    leaves = [v for v in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
    with metadata_mode(leaves):
        return target_of(node)(*args, **kwargs)


def _keep_contiguous(node: fx.Node, output: fx.Node, before: torch.Tensor) -> None:
    if not before.is_contiguous() or node.meta["val"].is_contiguous():
        return
    with node.graph.inserting_after(node):
        copy = node.graph.call_function(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
    copy.meta["val"] = _evaluate(copy)
    output.replace_input_with(node, copy)
