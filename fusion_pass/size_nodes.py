"""Sizes that a graph reads from intermediate values, read from its inputs instead.

A tracer writes ``sym_size(value, 0)`` where the source asked a value for its shape. That would keep the value alive,
and with it all that a replacement was to make unnecessary.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx

aten = torch.ops.aten


def read_sizes_from_inputs(graph: fx.Graph) -> None:
    """Redirect the readers of every size that some graph input (or an integer input) has as well."""
    known: dict[sympy.Expr, tuple[fx.Node, int | None]] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "placeholder":
            break
        if isinstance(value, torch.SymInt):
            known[value.node.expr] = (node, None)
        elif isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt):
                    known.setdefault(size.node.expr, (node, dim))
    if not known:
        return
    first = next(node for node in graph.nodes if node.op != "placeholder")
    writer = _Writer(graph, first, known)
    for node in list(graph.nodes):
        if node.target is not aten.sym_size.int or node.args[0].op == "placeholder":
            continue
        value = node.meta.get("val")
        same = writer.node(value.node.expr) if isinstance(value, torch.SymInt) else None
        if isinstance(same, fx.Node):
            node.replace_all_uses_with(same)
            graph.erase_node(node)


class _Writer:
    """Writes products and sums of known sizes at the top of the graph."""

    def __init__(self, graph: fx.Graph, before: fx.Node, known: dict[sympy.Expr, tuple[fx.Node, int | None]]):
        self.graph, self.before, self.known = graph, before, known
        self._made: dict[sympy.Expr, fx.Node] = {}

    def node(self, expr: sympy.Expr) -> fx.Node | int | None:
        """A node (or number) with the value of ``expr``, or None when it is made of other things."""
        if expr.is_Integer:
            return int(expr)
        if expr not in self._made:
            made: Any
            if expr in self.known:
                source, dim = self.known[expr]
                made = source if dim is None else self._call(aten.sym_size.int, source, dim)
            elif expr.is_Add or expr.is_Mul:
                parts = [self.node(part) for part in expr.args]
                if None in parts:
                    return None
                target = operator.add if expr.is_Add else operator.mul
                made = parts[0]
                for part in parts[1:]:
                    made = self._call(target, made, part)
            else:
                return None
            self._made[expr] = made
        return self._made[expr]

    def _call(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(target, args)
        values = fx.map_arg(args, lambda n: n.meta["val"])
        node.meta["val"] = values[0].shape[values[1]] if target is aten.sym_size.int else target(*values)
        return node
