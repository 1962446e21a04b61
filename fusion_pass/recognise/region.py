"""The nodes between scores and output, and what they read from outside."""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

from ..elements.moves import sources
from ..elements.numeric import evaluable
from ..elements.sizes import Sizes
from ..fx_access import args_of
from .context import Context
from .descent import is_pointwise, is_tensor

aten = torch.ops.aten
# Their operand gives a shape, not a value.
FACTORIES = {aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.new_zeros.default,
             aten.new_ones.default, aten.new_full.default, aten.empty_like.default, aten.new_empty.default}


def dependents(output: fx.Node, targets: set[fx.Node], cut: set[fx.Node], context: Context) -> set[fx.Node]:
    """The nodes between ``targets`` and ``output`` (both included): whatever depends on a target. Nothing is looked
    for behind a target or a node of ``cut``."""
    first = min(context.order(t) for t in targets)
    region, work = set(), [output]
    while work:
        node = work.pop()
        if node in region:
            continue
        region.add(node)
        if node not in targets and node not in cut:
            work.extend(n for n in node.all_input_nodes if context.order(n) >= first)
    result = set(targets) & region
    for node in sorted(region, key=context.order):
        if node not in targets and node not in cut and any(n in result for n in node.all_input_nodes):
            result.add(node)
    return result


def constant_only(node: fx.Node, limit: int = 200) -> bool:
    """Whether a value depends on no graph input (sizes apart)."""
    seen, work = set(), [node]
    while work:
        here = work.pop()
        value = here.meta.get("val")        # a list of tensors is what a split gives
        if here in seen or not isinstance(value, (torch.Tensor, list, tuple)) or here.target in FACTORIES:
            continue
        seen.add(here)
        if (here.op == "placeholder" and here.meta.get("lifted_constant") is None) or len(seen) > limit:
            return False
        if here.target in (aten.rand.default, aten.rand_like.default, aten.bernoulli.p, aten.native_dropout.default):
            return False
        work.extend(here.all_input_nodes)
    return True


def unknown_inputs(node: fx.Node, known: set[fx.Node], sizes: Sizes) -> list[list[fx.Node]]:
    """For every tensor that ``node`` is made of by moves and pointwise operators and that is neither constant nor
    known: the way to it, ``node`` first. A pointwise operator of several unknown tensors is itself unknown."""
    if node in known or constant_only(node) or sizes.numel(node) == 0:
        return []
    if node.op != "call_function":
        return [[node]]
    inputs = [n for n in node.all_input_nodes if is_tensor(n)]
    if moves_elements(node, sizes):
        if node.target is operator.getitem:         # a part of a split or unbound tensor
            inputs = [args_of(args_of(node)[0])[0]]
        return [[node, *chain] for n in inputs for chain in unknown_inputs(n, known, sizes)]
    if not is_pointwise(node):
        return [[node]]
    inner = [chain for n in inputs for chain in unknown_inputs(n, known, sizes)]
    return [[node, *inner[0]]] if len(inner) == 1 else ([[node]] if inner else [])


def moves_elements(node: fx.Node, sizes: Sizes) -> bool:
    return sizes.numel(node) > 0 and sources(node, torch.zeros(1, dtype=torch.int64), sizes) is not None


def statistic_inputs(output: fx.Node, held: set[fx.Node],
                     sizes: Sizes) -> tuple[list[list[fx.Node]] | None, set[fx.Node]]:
    """For a merge of the parts ``held``: the ways from ``output`` to every other input of its weights (as
    ``unknown_inputs``, starting behind the last reduction), and the nodes in between. None when there are too many."""
    chains: list[list[fx.Node]] = []
    region: set[fx.Node] = set()
    work = [output]
    while work:
        node = work.pop()
        if node in region or node in held or not isinstance(node, fx.Node):
            continue
        if len(region) > 400 or len(chains) > 64:
            return None, region
        if is_tensor(node) and constant_only(node):
            continue
        if not evaluable(node, sizes):
            chains.append([node])
            continue
        region.add(node)
        work.extend(node.all_input_nodes)
    return _with_ways(chains, region), region


def _with_ways(chains: list[list[fx.Node]], region: set[fx.Node]) -> list[list[fx.Node]]:
    """Every leaf with the pointwise and moving nodes that only it feeds, nearest to the output first."""
    result = []
    for (leaf,) in chains:
        way = [leaf]
        while True:
            users = [u for u in way[-1].users if u in region]
            if len(users) != 1 or sum(is_tensor(n) for n in users[0].all_input_nodes) != 1:
                break
            way.append(users[0])
        result.append(way[::-1])
    return result
