"""Mutants of attention: graphs in which one operator was changed. Whatever is still recognised must have the mutant's
own value; everything else must be refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.fx as fx
from captured import Captured, axes_of, capture, load, outputs
from test_attention import CHANNELS, HEADS, NAMES, NoView, close, recognised, replaced_value

from fusion_pass.recognise.attention_match import AttentionMatch
from fusion_pass.recognise.context import Context

aten = torch.ops.aten
PER_CASE = 20
SWAPS = {
    aten.add.Tensor: aten.sub.Tensor, aten.sub.Tensor: aten.add.Tensor, aten.mul.Tensor: aten.add.Tensor,
    aten.div.Tensor: aten.mul.Tensor, aten.exp.default: aten.exp2.default, aten.exp2.default: aten.exp.default,
    aten.amax.default: aten.amin.default, aten.maximum.default: aten.minimum.default, aten.max.dim: aten.min.dim,
    aten.logsumexp.default: aten.amax.default, aten.sigmoid.default: aten.tanh.default,
    aten.log.default: aten.log1p.default, aten.log1p.default: aten.log.default, aten.neg.default: aten.abs.default,
    aten.bitwise_not.default: aten.clone.default, aten.lt.Scalar: aten.ge.Scalar, aten.ge.Tensor: aten.lt.Tensor,
    aten.eq.Scalar: aten.ne.Scalar, aten.sum.dim_IntList: aten.amax.default, aten.bitwise_or.Tensor:
    aten.bitwise_and.Tensor,
}
Change = Callable[[fx.Graph, fx.Node], None]


def swap_operator(graph: fx.Graph, node: fx.Node) -> None:
    node.target = SWAPS[node.target]


def other_number(graph: fx.Graph, node: fx.Node) -> None:
    node.args = (node.args[0], node.args[1] * 1.25, *node.args[2:])


def other_fill(graph: fx.Graph, node: fx.Node) -> None:
    node.args = (node.args[0], node.args[1], 0.5)


def swap_branches(graph: fx.Graph, node: fx.Node) -> None:
    node.args = (node.args[0], node.args[2], node.args[1])


def other_softmax(graph: fx.Graph, node: fx.Node) -> None:
    node.args = (node.args[0], 1, *node.args[2:])


def shifted_slice(graph: fx.Graph, node: fx.Node) -> None:
    node.args = (node.args[0], node.args[1], 1, 9223372036854775807)


def after(target: object, *args: object) -> Change:
    def change(graph: fx.Graph, node: fx.Node) -> None:
        with graph.inserting_after(node):
            new = graph.call_function(target, (node, *args))
        new.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    return change


def operand_flipped(which: int, dim: int) -> Change:
    def change(graph: fx.Graph, node: fx.Node) -> None:
        with graph.inserting_before(node):
            new = graph.call_function(aten.flip.default, (node.args[which], [dim]))
        new.meta["val"] = node.args[which].meta["val"]
        node.args = tuple(new if i == which else a for i, a in enumerate(node.args))
    return change


def changes(node: fx.Node) -> Iterator[tuple[str, Change]]:
    """Changes that keep a node's shape."""
    value = node.meta.get("val")
    if node.target in SWAPS and not (node.target is aten.sum.dim_IntList and len(node.args) < 2):
        tensors = all(isinstance(a, fx.Node) for a in node.args)
        if tensors or node.target not in (aten.add.Tensor, aten.sub.Tensor):
            yield "operator", swap_operator
    if node.target in (aten.mul.Tensor, aten.div.Tensor) and isinstance(node.args[1], float):
        yield "number", other_number
    if node.target is aten.masked_fill.Scalar:
        yield "fill", other_fill
    if node.target is aten.where.self and node.args[1].meta["val"].shape == node.args[2].meta["val"].shape:
        yield "branches", swap_branches
    if node.target is aten._softmax.default:
        yield "dim", other_softmax
    if node.target is aten.slice.Tensor and node.args[2:] == (0, -1):
        yield "slice", shifted_slice
    if node.target is aten.bmm.default:
        for which, dim in ((0, 1), (0, 2), (1, 1), (1, 2), (0, 0)):
            yield f"flip {which} {dim}", operand_flipped(which, dim)
    if isinstance(value, torch.Tensor) and value.is_floating_point() and node.op == "call_function":
        yield "tanh", after(aten.tanh.default)
        yield "scaled", after(aten.mul.Tensor, 1.5)
        yield "negated", after(aten.neg.default)
        if value.dim() > 1 and value.shape[-1] > 1:
            yield "flipped", after(aten.flip.default, [value.dim() - 1])


def copied(case: Captured) -> fx.GraphModule:
    graph, mapping = fx.Graph(), {}
    graph.output(graph.graph_copy(case.module.graph, mapping))
    return fx.GraphModule(case.module, graph)


@pytest.mark.parametrize("name", ["pos_01", "pos_03", "pos_05", "pos_07", "pos_09", "pos_25", "pos_27", "pos_29",
                                  "pos_31", "pos_34", "pos_61"])
def test_mutants(name: str) -> None:
    module = load(next(n for n in NAMES if n.startswith(name)))
    case = capture(*module.make(dtype=torch.float32))
    sizes = Context.of(case.module).sizes[0]
    output, *_ = outputs(case.module, sizes, HEADS, CHANNELS)
    match = recognised(case, output, axes_of(output, sizes, HEADS, CHANNELS))
    assert isinstance(match, AttentionMatch)
    interior = [n for n in case.module.graph.nodes if n in match.interior or any(u in match.interior for u in n.users)]
    possible = [(n.name, label, change) for n in interior if n is not output for label, change in changes(n)]
    chosen = random.Random(name).sample(possible, min(PER_CASE, len(possible)))
    assert len(chosen) >= 10
    refused = right = 0
    for node_name, label, change in chosen:
        mutant = Captured(copied(case), case.inputs)
        nodes = {n.name: n for n in mutant.module.graph.nodes}
        change(mutant.module.graph, nodes[node_name])
        mutant.module.recompile()
        place = nodes[output.name]
        found = recognised(mutant, place, axes_of(place, sizes, HEADS, CHANNELS))
        if not isinstance(found, AttentionMatch):
            refused += 1
            continue
        try:
            got, want = replaced_value(mutant, found)
        except NoView:
            refused += 1        # the pass keeps the source when an operand cannot be written as a view
            continue
        assert not torch.isfinite(got).all() or close(want, got) < (2e-2 if name == "pos_29" else 1e-5), (
            f"{label} at {node_name} was recognised with another value")
        right += 1
    print(f"{name}: {refused} mutants refused, {right} recognised with their own value, of {len(chosen)}")
    assert refused + right == len(chosen) and refused > 0
