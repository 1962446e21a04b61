"""Replace a recognised chain by its fused op.

The fused op writes [G, T, K] (or codes and scales in the layout of the FP8 BGEMM); what stands there afterwards is that
tensor, viewed as the source laid its rotated output out. The contraction itself is replaced only when its weight is FP8
with block scales; otherwise it reads the fused result.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from .config import Config
from .elements.layouts import Axis, Builder
from .elements.moves import is_float_cast, is_move
from .elements.sizes import Sizes
from .legality import WRITTEN_OUT, GraphFacts, is_metadata_check
from .recognise.attention_emit import AttentionOperands, GatheredOperands, MergeOperands, batch_axes
from .recognise.chain_types import Chain
from .recognise.quantisation import ScaleTensor
from .recognise.refusal import Refused, source_line
from .recognise.rotation import Table
from .replace_product import modes, replace_product
from .strides import propagate_strides, same_shape

aten = torch.ops.aten
prims = torch.ops.prims


@dataclass(frozen=True)
class Replaced:
    """The name of the op that stands there now, and its node."""

    op: str
    node: fx.Node


def check_legality(chain: Chain, facts: GraphFacts) -> Refused | None:
    """Who else reads what the replacement makes unnecessary?"""
    rotation = chain.rotation
    reader = _foreign_reader(chain)
    if reader is not None:
        return Refused("bgemm", f"the rotated output is also read by {reader.name} at {source_line(reader) or 'output'}"
                       ": it escapes the chain", reader)
    scale_node = _scale_node(chain)
    cut = {rotation.node} | ({scale_node} if scale_node is not None else set())
    operands = {rotation.cos.node, rotation.sin.node}
    inside = facts.between(rotation.source, rotation.node)
    if chain.attention is not None:
        inside.add(rotation.source)
    else:
        operands.add(rotation.source)
    own = inside | cut | {rotation.source}
    for node in sorted(inside - cut, key=facts.position):
        user = facts.outside_reader(node, own)
        if user is not None and not user.meta.get(WRITTEN_OUT):
            return Refused("fmha" if chain.attention is not None else "inverse_rope",
                           f"{node.name} is also read by {user.name} at {source_line(user) or 'the output'}: an "
                           "intermediate value escapes the chain", user)
    mutation = facts.mutated_input(_leaves(chain) | operands, rotation.node)
    if mutation is not None:
        return Refused("fmha", f"{mutation.name} changes an operand in place before it is used", mutation)
    return None


def kept_alive(chain: Chain, facts: GraphFacts) -> fx.Node | None:
    """A part of the recognised attention that somebody else reads as well (returned probabilities, for example): it
    stays, and is then computed twice. None when all of it goes."""
    if chain.attention is None:
        return None
    own = {n for n in chain.attention.interior if n.op == "call_function"}
    own |= facts.between(chain.rotation.source, chain.rotation.node) | {chain.rotation.source, chain.rotation.node}
    parts = sorted(own - {chain.rotation.node}, key=facts.position)
    return next((n for n in parts if facts.outside_reader(n, own) is not None), None)


def _scale_node(chain: Chain) -> fx.Node | None:
    found = chain.quantisation
    return found.scales.node if found is not None and found.scales is not None else None


def _leaves(chain: Chain) -> set[fx.Node]:
    match = chain.attention
    if match is None:
        return {chain.rotation.source}
    masks = [m.operand for p in match.kv for m in p.masks] + [m.operand for m in match.sink_gate]
    operands = [match.q, match.sink, *(p.rows for p in match.kv), *masks, *(g.indices for g in match.gathered)]
    return {o.node for o in operands if o is not None} | {g.pool for g in match.gathered}


def _foreign_reader(chain: Chain) -> fx.Node | None:
    """A reader of the rotated output other than the chain's contractions (through moves and casts)."""
    anchors = {a.node for a in chain.anchors}
    stack, seen = [chain.rotation.node], set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for user in node.users:
            if user in anchors or user.meta.get(WRITTEN_OUT) or is_metadata_check(user):
                continue
            if user.target is aten.mul.Tensor and _only_summed(user, anchors):
                continue            # a contraction that is written as the sum of a product
            if user.op == "output":
                return user
            if is_move(user) or is_float_cast(user) or (
                    chain.quantisation is not None and user.target is aten.view.dtype):
                stack.append(user)
            elif user.target is aten._scaled_mm.default and chain.quantisation is not None:
                continue
            else:
                return user
    return None


def _only_summed(product: fx.Node, sums: set[fx.Node]) -> bool:
    """Is ``product`` read by ``sums`` only (through casts)?"""
    while len(product.users) == 1 and is_float_cast(next(iter(product.users))):
        product = next(iter(product.users))
    return bool(product.users) and all(user in sums for user in product.users)


