"""The pass on a graph that no tracer made: an ``fx.Graph`` of ATen operators, written node by node.

This is what a compiler with a front end of its own does: build ATen, give every node a fake value (``meta["val"]``),
call ``fusion_pass.rewrite``, and go on with the graph.

    python examples/hand_built_graph.py
"""

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import fusion_pass

aten = torch.ops.aten
TOKENS, KEYS, HEADS, GROUPS, DIM, RANK = 6, 10, 8, 2, 512, 64


def build() -> fx.GraphModule:
    """q [T, H, 512], kv [N, 512], sink [H], cos and sin [T, 32], weight [G, R, 4 * 512] -> [G, T, R]."""
    graph = fx.Graph()
    q, kv, sink, cos, sin, weight = (graph.placeholder(n) for n in ("q", "kv", "sink", "cos", "sin", "weight"))

    def op(target, *args, **kwargs):
        return graph.call_function(target, args, kwargs)

    # Attention: one row of keys for all heads, the sink as one more logit.
    rows = op(aten.view.default, q, [TOKENS * HEADS, DIM])
    scores = op(aten.mm.default, rows, op(aten.t.default, kv))
    scores = op(aten.mul.Tensor, op(aten.view.default, scores, [TOKENS, HEADS, KEYS]), DIM**-0.5)
    column = op(aten.expand.default, op(aten.view.default, sink, [1, HEADS, 1]), [TOKENS, HEADS, 1])
    weights = op(aten._softmax.default, op(aten.cat.default, [scores, column], -1), -1, False)
    weights = op(aten.view.default, op(aten.slice.Tensor, weights, 2, 0, KEYS), [TOKENS * HEADS, KEYS])
    o = op(aten.view.default, op(aten.mm.default, weights, kv), [TOKENS, HEADS, DIM])
    # Inverse rotation of the last 64 channels, pair by pair.
    even, odd = (op(aten.slice.Tensor, o, 2, DIM - 64 + part, DIM, 2) for part in (0, 1))
    c, s = (op(aten.unsqueeze.default, table, 1) for table in (cos, sin))
    first = op(aten.add.Tensor, op(aten.mul.Tensor, even, c), op(aten.mul.Tensor, odd, s))
    second = op(aten.sub.Tensor, op(aten.mul.Tensor, odd, c), op(aten.mul.Tensor, even, s))
    turned = op(aten.view.default, op(aten.stack.default, [first, second], -1), [TOKENS, HEADS, 64])
    o = op(aten.cat.default, [op(aten.slice.Tensor, o, 2, 0, DIM - 64), turned], -1)
    # The heads of a group together.
    o = op(aten.permute.default, op(aten.view.default, o, [TOKENS, GROUPS, HEADS // GROUPS * DIM]), [1, 0, 2])
    graph.output((op(aten.bmm.default, o, op(aten.permute.default, weight, [0, 2, 1])),))
    return fx.GraphModule(torch.nn.Module(), graph)


def main() -> fusion_pass.Report:
    """Build, rewrite, run; print the graph and return the report."""
    gen = torch.Generator().manual_seed(0)
    angles = torch.randn(TOKENS, 32, generator=gen)
    args = (torch.randn(TOKENS, HEADS, DIM, generator=gen), torch.randn(KEYS, DIM, generator=gen),
            torch.randn(HEADS, generator=gen), angles.cos(), angles.sin(),
            torch.randn(GROUPS, RANK, HEADS // GROUPS * DIM, generator=gen) * 0.02)
    module = build()
    wanted, = module(*args)
    FakeTensorProp(module, FakeTensorMode()).propagate(*args)       # shapes, strides and dtypes into meta["val"]
    report = fusion_pass.rewrite(module)
    found, = module(*args)
    print(report)
    print(module.graph)
    print(f"largest difference: {(found - wanted).abs().max():.1e}")
    return report


if __name__ == "__main__":
    main()
