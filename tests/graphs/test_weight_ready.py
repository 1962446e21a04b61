# SPDX-License-Identifier: Apache-2.0
"""Of which weights the pass says that a product may read them before the kernel in front of it is done."""

import chains
import pytest
import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd

import fusion_pass
from fusion_pass.legality import GraphFacts
from fusion_pass.models import FP8GroupedLinear

aten = torch.ops.aten
RANK = 128
WIDTH = chains.HEADS // chains.GROUPS * chains.DIM
LINEAR = FP8GroupedLinear.from_linear(torch.randn(chains.GROUPS * RANK, WIDTH), chains.GROUPS)


def projected(o, weight, scale):
    x = o.reshape(*o.shape[:2], chains.GROUPS, WIDTH)
    return torch.func.functional_call(LINEAR, {"weight": weight, "weight_scale": scale}, (x,))


def product_of(gm: fx.GraphModule) -> fx.Node:
    with torch.no_grad():
        report = fusion_pass.rewrite(gm)
    assert len(report.fused) == 1, report
    (product,) = gm.graph.find_nodes(op="call_function", target=torch.ops.fusion_pass.fp8_bgemm.default)
    return product


def is_ready(product: fx.Node) -> bool:
    assert set(product.kwargs) <= {"weight_ready"}
    return product.kwargs.get("weight_ready", False)


STACKED = torch.stack([LINEAR.weight, LINEAR.weight])
# name: (weight as it comes, weight [G, R, K] of it, whether it is known to be there)
WEIGHTS = {
    "as it comes": (LINEAR.weight, lambda w: w, True),
    "in two dimensions": (LINEAR.weight.flatten(0, 1), lambda w: w.view(chains.GROUPS, RANK, WIDTH), True),
    "one of a stack": (STACKED, lambda w: w[1], True),
    "a part of a longer one": (torch.cat([LINEAR.weight] * 2), lambda w: w[: chains.GROUPS], True),
    "turned": (LINEAR.weight.mT.contiguous(), lambda w: w.mT, False),
    "a copy, past which is read": (LINEAR.weight, torch.clone, True),
    "computed": (LINEAR.weight.float(), lambda w: w.to(torch.float8_e4m3fn), False),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_which_weights(name):
    given, to_weight, ready = WEIGHTS[name]

    def layer(q, kv, mask, sink, cos, sin, weight, scale):
        return projected(chains.rotate(chains.attention(q, kv, mask, sink), cos, sin), to_weight(weight), scale)

    args = (*chains.inputs(dtype=torch.float32)[:-1], given, LINEAR.weight_scale)
    assert is_ready(product_of(chains.raw(layer, args))) == ready


def test_a_models_buffer():
    """A weight of a module, which a compiled graph takes as an input."""

    def layer(q, kv, mask, sink, cos, sin, _):
        o = chains.rotate(chains.attention(q, kv, mask, sink), cos, sin)
        return LINEAR(o.reshape(*o.shape[:2], chains.GROUPS, WIDTH))

    assert is_ready(product_of(chains.aot(layer, chains.inputs(dtype=torch.float32))))


@pytest.mark.parametrize("written", ["weight", "other"])
def test_a_weight_that_the_graph_writes(written):
    """As Inductor has such graphs: the write stays, at the end."""

    def layer(q, kv, mask, sink, cos, sin, weight, scale, other):
        out = projected(chains.rotate(chains.attention(q, kv, mask, sink), cos, sin), weight, scale)
        target, source = (weight, other) if written == "weight" else (other, weight)
        target.copy_(source)
        return out

    found = []

    def keep(gm, _inputs):
        found.append(gm)
        return gm

    backend = aot_autograd(fw_compiler=keep, inference_compiler=keep, keep_inference_input_mutations=True)
    weight, scale = LINEAR.weight, LINEAR.weight_scale
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(layer, backend=backend)(
            *chains.inputs(dtype=torch.float32)[:-1], weight.clone(), scale, weight.clone()
        )
    assert "copy_" in found[0].code
    assert is_ready(product_of(found[0])) == (written == "other")


def test_behind_a_merge():
    """A merge may start while the kernel in front of it runs, so more than one kernel may be under way."""

    def layer(parts, lse, sink, cos, sin, weight, scale):
        top = torch.maximum(lse.amax(0), sink)
        weights = torch.exp(lse - top)
        total = weights.sum(0) + torch.exp(sink - top)
        o = (parts * weights.unsqueeze(-1)).sum(0) / total.unsqueeze(-1)
        return projected(chains.rotate(o[None], cos, sin), weight, scale)

    product = product_of(chains.raw(layer, (*chains.merge_inputs()[:-1], LINEAR.weight, LINEAR.weight_scale)))
    assert "merge" in str(product.args[0].args[0].target) and not is_ready(product)


def weight_in_a_graph() -> tuple[fx.Graph, fx.Node, fx.Node]:
    """(graph, its input, a view of that)."""
    graph = fx.Graph()
    weight = graph.placeholder("weight")
    weight.meta["val"] = LINEAR.weight
    view = graph.call_function(aten.select.int, (weight, 0, 1))
    view.meta["val"] = LINEAR.weight[1]
    return graph, weight, view


def settled(graph: fx.Graph, view: fx.Node) -> bool:
    graph.output((view,))
    return GraphFacts(graph).is_settled_input(view)


def test_who_writes():
    graph, _, view = weight_in_a_graph()
    assert settled(graph, view)

    graph, weight, view = weight_in_a_graph()
    graph.call_function(aten.copy_.default, (weight, weight))
    assert not settled(graph, view)

    graph, weight, view = weight_in_a_graph()
    graph.call_function(aten._foreach_zero_.default, ([weight],))
    assert not settled(graph, view), "written as one of a list"

    graph, weight, view = weight_in_a_graph()
    graph.call_function(aten.add.out, (view, view), {"out": weight})
    assert not settled(graph, view), "written as a keyword argument"


@pytest.mark.parametrize("reader", ["weight", "view"])
def test_readers_that_cannot_be_read(reader):
    """An operator with a graph of its own, and a Python function, may write what they are given."""
    for target in (torch.ops.higher_order.while_loop, torch.Tensor.zero_):
        graph, weight, view = weight_in_a_graph()
        graph.call_function(target, (weight if reader == "weight" else view,))
        assert not settled(graph, view)


def test_other_streams():
    """Where a graph synchronises streams, another one may fill its inputs meanwhile."""
    graph, _, view = weight_in_a_graph()

    class WaitEvent:
        namespace = "streams"
        __name__ = __module__ = __qualname__ = "wait_event"

        def __call__(self):
            raise AssertionError("never run")

    graph.call_function(WaitEvent())
    assert not settled(graph, view)
