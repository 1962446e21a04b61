"""A graph as text that does not depend on torch's version: what is computed from what, without the layout chatter.

One line per operator that computes: a number for the value, the operator's name without overload, the values it reads
(views, casts, clones and slices are looked through), and constants that are part of the meaning. Shapes are given where
they say something: at the fused ops and the contractions.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from fusion_pass.elements.moves import CASTS, EXPANDING, SAME_ORDER, STRIDED

aten = torch.ops.aten
LOOKED_THROUGH = SAME_ORDER | STRIDED | EXPANDING | CASTS | {aten.view_as_real.default}
SAME_OP = {"_softmax": "softmax", "_to_copy": "to", "convert_element_type": "to", "_unsafe_view": "view",
           "bmm": "matmul", "mm": "matmul", "baddbmm": "matmul", "addmm": "matmul"}


def text(gm: fx.GraphModule) -> str:
    """The graph from its fused ops on; of what stands before, only what they read from where."""
    return "\n".join(_Printer(gm).lines())


class _Printer:
    def __init__(self, gm: fx.GraphModule):
        self.graph = gm.graph
        self.names: dict[fx.Node, str] = {}

    def origin(self, node: fx.Node) -> fx.Node:
        while node.op == "call_function" and node.target in LOOKED_THROUGH:
            node = node.args[0]
        return node

    def name(self, node: fx.Node) -> str:
        node = self.origin(node)
        if node not in self.names:
            if node.op in ("placeholder", "get_attr"):
                kind = "in" if node.op == "placeholder" else "const"
                self.names[node] = f"{kind}{sum(n.startswith(kind) for n in self.names.values())}"
            else:
                self.names[node] = f"%{sum(n.startswith('%') for n in self.names.values())}"
        return self.names[node]

    def lines(self) -> list[str]:
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self.name(node)
        result = []
        for node in self.graph.nodes:
            if node.op == "output":
                values = [self.name(n) for n in node.all_input_nodes]
                result.append(f"return {', '.join(values)}")
            elif node.op == "call_function" and node.target not in LOOKED_THROUGH and isinstance(
                    node.meta.get("val"), (torch.Tensor, tuple, list)):
                result.append(self.line(node))
        return result

    def line(self, node: fx.Node) -> str:
        if node.target is operator.getitem:
            return f"{self.name(node)} = {self.name(node.args[0])}[{node.args[1]}]"
        namespace, _, rest = str(node.target).partition(".")
        op = rest.partition(".")[0]
        op = SAME_OP.get(op, op)
        ours = namespace == "fusion_pass"
        reads = [self.name(n) if isinstance(n, fx.Node) else self.constant(n) for n in self.flat(node.args)]
        shape = ""
        if ours or op == "matmul":
            values = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else [node.meta["val"]]
            shape = " : " + ", ".join(self.shape(v) for v in values)
        line = f"{self.name(node)} = {'fusion_pass.' if ours else ''}{op}({', '.join(reads)})"
        return f"{line}\n   {shape}" if len(line + shape) > 118 else line + shape

    def flat(self, args: tuple) -> list:
        result = []
        for argument in args:
            if isinstance(argument, (tuple, list)):
                result.extend(self.flat(tuple(argument)))
            elif isinstance(argument, fx.Node) and isinstance(argument.meta.get("val"), (int, torch.SymInt)):
                result.append("n")
            else:
                result.append(argument)
        return result

    def constant(self, value: object) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    def shape(self, value: torch.Tensor) -> str:
        dtype = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float8_e4m3fn: "e4m3", torch.int32: "i32"}.get(
            value.dtype, str(value.dtype))
        sizes = ["T" if isinstance(size, torch.SymInt) and not size.node.is_constant() else str(size)
                 for size in value.shape]
        return f"{dtype}[{', '.join(sizes)}]"
