"""Replace a projection with an FP8 weight: the contraction, and the rounding behind it, by one op."""

from __future__ import annotations

import torch
import torch.fx as fx

from .config import Config
from .elements.layouts import Builder
from .elements.moves import is_float_cast, is_move
from .fx_access import args_of, target_of
from .legality import GraphFacts
from .recognise.chain_types import Chain

aten = torch.ops.aten
TURNS = (aten.permute.default, aten.transpose.int)
VIEWS = (aten.view.default, aten._unsafe_view.default)


def modes(op: torch._ops.OpOverload, config: Config) -> dict[str, bool]:
    """The modes of ``config`` that ``op`` takes, as keyword arguments; those that are off are left out."""
    asked = {"batch_invariant": config.batch_invariant, "check_inputs": config.check_inputs}
    known = {argument.name for argument in op._schema.arguments}
    return {name: True for name, is_asked in asked.items() if is_asked and name in known}


def replace_product(chain: Chain, builder: Builder, codes: fx.Node, scales: fx.Node, facts: GraphFacts,
                    config: Config) -> dict[fx.Node, fx.Node] | None:
    """The node that goes (the contraction, or the only rounding of its result), and ``fp8_bgemm`` in its layout.

    The op rounds its fp32 sum once, to the dtype that the source rounds to. None when the weight cannot be viewed.

    A weight that was in memory before the graph's first kernel may be read while the kernel in front of the product
    still runs (mode ``weight_ready``), if that kernel itself started behind all earlier ones: attention and rotation
    do, a merge may not.
    """
    anchor, weight, quantisation = chain.anchors[0], chain.weight, chain.quantisation
    assert weight is not None and quantisation is not None
    way = _way_to_rounding(anchor.node)
    last = way[-1] if way else anchor.node
    builder = Builder(builder.graph, builder.sizes, last)
    w = builder.take(weight.codes.node, weight.codes.offset, weight.codes.axes)
    s = builder.take(weight.scales.node, weight.scales.offset, weight.scales.axes)
    if w is None or s is None:
        return None
    s = builder.view(s, [a.size for a in weight.scales.axes])
    op = torch.ops.fusion_pass.fp8_bgemm.default
    # bfloat16 is the op's default and stays unwritten: torch 2.11 packages a written dtype wrongly (AOTInductor).
    dtype = last.meta["val"].dtype
    rounding = () if dtype == torch.bfloat16 else (dtype,)
    how = modes(op, config)
    in_front = target_of(args_of(codes)[0])
    if facts.is_settled_input(w) and in_front is not torch.ops.fusion_pass.merge_partials_rope_quant.default:
        how["weight_ready"] = True
    out = builder.call(op, codes, scales, w, s, quantisation.block, weight.block, *rounding, **how)
    tokens_first = anchor.contraction.lhs is anchor.node.args[0]
    out = builder.permute(out, [1, 0, 2] if tokens_first else [1, 2, 0])
    before = anchor.node
    for move in way[:-1]:
        target = aten.reshape.default if move.target in VIEWS else move.target
        arguments = [out if a is before else a for a in move.args]
        out, before = builder.call(target, *arguments, **move.kwargs), move
    value, new = last.meta["val"], out.meta["val"]
    if not new.is_contiguous() and new.stride() != value.stride() and not all(
            user.target in TURNS for user in last.users):
        # A view of the source may need its own layout.
        out = builder.call(aten.clone.default, out, memory_format=torch.contiguous_format)
    return {last: out}


def _way_to_rounding(node: fx.Node) -> list[fx.Node]:
    """The moves from an fp32 contraction to the rounding that is its only use, that included; [] if there is none."""
    if node.meta["val"].dtype != torch.float32:
        return []
    way: list[fx.Node] = []
    while len(node.users) == 1:
        user = next(iter(node.users))
        if user.op != "call_function" or not user.args or user.args[0] is not node or len(way) > 8:
            return []
        if is_float_cast(user):
            return [*way, user] if user.meta["val"].dtype in (torch.bfloat16, torch.float16) else []
        if not is_move(user):
            return []
        way.append(user)
        node = user
    return []
