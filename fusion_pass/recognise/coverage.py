"""Was everything looked at that a replacement makes unnecessary?

Proofs evaluate samples. A source may treat one token, one head or one block apart (a loop over blocks, a write into a
slot); such a node is on the way of some elements only. So a proof counts when it has evaluated every node between its
leaves and its result.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from ..elements.sizes import Sizes
from .chain_types import Chain
from .transfer import leaves_of, nodes_in

aten = torch.ops.aten
# Operators that read the shape of their first operand, not its values.
_FACTORIES = {
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default,
    aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default, aten.fill.Scalar,
}
_SHAPE_ONLY = _FACTORIES | {aten.copy.default}


def unseen(chain: Chain, sizes: Sizes) -> list[fx.Node]:
    """Nodes between the leaves of ``chain`` and its result that no evaluation has looked at."""
    leaves = leaves_of(chain)
    if chain.attention is not None:
        # Loads that a gathered form takes over are no leaves any more, but were examined as such.
        leaves |= {node for node in nodes_in(chain.attention) if node is not chain.attention.output}
        leaves |= chain.attention.copies
    stack = [chain.rotation.node]
    if chain.quantisation is not None and chain.quantisation.scales is not None:
        stack.append(chain.quantisation.scales.node)
    passed: set[fx.Node] = set()
    missing = []
    while stack:
        node = stack.pop()
        if node in passed or node in leaves or node.op != "call_function" or _is_empty(node, sizes):
            continue
        passed.add(node)
        if isinstance(node.meta.get("val"), torch.Tensor) and node not in sizes.seen:
            missing.append(node)
        stack.extend(_read(node))
    return missing


def _is_empty(node: fx.Node, sizes: Sizes) -> bool:
    """A tensor without elements (the first state of a cache, joined with the first keys) has nothing to look at."""
    return isinstance(node.meta.get("val"), torch.Tensor) and sizes.numel(node) == 0


def _read(node: fx.Node) -> list[fx.Node]:
    """The operands whose values ``node`` reads; tensors that are made in the graph from nothing are constants."""
    operands = node.all_input_nodes
    if node.target in _SHAPE_ONLY:
        operands = operands[1:]
    return [n for n in operands if n.all_input_nodes and n.target not in _FACTORIES]