class ChainWriter:
    """Writes the fused op and its operands before the chain's rotation node."""

    def __init__(self, chain: Chain, graph: fx.Graph, sizes: Sizes, facts: GraphFacts, config: Config):
        self.chain = chain
        self.facts = facts
        self.config = config
        # The scales are computed before the codes; everything new stands before both.
        self.builder = Builder(graph, sizes, _scale_node(chain) or chain.rotation.node)

    # ------------------------------------------------------------------------------------------------ operands

    def table(self, name: str) -> fx.Node | None:
        """cos or sin, one dimension per token axis (size 1 where the table does not depend on it), then the pairs."""
        rotation, builder = self.chain.rotation, self.builder
        table: Table = getattr(rotation, name)
        node, offset, factor = table.node, table.offset, 1
        if table.part:
            node = builder.call(aten.view_as_real.default, node)
            factor = 2
            offset = offset * 2 + (table.part == "im")
        axes = [Axis(a.size, getattr(a, name) * factor, a.size_from) for a in self.chain.grouping.tokens]
        axes.append(Axis(rotation.half, table.pair * factor, table.half_from))
        taken = builder.take(node, offset, axes)
        if taken is None:
            return None
        return builder.call(aten.neg.default, taken) if table.negated else taken

    def tables(self, batch: tuple[int, ...] | None) -> list[fx.Node] | None:
        """cos and sin as [B or 1, S, half] (``batch`` = the token axes of B), or as [T, half] (``batch`` None)."""
        tokens = self.chain.grouping.tokens
        result = []
        for name in ("cos", "sin"):
            node = self.table(name)
            if node is None:
                return None
            strides = [getattr(a, name) for a in tokens]
            rotation = self.chain.rotation
            half = self.builder.size(Axis(rotation.half, 0, getattr(rotation, name).half_from))
            if batch is not None and len(tokens) == 2 and batch == (0,) and (strides[1] or tokens[1].size == 1):
                result.append(node)
                continue
            if any(stride == 0 and axis.size != 1 for stride, axis in zip(strides, tokens)):
                shape = [self.builder.size(Axis(a.size, 0, a.size_from)) for a in tokens]
                node = self.builder.call(aten.expand.default, node, [*shape, half])
            groups = [tokens] if batch is None else [
                [tokens[i] for i in batch], [a for i, a in enumerate(tokens) if i not in batch]]
            result.append(self.builder.view(node, [*self.products(groups), half]))
        return result

    def products(self, groups: list[Any]) -> list[int | fx.Node]:
        """The number of elements of each group of axes; the only symbolic one is written as -1."""
        symbolic = [any(a.size_from is not None for a in group) for group in groups]
        result: list[int | fx.Node] = []
        for group, is_symbolic in zip(groups, symbolic):
            if is_symbolic and sum(symbolic) == 1:
                result.append(-1)
                continue
            total: int | fx.Node = 1
            for axis in group:
                size = self.builder.size(Axis(axis.size, 0, axis.size_from))
                total = total * size if isinstance(total, int) and isinstance(size, int) else (
                    size if total == 1 else self.builder.call(operator.mul, total, size))
            result.append(total)
        return result

    def opaque_output(self) -> fx.Node | None:
        """The attention output as [T, H, D]."""
        axes = self.chain.output_axes
        taken = self.builder.take(self.chain.rotation.source, axes.offset, [*axes.tokens, axes.heads, axes.channels])
        if taken is None:
            return None
        return self.builder.view(taken, [*self.products([axes.tokens]), axes.heads.size, axes.channels.size])

    # -------------------------------------------------------------------------------------------------- the op

    def fused(self) -> Replaced | Refused:
        """Call the fused op: a node for [G, T, K], or for the pair (codes, scales)."""
        chain = self.chain
        match = chain.attention
        operands = None
        if match is not None:
            operands = match.emit_gathered(self.builder) or match.emit(self.builder)
        if match is not None and operands is None:
            return Refused("fmha", "an operand cannot be written as a view of its tensor", chain.rotation.source)
        batch = batch_axes(match) if match is not None and isinstance(operands, AttentionOperands) else None
        tables = self.tables(batch)
        if tables is None:
            return Refused("inverse_rope", "the cos and sin tables cannot be written as views", chain.rotation.cos.node)
        groups = chain.grouping.groups
        pools: dict[str, Any] = {}
        args: list[Any]
        if isinstance(operands, AttentionOperands):
            name = "attention_rope"
            args = [self.wide(operands.q), self.wide(operands.kv), operands.mask, operands.sink, *tables,
                    operands.scale, groups]
        elif isinstance(operands, GatheredOperands):
            name = "attention_gathered_rope"
            pool, *extra = operands.pools
            args = [self.wide(operands.q), self.wide(pool.kv), pool.indices, operands.sink, *tables, operands.scale,
                    groups]
            pools = {"extra_kv": self.wide(extra[0].kv), "extra_indices": extra[0].indices} if extra else {}
        elif isinstance(operands, MergeOperands):
            name = "merge_partials_rope"
            operands = self.natural(operands)
            args = [operands.partials, operands.lse_or_max, operands.sum, operands.sink, *tables, groups]
        else:
            output = self.opaque_output()
            if output is None:
                return Refused("inverse_rope", "the attention output cannot be viewed as [T, H, D]",
                               chain.rotation.source)
            name = "inverse_rope"
            args = [output, *tables, groups]
        kwargs: dict[str, Any] = {**pools}
        if isinstance(operands, MergeOperands):
            kwargs = {"stat_scale": operands.stat_scale}
        if isinstance(operands, MergeOperands) and self.config.kv_split is not None:
            kwargs["kv_split"] = self.config.kv_split
        if isinstance(operands, MergeOperands) and chain.quantisation is None:
            kwargs["out_dtype"] = chain.rotation.node.meta["val"].dtype
        if chain.quantisation is not None:
            name += "_quant"
            args += [chain.quantisation.block, chain.quantisation.rule, chain.quantisation.floor, False]
        op = getattr(torch.ops.fusion_pass, name).default
        kwargs |= modes(op, self.config)
        return Replaced(f"fusion_pass.{name}", self.builder.call(op, *args, **kwargs))

    def natural(self, operands: MergeOperands) -> MergeOperands:
        """The op takes the log-sum-exp of normalised partials in natural logarithm; some libraries keep base 2."""
        if operands.sum is not None or operands.stat_scale == 1.0:
            return operands
        lse = self.builder.call(aten.mul.Tensor, operands.lse_or_max, operands.stat_scale)
        return dataclasses.replace(operands, lse_or_max=lse, stat_scale=1.0)

    def wide(self, node: fx.Node) -> fx.Node:
        """Keep fp32 where the source kept it from the scores to the projection: the op rounds to q's dtype."""
        chain = self.chain
        rotation = chain.rotation
        if chain.quantisation is None and rotation.source.meta["val"].dtype == torch.float32 and (
                rotation.node.meta["val"].dtype == torch.float32) and node.meta["val"].dtype != torch.float32 and not (
                any(n.meta["val"].dtype != torch.float32 for n in _floats(self.facts.between(rotation.source,
                                                                                        rotation.node)))):
            return self.builder.call(prims.convert_element_type.default, node, torch.float32)
        return node

    # ------------------------------------------------------------------------------------------------- results

    def arranged(self, node: fx.Node, inner: list[Axis], like: fx.Node) -> fx.Node | None:
        """[G, T, heads per group * rest] in the layout of the rotation's node (rest: ``inner`` axes of a head)."""
        grouping = self.chain.grouping
        axes = [Axis(grouping.groups, grouping.group_here),
                *(Axis(a.size, a.here, a.size_from) for a in grouping.tokens),
                Axis(grouping.heads_per_group, grouping.head_here), *inner]
        viewed = self.builder.view(node, self.builder.sizes_of(axes))
        arranged = self.builder.arrange(viewed, axes, like)
        if arranged is None:
            return None
        dtype = like.meta["val"].dtype
        if arranged.meta["val"].dtype != dtype:
            arranged = self.builder.call(prims.convert_element_type.default, arranged, dtype)
        return arranged

    def token_scales(self, scales: fx.Node) -> fx.Node:
        """[G, K/block, M] -> [G, T, K/block], without the padding columns."""
        grouping = self.chain.grouping
        total = 1
        for axis in grouping.tokens:
            total *= axis.size
        symbolic = any(a.size_from is not None for a in grouping.tokens)
        count, = self.products([grouping.tokens]) if not symbolic else [None]
        if count is None:
            count = self._token_count()
        cut = self.builder.call(aten.slice.Tensor, scales, 2, 0, count)
        return self.builder.permute(cut, [0, 2, 1])

    def _token_count(self) -> int | fx.Node:
        total: int | fx.Node = 1
        for axis in self.chain.grouping.tokens:
            size = self.builder.size(Axis(axis.size, 0, axis.size_from))
            total = size if total == 1 else self.builder.call(operator.mul, total, size)
        return total

    def dequantised(self, codes: fx.Node, scales: fx.Node) -> fx.Node:
        """codes * scale as fp32 [G, T, K]."""
        chain, builder = self.chain, self.builder
        assert chain.quantisation is not None
        block = chain.quantisation.block
        width = chain.grouping.heads_per_group * chain.rotation.head_dim
        tokens, = self.products([chain.grouping.tokens])
        groups = chain.grouping.groups
        wide = builder.call(prims.convert_element_type.default, codes, torch.float32)
        wide = builder.view(wide, [groups, tokens, width // block, block])
        factor = builder.call(aten.unsqueeze.default, self.token_scales(scales), -1)
        return builder.view(builder.call(aten.mul.Tensor, wide, factor), [groups, tokens, width])


def _floats(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    return [n for n in nodes if isinstance(n.meta.get("val"), torch.Tensor) and n.meta["val"].is_floating_point()]


def replace_chain(chain: Chain, graph: fx.Graph, sizes: Sizes, facts: GraphFacts,
                  config: Config, validate: Callable[[fx.Node, fx.Node], fx.Node] | None = None
                  ) -> Replaced | Refused:
    """Replace the chain in its graph. On a Refused the graph holds unused nodes only (dead code). ``config`` gives the
    upper bound of a merge op's groups and the modes of the ops.

    ``validate(old, new)`` may put a node behind both that decides at run time which of the two goes on.
    """
    refused = check_legality(chain, facts)
    if refused is not None:
        return refused
    writer = ChainWriter(chain, graph, sizes, facts, config)
    replaced = writer.fused()
    if isinstance(replaced, Refused):
        return replaced
    rotation, quantisation = chain.rotation, chain.quantisation
    channels = [Axis(rotation.head_dim, 1)]
    if quantisation is None:
        made: dict[fx.Node, fx.Node | None] = {rotation.node: writer.arranged(replaced.node, channels, rotation.node)}
    else:
        codes = writer.builder.call(operator.getitem, replaced.node, 0)
        scales = writer.builder.call(operator.getitem, replaced.node, 1)
        if chain.weight is not None:
            made = {**(replace_product(chain, writer.builder, codes, scales, facts, config) or {rotation.node: None})}
            replaced = Replaced(replaced.op + " + fusion_pass.fp8_bgemm", replaced.node)
        elif quantisation.scales is None:
            made = {rotation.node: writer.arranged(writer.dequantised(codes, scales), channels, rotation.node)}
        else:
            made = {rotation.node: writer.arranged(codes, channels, rotation.node),
                    quantisation.scales.node: _source_scales(writer, quantisation.block, quantisation.scales, scales)}
    news = {old: new for old, new in made.items() if new is not None}
    if len(news) < len(made):
        return Refused("bgemm", "the fused result cannot be viewed in the layout that the contraction reads",
                       rotation.node)
    for old, new in news.items():
        if not same_shape(old.meta["val"], new.meta["val"]):
            return Refused("bgemm", f"the fused result would have the shape {tuple(new.meta['val'].shape)} instead of "
                           f"{tuple(old.meta['val'].shape)}", old)
    for old, new in news.items():
        going_on = new if validate is None else validate(old, new)
        old.replace_all_uses_with(going_on, delete_user_cb=functools.partial(operator.is_not, going_on))
        propagate_strides(old.meta["val"], going_on)
        new.meta.setdefault("original_aten", old.meta.get("original_aten"))
    return replaced


def _source_scales(writer: ChainWriter, block: int, where: ScaleTensor, scales: fx.Node) -> fx.Node | None:
    """The block scales where the source keeps them."""
    chain, builder = writer.chain, writer.builder
    grouping = chain.grouping
    stride = dict(zip(chain.rotation.axes, where.axes))
    blocks = chain.rotation.head_dim // block
    heads = [a for a in chain.rotation.axes if a not in grouping.tokens]
    inner = min(heads, key=lambda a: a.source, default=None)
    head = stride[inner] if inner is not None else 0
    group = stride[heads[0]] if len(heads) == 2 and heads[0] is not inner else (
        stride[heads[1]] if len(heads) == 2 else head * grouping.heads_per_group)
    axes = [Axis(grouping.groups, group), *(Axis(a.size, stride[a], a.size_from) for a in grouping.tokens),
            Axis(grouping.heads_per_group, head), Axis(blocks, where.per_block)]
    flat = writer.token_scales(scales)
    viewed = builder.view(flat, builder.sizes_of(axes))
    if where.offset:
        return None
    arranged = builder.arrange(viewed, axes, where.node)
    if arranged is not None and arranged.meta["val"].dtype != where.node.meta["val"].dtype:
        arranged = builder.call(prims.convert_element_type.default, arranged, where.node.meta["val"].dtype)
    return arranged
