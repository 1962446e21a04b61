"""Declared opaque ops: written out in plain torch before recognition, taken back afterwards where nothing was fused.

Writing an op out means: what it computes, in ATen ops, stands before it in the graph, and its readers read that. So a
chain through a declared op is found, proved and replaced like any other, and ``settle`` gives every op whose
written-out form is still read its readers back.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from .. import validation  # noqa: F401  (defines fusion_pass::agree)
from ..config import Config
from ..elements.moves import is_float_cast, is_move
from ..elements.numeric import Numeric, Unevaluated
from ..elements.sizes import Sizes, Unsized
from ..fx_access import args_of
from ..legality import WRITTEN_OUT, is_impure
from ..patterns.opaque import NotExpanded, OpaqueOp, declared
from .written_call import Call, read_call

aten = torch.ops.aten
PRODUCT = "fusion_pass_product"         # in the metadata of a product that reads what a fused op wrote
AGREE = torch.ops.fusion_pass.agree.default


@dataclass
class Expansion:
    """One declared op, written out: its results and what readers read instead, and all the nodes of that."""

    row: OpaqueOp
    node: fx.Node
    outputs: list[tuple[fx.Node, fx.Node]]
    nodes: list[fx.Node]
    undone: bool = False

    def __post_init__(self) -> None:
        self.inside = frozenset(self.nodes)

    def read_outside(self, node: fx.Node, live: set[fx.Node]) -> bool:
        """Does anything but this written-out form need ``node``? (To be compared with is no need: see validation.)"""
        return any(u in live and u not in self.inside and not (u.target is AGREE and u.args[1] is not node)
                   for u in node.users)


@dataclass
class Plan:
    """What to do with the declared ops of a graph, by node name (see :class:`DeclaredOps`)."""

    skipped: dict[str, str] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)


@dataclass
class DeclaredOps:
    """The declared ops of one graph.

    ``skipped``: names of nodes that are not written out, with the reason. ``kept``: names of nodes that are written out
    only so that what they read is recognised; they stay, and get what was fused before them.
    """

    graph: fx.Graph
    calls: list[tuple[fx.Node, OpaqueOp]]
    skipped: dict[str, str]
    kept: frozenset[str]
    expansions: list[Expansion] = field(default_factory=list)

    @staticmethod
    def present(graph: fx.Graph) -> list[tuple[fx.Node, OpaqueOp]]:
        """The calls of declared ops that can be written out, in graph order."""
        found = []
        rows: dict[int, OpaqueOp | None] = {}       # asked once per operator: this runs over every node of every graph
        for node in graph.nodes:
            if node.op == "call_function":
                hop = node.target is auto_functionalized or node.target is auto_functionalized_v2
                target = node.args[0] if hop else node.target
                if id(target) not in rows:
                    rows[id(target)] = declared(target)
                row = rows[id(target)]
                if row is not None and row.expand is not None:
                    found.append((node, row))
        return found

    @staticmethod
    def write_out(gm: fx.GraphModule, config: Config, plan: Plan) -> DeclaredOps:
        """Write the declared ops of ``gm`` out. ``Config.disable_rules`` may name an op (with or without namespace)."""
        calls = [(node, row.under(config.o_proj)) for node, row in DeclaredOps.present(gm.graph)]
        result = DeclaredOps(gm.graph, calls, dict(plan.skipped), frozenset(plan.kept))
        if calls:
            sizes = [s for s, _ in zip(Sizes.candidates(gm.graph), range(2))]
            for node, row in calls:
                result._write_out(node, row, sizes, config)
        return result

    def _write_out(self, node: fx.Node, row: OpaqueOp, sizes: list[Sizes], config: Config) -> None:
        if node.name in self.skipped:
            return
        if not row.rules.isdisjoint(config.disable_rules):
            self.skipped[node.name] = f"the rule {row.label or row.name!r} is switched off (disable_rules)"
            return
        try:
            self.expansions.append(_write_out(self.graph, node, row, sizes))
        except (NotExpanded, Unevaluated, Unsized) as reason:
            self.skipped[node.name] = str(reason)

    @property
    def fixed(self) -> frozenset[fx.Node]:
        """Nodes among which nothing may be replaced."""
        return frozenset(n for e in self.expansions if e.node.name in self.kept for n in e.nodes)

    def settle(self, changed: bool, plan: Plan) -> bool:
        """Give the ops that were not fused their readers back.

        False when the graph that results is not the best one: ``plan`` has become a better one, with which the caller
        starts again from the graph as it was.
        """
        if not self.expansions:
            return True
        live: set[fx.Node] = set()
        _mark_all(self.graph, live)
        for expansion in reversed(self.expansions):
            read = [new for _, new in expansion.outputs if expansion.read_outside(new, live)]
            if changed and read and all(_ends_in_fused_op(new, expansion) for new in read):
                continue
            if changed and not read:
                continue
            expansion.undone = True
            for old, new in expansion.outputs:
                new.replace_all_uses_with(old, delete_user_cb=functools.partial(_is_outside, expansion))
            _mark(expansion.node, live)
        settled = not changed or self._settled(plan)
        for expansion in self.expansions:
            expansion.node.meta.pop(WRITTEN_OUT, None)
            for node in reversed(expansion.nodes):
                if not node.users:
                    self.graph.erase_node(node)
        return settled

    def _settled(self, plan: Plan) -> bool:
        """Is nothing computed twice, and no fused op void because what reads it was taken back?"""
        live: set[fx.Node] = set()
        _mark_all(self.graph, live)
        again = False
        for expansion in self.expansions:
            suspects = expansion.nodes if expansion.undone else _equivalents(expansion)
            if any(expansion.read_outside(node, live) for node in suspects):
                plan.skipped[expansion.node.name] = "only a part of what it computes was recognised"
                again = True
        if any(n not in live and _is_fused(n) for n in self.graph.nodes):
            for name in (e.node.name for e in self.expansions if e.undone):
                if name in self.kept:
                    plan.skipped[name] = "what it reads cannot be fused without it"
                plan.kept.add(name)
                again = True
        return not again

    def changes_numbers(self, node: fx.Node) -> bool:
        """Is ``node`` part of a form that computes other numbers than the op it is written for?"""
        return any(e.row.expand is e.row.expand_fp8 and node in e.inside for e in self.expansions)

    def notes(self) -> list[str]:
        """One line per declared op and outcome, for the report."""
        undone = {e.node.name for e in self.expansions if e.undone}
        outcomes: Counter[tuple[str, str]] = Counter()
        for node, row in self.calls:
            what = f"registered pattern {row.label}" if row.label else f"declared op {row.name}"
            outcome = self.skipped.get(node.name, "")
            if not outcome and node.name in undone:
                outcome = "what it reads may be fused" if node.name in self.kept else "in no fused chain"
            outcomes[f"{what} ({' + '.join(row.roles)})", outcome] += 1
        return [f"{what}, {count}x: " + (f"left as it was ({outcome})" if outcome else "fused")
                for (what, outcome), count in outcomes.items()]


def _is_fused(node: fx.Node) -> bool:
    return (isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "fusion_pass"
            and "fusion_pass" in node.meta)


def _only_moves(node: fx.Node) -> bool:
    return is_move(node) or is_float_cast(node)


def _ends_in_fused_op(node: fx.Node, expansion: Expansion) -> bool:
    """Is ``node``, but for moves and a rounding, a fused op's result, or the product that reads one (which stays as it
    is written out when its weight is not FP8; a user's own product stays the user's)?"""
    inside = expansion.inside
    while node in inside and _only_moves(node):
        tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        if len(tensors) != 1:
            return False
        node = tensors[0]
    if node in inside:
        return PRODUCT in node.meta and not expansion.row.label
    return "fusion_pass" in node.meta


def _mark(node: fx.Node, live: set[fx.Node]) -> None:
    stack = [node]
    while stack:
        here = stack.pop()
        if here not in live:
            live.add(here)
            # A value that is only compared with (see validation) needs nothing to be kept for it.
            stack.extend(args_of(here)[1:2] if here.target is AGREE else here.all_input_nodes)


def _mark_all(graph: fx.Graph, live: set[fx.Node]) -> None:
    for node in graph.nodes:
        if is_impure(node):
            _mark(node, live)


def _equivalents(expansion: Expansion) -> list[fx.Node]:
    """Nodes that hold the op's results up to moves and roundings: reading one of them is reading the op's result.
    (Results that end in a fused op are meant to be read.)"""
    stack = [new for _, new in expansion.outputs if not _ends_in_fused_op(new, expansion)]
    seen = set()
    while stack:
        node = stack.pop()
        if node in expansion.inside and node not in seen:
            seen.add(node)
            if _only_moves(node):
                stack.extend(node.all_input_nodes)
    return [n for n in expansion.nodes if n in seen]


def _write_out(graph: fx.Graph, node: fx.Node, row: OpaqueOp, sizes: list[Sizes]) -> Expansion:
    call = read_call(node)
    _check_known(row, call, sizes)
    traced = _trace(row, call)
    nodes, results = insert_traced(graph, node, traced, call)
    outputs = []
    for old, at in call.readers:
        new = results[at] if at < len(results) else None
        if new is None or not _same_form(old, new, sizes):
            for made in reversed(nodes):
                graph.erase_node(made)
            raise NotExpanded(f"result {at} has another form than the row describes")
        outputs.append((old, new))
    for old, new in outputs:
        old.replace_all_uses_with(new)
    node.meta[WRITTEN_OUT] = True
    return Expansion(row, node, outputs, nodes)


def _check_known(row: OpaqueOp, call: Call, all_sizes: list[Sizes]) -> None:
    """Values that the row depends on must follow from the graph, for every assignment of the size symbols."""
    if row.requires is None:
        return
    for sizes in all_sizes:
        engine = Numeric(sizes, {}, None)
        values = {}
        for at in row.known:
            argument = call.arguments[at]
            values[at] = engine.values(argument, torch.arange(sizes.numel(argument)))
        shapes = [sizes.shape(a) if isinstance(a, fx.Node) and isinstance(a.meta.get("val"), torch.Tensor) else None
                  for a in call.arguments]
        reason = row.requires(shapes, values)
        if reason is not None:
            raise NotExpanded(reason)


def _trace(row: OpaqueOp, call: Call) -> fx.GraphModule:
    """The written-out form as a graph over the call's operands, traced on their fake tensors."""
    values = [n.meta["val"] for n in call.operands]

    expand = row.expand
    assert expand is not None  # or the op stays opaque

    def written_out(*operands: Any) -> Any:
        table = dict(zip(call.operands, operands))
        return call.evaluate(expand, table.__getitem__)

    mode = torch._guards.detect_fake_mode(values) or FakeTensorMode()
    with mode, enable_python_dispatcher():
        return make_fx(written_out, decomposition_table=_decompositions())(*values)


