"""Anchors: contractions whose operand may be a rotated attention output.

Most contractions of most graphs are ruled out by looking at operator names along one chain of inputs: behind the
operand of the grouped projection stands, after moves and quantisation only, an operator that joins changed and
unchanged channels (cat, a write into a slice, a stack, a pad). No element is evaluated here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.fx as fx

from ..elements.contractions import Contraction, contraction
from ..elements.moves import CASTS, EXPANDING, SAME_ORDER, SPLITTING, STRIDED, sources
from ..elements.sizes import Sizes, Unsized
from ..fx_access import args_of
from .quant_path import CLAMPS, CONTRACTIONS, EXTREMA, QuantPath

aten = torch.ops.aten
JOINS = {aten.cat.default, aten.slice_scatter.default, aten.select_scatter.default, aten.stack.default,
         aten.copy.default, aten.index_put.default, aten.constant_pad_nd.default, aten.as_strided_scatter.default,
         aten.index_copy.default, aten._unsafe_index_put.default, aten.where.self}
# A sum or product may be a rotation over all channels, with a table that was joined.
THROUGH = {aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.addcmul.default,
           aten.polar.default, aten.complex.default} | CLAMPS | EXTREMA
PLAIN = SAME_ORDER | STRIDED | EXPANDING | CASTS | {
    aten.view.dtype, aten.view_as_real.default, aten.view_as_complex.default, aten._conj.default, aten.neg.default,
    aten.cos.default, aten.sin.default}
CHAIN_LIMIT = 64


@dataclass(frozen=True)
class Anchor:
    """A contraction and the one of its operands (as ``lhs``) that may be the rotated output."""

    contraction: Contraction

    @property
    def operand(self) -> fx.Node:
        return self.contraction.lhs

    @property
    def node(self) -> fx.Node:
        return self.contraction.node


def may_be_rotated(node: fx.Node, joined: dict[fx.Node, bool]) -> bool:
    """Does a join stand behind ``node`` after moves and (de)quantisation only? Memoised in ``joined``."""
    passed: list[fx.Node] = []
    stack, answer = [node], False
    while stack and len(passed) < CHAIN_LIMIT:
        here = stack.pop()
        if here in joined:
            if joined[here]:
                answer = True
                break
            continue
        passed.append(here)
        if here.op != "call_function":
            continue
        if here.target in JOINS:
            answer = True
            break
        if here.target in PLAIN and here.all_input_nodes:
            stack.append(here.all_input_nodes[0])
        elif here.target in THROUGH:
            stack.extend(here.all_input_nodes[:2])
        elif getattr(here.target, "__name__", "") == "getitem" and args_of(here)[0].target in SPLITTING:
            stack.append(args_of(args_of(here)[0])[0])
    if answer:
        joined[node] = True
    else:
        joined.update(dict.fromkeys(passed, False))
    return answer


def find_anchors(graph: fx.Graph, sizes: Sizes) -> Iterator[Anchor]:
    """All candidates, in graph order."""
    joined: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        if node.op != "call_function" or not (node.target in CONTRACTIONS or node.target is aten.sum.dim_IntList):
            continue
        if node.target is aten.sum.dim_IntList and node.args[0].target is not aten.mul.Tensor:
            continue
        if not any(may_be_rotated(n, joined) for n in node.all_input_nodes[:3]):
            continue
        try:
            found = contraction(node, sizes)
        except Unsized:
            continue
        if found is None or sizes.numel(node) == 0 or sizes.numel(found.lhs) == 0 or sizes.numel(found.rhs) == 0:
            continue                # nothing to compute (no tokens): no element to look at either
        for side in (found, found.swapped()):
            if may_be_rotated(side.lhs, joined):
                yield Anchor(side)


def way_back(node: fx.Node, sizes: Sizes, through: QuantPath) -> Iterator[fx.Node]:
    """The nodes on the way of the first element, from ``node`` back through moves and (de)quantisation."""
    index = torch.zeros(1, dtype=torch.int64)
    while True:
        yield node
        pieces = sources(node, index, sizes)
        if pieces is None:
            pieces = through(node, index)
        if not pieces or pieces[0].index is None:
            return
        if not isinstance(pieces[0].source, fx.Node):
            return
        node, index = pieces[0].source, pieces[0].index
