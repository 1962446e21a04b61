"""Is a replacement allowed? Nobody else may need what it makes unnecessary, nothing may be mutated underneath it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.fx as fx

from .fx_access import args_of

# Marks a declared op whose written-out form is read instead (see recognise.declared): no reader, whatever it reads.
WRITTEN_OUT = "fusion_pass_written_out"
aten = torch.ops.aten
_METADATA_CHECK = aten._assert_tensor_metadata.default
# Views that no compiler turns into a copy where they and their input are contiguous.
_VIEWS = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.squeeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.unsqueeze.default, aten.select.int, aten.slice.Tensor, aten.alias.default,
    aten.detach.default, aten.permute.default, aten.transpose.int, aten.t.default,
}


def is_metadata_check(node: fx.Node) -> bool:
    """torch.export's check that a value computed in the graph has the dtype it was traced with: it needs the value only
    as long as somebody else does."""
    return (node.op == "call_function" and node.target is _METADATA_CHECK
            and not node.users and args_of(node)[0].op == "call_function")


def drop_needless_checks(graph: fx.Graph) -> None:
    """Erase the metadata checks of values that nobody else reads, so that the values can go."""
    checks = [n for n in graph.find_nodes(op="call_function", target=_METADATA_CHECK) if is_metadata_check(n)]
    if not checks:
        return
    live = live_nodes(graph, ())
    for node in checks:
        if node.args[0] not in live:
            graph.erase_node(node)


class Purity:
    """Which nodes must stay whether or not their value is used (torch's own rule), asked once per operator: it is a
    property of the overload, and asking every node of a graph costs more than all else that is linear in nodes."""

    def __init__(self) -> None:
        self.impure_overloads: dict[torch._ops.OpOverload, bool] = {}

    def is_impure(self, node: fx.Node) -> bool:
        if node.op in ("output", "placeholder"):
            return True
        if not isinstance(node.target, torch._ops.OpOverload):
            return node.is_impure()
        known = self.impure_overloads.get(node.target)
        if known is None:
            known = self.impure_overloads[node.target] = node.is_impure()
        return known


def is_impure(node: fx.Node) -> bool:
    """Must stay whether or not its value is used."""
    return not is_metadata_check(node) and Purity().is_impure(node)


def live_nodes(graph: fx.Graph, cut: Iterable[fx.Node], needed: Iterable[fx.Node] = ()) -> set[fx.Node]:
    """Nodes that are still needed when the values of ``cut`` come from elsewhere and ``needed`` are read."""
    cut = set(cut)
    purity = Purity()
    stack = [n for n in graph.nodes if purity.is_impure(n) and not is_metadata_check(n)] + list(needed)
    live: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node in live:
            continue
        live.add(node)
        if node not in cut:
            stack.extend(n for n in node.all_input_nodes if n not in live)
    return live


class GraphFacts:
    """What legality asks about a graph as it came, computed once: the order of its nodes, which of them are needed at
    all, and what is written in place. Every chain is then judged by its own neighbourhood, so the cost of a graph is
    linear in its chains."""

    def __init__(self, graph: fx.Graph):
        self.order = {node: number for number, node in enumerate(graph.nodes)}
        self.live = live_nodes(graph, ())
        self.writes = [(node, value) for node in graph.nodes for value in _written(node)]
        self.has_streams = any(getattr(node.target, "namespace", "") == "streams" for node in graph.nodes)

    def position(self, node: fx.Node) -> int:
        """Place in the graph; nodes that a replacement has put there since count as earlier than all others."""
        return self.order.get(node, -1)

    def between(self, source: fx.Node, node: fx.Node) -> set[fx.Node]:
        """Nodes (both ends excluded) that lie on a way from ``source`` to ``node``."""
        first = self.position(source)
        behind, stack = set(), [n for n in node.all_input_nodes if n is not source]
        while stack:
            here = stack.pop()
            if here in behind or here is source or self.position(here) <= first:
                continue
            behind.add(here)
            stack.extend(here.all_input_nodes)
        reached = {source}
        for here in sorted(behind, key=self.position):
            if any(n in reached for n in here.all_input_nodes):
                reached.add(here)
        return reached - {source}

    def outside_reader(self, node: fx.Node, inside: set[fx.Node]) -> fx.Node | None:
        """A needed reader of ``node`` that is not in ``inside``."""
        return next((u for u in node.users if u not in inside and u in self.live and not is_metadata_check(u)), None)

    def mutated_input(self, nodes: set[fx.Node], before: fx.Node) -> fx.Node | None:
        """An in-place operator on one of ``nodes`` that runs before ``before``, or None. (In functional graphs the
        only mutations are copies into graph inputs at the end.)"""
        limit = self.position(before)
        return next((node for node, value in self.writes if value in nodes and self.position(node) < limit), None)

    def is_settled_input(self, node: fx.Node) -> bool:
        """Whether ``node`` is a contiguous view of a graph input (or constant) that nothing in this graph writes, and
        that other streams do not fill while the graph runs: its values are in memory before the first kernel starts.

        Who cannot be read counts as a writer: operators that hold other graphs, and Python functions.
        """
        root = node
        while root.target in _VIEWS and _is_contiguous(root):
            root = args_of(root)[0]
        if root.op not in ("placeholder", "get_attr") or not _is_contiguous(root):
            return False
        if self.has_streams or any(value is root for _, value in self.writes):
            return False
        stack = [root]
        while stack:
            for user in stack.pop().users:
                if user.op == "output":
                    continue
                if not isinstance(user.target, torch._ops.OpOverload):
                    return False
                if user.target.is_view:
                    stack.append(user)
        return True

    def mutation(self) -> fx.Node | None:
        """The first in-place operator on an intermediate value: such a graph is not functional and is left alone."""
        return next((node for node, value in self.writes if value.op == "call_function"), None)


def _is_contiguous(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_contiguous()


def _written(node: fx.Node) -> list[fx.Node]:
    """The operands that ``node`` writes in place."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or (
            not node.target._schema.is_mutable):
        return []
    written: list[fx.Node] = []
    for number, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[number] if number < len(node.args) else node.kwargs.get(argument.name)
            fx.map_arg(given, written.append)
    return written