def _is_outside(expansion: Expansion, user: fx.Node) -> bool:
    return user not in expansion.inside


@functools.cache
def _decompositions() -> dict[Any, Any]:
    """Inductor's, as parts of a written-out form may stay in a graph that Inductor compiles; contractions and softmax
    keep their form, which recognition and kernels are written for."""
    from torch._inductor.decomposition import select_decomp_table

    keep = {aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten._softmax}
    return {op: rule for op, rule in select_decomp_table().items() if getattr(op, "overloadpacket", op) not in keep}


def insert_traced(graph: fx.Graph, before: fx.Node, traced: fx.GraphModule, call: Call
            ) -> tuple[list[fx.Node], list[fx.Node | None]]:
    """Copy the traced nodes; every result is a node of its own (never an operand, never another result)."""
    placeholders = [n for n in traced.graph.nodes if n.op == "placeholder"]
    table = dict(zip(placeholders, call.operands))
    nodes: list[fx.Node] = []
    results: list[fx.Node | None] = []
    trace = before.meta.get("stack_trace")
    with graph.inserting_before(before):
        for node in traced.graph.nodes:
            if isinstance(node.meta.get("val"), torch.SymInt) and node.op == "call_function":
                table[node] = _known_size(graph, before, node.meta["val"])
            if table.get(node) is not None:
                continue
            if node.op == "call_function":
                table[node] = graph.node_copy(node, table.__getitem__)
                nodes.append(table[node])
            elif node.op == "get_attr":
                raise NotExpanded("the written-out form has constants")
            elif node.op == "output":
                for result in node.args[0]:
                    new = table[result] if isinstance(result, fx.Node) else None
                    if new is not None and (new not in nodes or new in results or new.users):
                        value = new.meta["val"]
                        new = graph.call_function(aten.alias.default, (new,))
                        new.meta["val"] = value
                        nodes.append(new)
                    results.append(new)
    for node in nodes:
        node.meta.pop("stack_trace", None)
        if trace is not None:
            node.meta["stack_trace"] = trace
    return nodes, results


def _known_size(graph: fx.Graph, before: fx.Node, size: torch.SymInt) -> fx.Node | None:
    """A node that has this size and needs no intermediate tensor for it: reading a size keeps the tensor alive."""
    tensors = []
    node: fx.Node
    for node in graph.nodes:
        if node is before:
            break
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            if value.node.expr == size.node.expr and all(
                    n.op == "placeholder" or isinstance(n.meta.get("val"), torch.SymInt) for n in node.all_input_nodes):
                return node
        elif node.op == "placeholder" and isinstance(value, torch.Tensor):
            tensors.append(node)
    for node in tensors:
        for dim, length in enumerate(node.meta["val"].shape):
            if isinstance(length, torch.SymInt) and length.node.expr == size.node.expr:
                with graph.inserting_before(before):
                    read = graph.call_function(aten.sym_size.int, (node, dim))
                read.meta["val"] = length
                return read
    return None


def _same_form(old: fx.Node, new: fx.Node, sizes: list[Sizes]) -> bool:
    before, after = old.meta.get("val"), new.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor) or before.dtype != after.dtype:
        return False
    return all(s.shape(old) == s.shape(new) for s in sizes)


__all__ = ["PRODUCT", "DeclaredOps", "Expansion", "Plan", "insert_traced"]
