"""A chain that was proved once holds wherever the same sub-graph stands again (the next layer, usually).

``transfer`` walks two contractions' ways back side by side. If operators, arguments, shapes and dtypes agree up to the
leaves of the proven chain, the proof carries over (it holds for all values of the leaves), and the chain is rewritten
in terms of the other nodes. A layer then costs one visit per node instead of an evaluation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx as fx

from ..fx_access import args_of
from .anchors import Anchor
from .chain_types import Chain

CONE_LIMIT = 160


def leaves_of(chain: Chain) -> set[fx.Node]:
    """The nodes at which the chain's proof starts: nothing behind them was looked at."""
    leaves = {chain.rotation.cos.node, chain.rotation.sin.node}
    if chain.weight is not None:
        leaves |= {chain.weight.codes.node, chain.weight.scales.node}
    if chain.attention is None:
        leaves.add(chain.rotation.source)
    else:
        leaves |= {node for node in nodes_in(chain.attention) if node not in chain.attention.interior
                   and node is not chain.attention.output}
        if chain.attention.gathered:    # looked behind: the proof goes on to the pool and the indices
            leaves -= {piece.rows.node for piece in chain.attention.kv}
    return leaves


def transfer(chain: Chain, anchor: Anchor) -> Chain | None:
    """The chain at ``anchor``, when its sub-graph is that of ``chain`` (which has one anchor)."""
    if len(chain.anchors) != 1:
        return None
    known = chain.anchors[0]
    mapping: dict[fx.Node, fx.Node] = {}
    if known.node.target != anchor.node.target or not _same_value(known.node, anchor.node):
        return None
    mapping[known.node] = anchor.node
    side = [i for i, a in enumerate(known.node.args) if a is known.operand]
    if not side or len(anchor.node.args) != len(known.node.args) or anchor.node.args[side[0]] is not anchor.operand:
        return None
    pairs = [(known.operand, anchor.operand)]
    if chain.weight is not None:
        pairs += [(a, b) for a, b in zip(args_of(known.node), args_of(anchor.node)) if isinstance(a, fx.Node)]
    if not _walk(pairs, leaves_of(chain), mapping):
        return None
    wanted = set(nodes_in(chain))
    if not wanted <= set(mapping):
        return None
    moved: Chain = _substitute(chain, mapping)
    moved.anchors = [anchor]
    return moved


def _walk(pairs: list[tuple[fx.Node, fx.Node]], leaves: set[fx.Node], mapping: dict[fx.Node, fx.Node]) -> bool:
    stack = list(pairs)
    while stack:
        a, b = stack.pop()
        if a in mapping:
            if mapping[a] is not b:
                return False
            continue
        if not _same_value(a, b):
            return False
        mapping[a] = b
        if a in leaves:
            continue
        if a.op != b.op or a.target != b.target or a.op != "call_function":
            return False
        if not _same_arguments(a.args, b.args, stack) or not _same_arguments(a.kwargs, b.kwargs, stack):
            return False
    return True


def _same_value(a: fx.Node, b: fx.Node) -> bool:
    x, y = a.meta.get("val"), b.meta.get("val")
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        return x.dtype == y.dtype and x.device == y.device and len(x.shape) == len(y.shape) and all(
            _same_size(m, n) for m, n in zip(x.shape, y.shape))
    return type(x) is type(y)


def _same_size(m: int | torch.SymInt, n: int | torch.SymInt) -> bool:
    if isinstance(m, int) and isinstance(n, int):
        return m == n
    if isinstance(m, int) or isinstance(n, int):
        return False
    return bool(m.node.expr == n.node.expr)


def _same_arguments(x: object, y: object, stack: list[tuple[fx.Node, fx.Node]]) -> bool:
    if isinstance(x, fx.Node):
        if not isinstance(y, fx.Node):
            return False
        if not isinstance(x.meta.get("val"), torch.Tensor) and not isinstance(x.meta.get("val"), (tuple, list)):
            return x is y           # a size or a number computed in the graph: the very same one
        stack.append((x, y))
        return True
    if isinstance(x, (list, tuple)):
        return isinstance(y, (list, tuple)) and len(x) == len(y) and all(
            _same_arguments(a, b, stack) for a, b in zip(x, y))
    if isinstance(x, dict):
        return isinstance(y, dict) and x.keys() == y.keys() and all(_same_arguments(x[k], y[k], stack) for k in x)
    if isinstance(x, (torch.SymInt, torch.SymFloat)):
        return isinstance(y, type(x)) and x.node.expr == y.node.expr
    return type(x) is type(y) and (x == y or (x != x and y != y))


def nodes_in(value: object) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from nodes_in(item)
    elif isinstance(value, Anchor):
        yield value.node
        yield value.operand
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            if item.name not in ("interior", "casts", "attention_refused", "fallbacks", "copies"):
                yield from nodes_in(getattr(value, item.name))


def _substitute(value: Any, mapping: dict[fx.Node, fx.Node]) -> Any:
    """A copy of a tree of dataclasses, tuples and sets with its nodes replaced (nodes without a counterpart only
    occur where they do not matter and are dropped or kept)."""
    if isinstance(value, fx.Node):
        return mapping.get(value, value)
    if isinstance(value, (set, frozenset)):
        return type(value)(mapping[item] for item in value if item in mapping)
    if isinstance(value, (list, tuple)):
        return type(value)(_substitute(item, mapping) for item in value)
    if isinstance(value, Anchor):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {}
        for item in dataclasses.fields(value):
            part = getattr(value, item.name)
            if item.name == "fallbacks":
                part = tuple(f for f in part if all(n in mapping for n in nodes_in(f)))
            changes[item.name] = _substitute(part, mapping)
        return dataclasses.replace(value, **changes)
    return value


def cone_signature(node: fx.Node) -> int:
    """A hash of the nearest nodes behind ``node``: equal for the same place in another layer. Only used to give up the
    same way twice."""
    order: dict[fx.Node, int] = {node: 0}
    queue = [node]
    parts: list[object] = []
    for here in queue:
        value = here.meta.get("val")
        shape = dtype = None
        if isinstance(value, torch.Tensor):
            dtype = value.dtype
            shape = tuple(s if isinstance(s, int) else str(s) for s in value.shape)
        parts.append((here.target if here.op == "call_function" else here.op, shape, dtype))
        for operand in here.all_input_nodes:
            if operand not in order and len(order) < CONE_LIMIT:
                order[operand] = len(order)
                queue.append(operand)
            parts.append(order.get(operand, -1))
    return hash(tuple(parts))
