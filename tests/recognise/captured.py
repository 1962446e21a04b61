"""Graphs of the corpus cases with their inputs, and the node that holds a case's attention output."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
import types
from dataclasses import dataclass

import torch
import torch.fx as fx
from torch._functorch.aot_autograd import aot_module_simplified

from fusion_pass.elements.contractions import contraction
from fusion_pass.elements.layouts import Axis, row_major
from fusion_pass.elements.moves import CASTS, sources
from fusion_pass.elements.sizes import Sizes
from fusion_pass.recognise.attention_match import OutputAxes
from fusion_pass.recognise.descent import is_pointwise, is_tensor

CASES = pathlib.Path(__file__).resolve().parents[1] / "corpus" / "cases"


def load(name: str) -> types.ModuleType:
    """The corpus case ``name``, importable under its own name (Dynamo looks modules up)."""
    spec = importlib.util.spec_from_file_location(name, CASES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@dataclass
class Captured:
    """An AOT graph and the inputs that it was called with."""

    module: fx.GraphModule
    inputs: list[object]


def capture(fn, args: tuple, dynamic: bool | None = False) -> Captured:
    """The inference graph of ``fn`` as AOTAutograd hands it to a compiler."""
    found: list[Captured] = []

    def compiler(module: fx.GraphModule, example: list[object]):
        def inner(module: fx.GraphModule, example: list[object]):
            def run(inputs: list[object]):
                found.append(Captured(module, [i.clone() if isinstance(i, torch.Tensor) else i for i in inputs]))
                return module.forward(*inputs)
            run._boxed_call = True
            return run
        return aot_module_simplified(module, example, fw_compiler=inner)

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(fn, backend=compiler, fullgraph=True, dynamic=dynamic)(*args)
    return found[0]


_SCALING = {"mul", "div", "clamp", "clamp_min", "clamp_max", "minimum", "maximum", "reciprocal"}


def _way_back(node: fx.Node, index: torch.Tensor, sizes: Sizes, heads: int, channels: int) -> fx.Node | None:
    """The furthest node with a heads and a channels dimension that an element comes from, through moves, casts and
    (de)quantisation."""
    best = None
    while True:
        shape = sizes.shape(node) if is_tensor(node) else ()
        if channels in shape and heads in shape:
            best = node
        pieces = sources(node, index, sizes)
        if pieces is not None and len(pieces) == 1 and isinstance(pieces[0].source, fx.Node):
            node, index = pieces[0].source, pieces[0].index
        elif node.target in CASTS:
            node = node.args[0]
        elif best is None and is_pointwise(node) and str(node.target).split(".")[1] in _SCALING:
            whole = [a for a in node.args if is_tensor(a) and sizes.numel(a) == sizes.numel(node)]
            if len(whole) != 1:
                return best
            node = whole[0]
        else:
            return best


def outputs(module: fx.GraphModule, sizes: Sizes, heads: int, channels: int) -> list[fx.Node]:
    """Nodes that hold what the grouped projection multiplies: channel 0 of head 0 is untouched by the rotation."""
    found: list[fx.Node] = []
    for node in module.graph.nodes:
        product = contraction(node, sizes) if node.op == "call_function" else None
        if product is None or product.extent % channels or product.extent < 2 * channels:
            continue
        zero = torch.zeros(1, dtype=torch.int64)
        for side in (product, product.swapped()):
            index, _ = side.indices(zero, zero)
            output = _way_back(side.lhs, index.flatten(), sizes, heads, channels)
            if output is not None and output.op == "call_function" and output not in found:
                found.append(output)
    return found


def axes_of(output: fx.Node, sizes: Sizes, heads: int, channels: int) -> OutputAxes:
    """Axes of an output whose dimensions are tokens, heads and channels (the last of each size)."""
    shape = sizes.shape(output)
    axes = [Axis(size, stride, None if isinstance(length, int) else (output, dim)) for dim, (size, stride, length) in
            enumerate(zip(shape, row_major(shape), output.meta["val"].shape))]
    channel = max(d for d, size in enumerate(shape) if size == channels)
    head = max(d for d, size in enumerate(shape) if size == heads and d != channel)
    tokens = [a for d, a in enumerate(axes) if d not in (channel, head) and a.size != 1]
    return OutputAxes(tuple(tokens), axes[head], axes[channel])


class Recorder(fx.Interpreter):
    """Runs a graph and keeps every node's value."""

    def __init__(self, module: fx.GraphModule):
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[fx.Node, object] = {}

    def run_node(self, n: fx.Node) -> object:
        self.values[n] = value = super().run_node(n)
        if isinstance(value, torch.Tensor):
            self.values[n] = value.clone()
        return value


def node_values(module: fx.GraphModule, inputs: list[object]) -> dict[fx.Node, object]:
    """The value of every node of a graph."""
    recorder = Recorder(module)
    with torch.no_grad():
        recorder.run(*[i.clone() if isinstance(i, torch.Tensor) else i for i in inputs])
    return recorder.values
