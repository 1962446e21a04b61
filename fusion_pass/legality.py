"""Is a replacement allowed? Nobody else may need what it makes unnecessary, nothing may be mutated underneath it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.fx as fx

# Marks a declared op whose written-out form is read instead (see recognise.declared): no reader, whatever it reads.
WRITTEN_OUT = "fusion_pass_written_out"


def is_impure(node: fx.Node) -> bool:
    """Must stay whether or not its value is used."""
    return node.op in ("output", "placeholder") or (node.is_impure() and not is_assertion(node))


def is_assertion(node: fx.Node) -> bool:
    """A statement of export about a tensor's dtype and layout: it holds at compile time, and needs no value."""
    return node.target is torch.ops.aten._assert_tensor_metadata.default


def drop_assertions(graph: fx.Graph) -> None:
    """Take such statements away where nothing else reads the tensor: they would keep its computation alive."""
    live = live_nodes(graph, ())
    for node in reversed(list(graph.nodes)):
        if is_assertion(node) and node not in live and not any(n in live for n in node.all_input_nodes):
            graph.erase_node(node)


def live_nodes(graph: fx.Graph, cut: Iterable[fx.Node], needed: Iterable[fx.Node] = ()) -> set[fx.Node]:
    """Nodes that are still needed when the values of ``cut`` come from elsewhere and ``needed`` are read."""
    cut = set(cut)
    stack = [n for n in graph.nodes if is_impure(n)] + list(needed)
    live: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node in live:
            continue
        live.add(node)
        if node not in cut:
            stack.extend(n for n in node.all_input_nodes if n not in live)
    return live


def mutated_input(nodes: Iterable[fx.Node], before: fx.Node) -> fx.Node | None:
    """An in-place operator on one of ``nodes`` that runs before ``before``, or None.

    In functional graphs the only mutations are copies into graph inputs at the end.
    """
    watched = set(nodes)
    graph = before.graph
    for node in graph.nodes:
        if node is before:
            return None
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and (
                node.target._schema.is_mutable):
            for argument, value in zip(node.target._schema.arguments, node.args):
                info = argument.alias_info
                if info is not None and info.is_write and value in watched:
                    return node
    return None


def mutates(graph: fx.Graph) -> fx.Node | None:
    """The first in-place operator on an intermediate value: such a graph is not functional and is left alone."""
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and (
                node.target._schema.is_mutable):
            for argument, value in zip(node.target._schema.arguments, node.args):
                info = argument.alias_info
                if info is not None and info.is_write and isinstance(value, fx.Node) and value.op == "call_function":
                    return node
    return None
