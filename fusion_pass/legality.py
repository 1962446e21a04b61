"""Is a replacement allowed? Nobody else may need what it makes unnecessary, nothing may be mutated underneath it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.fx as fx

# Marks a declared op whose written-out form is read instead (see recognise.declared): no reader, whatever it reads.
WRITTEN_OUT = "fusion_pass_written_out"


def is_metadata_check(node: fx.Node) -> bool:
    """torch.export's check that a value computed in the graph has the dtype it was traced with: it needs the value only
    as long as somebody else does."""
    return (node.op == "call_function" and node.target is torch.ops.aten._assert_tensor_metadata.default
            and not node.users and node.args[0].op == "call_function")


def drop_needless_checks(graph: fx.Graph) -> None:
    """Erase the metadata checks of values that nobody else reads, so that the values can go."""
    live = live_nodes(graph, ())
    for node in list(graph.nodes):
        if is_metadata_check(node) and node.args[0] not in live:
            graph.erase_node(node)


def is_impure(node: fx.Node) -> bool:
    """Must stay whether or not its value is used."""
    if is_metadata_check(node):
        return False
    return node.op in ("output", "placeholder") or node.is_impure()


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
