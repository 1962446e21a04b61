"""Merges of split-KV partials: in a visible attention, and of partials that are opaque (inputs, results of a kernel).

The formula that an opaque merge is proved against, with c = 1 for natural and ln 2 for base-2 statistics:

    normalised partials, log-sum-exps L:     O = sum_p exp(c*L_p) o_p / (sum_p exp(c*L_p) + exp(sink))
    raw partials, maxima M and sums S:       O = sum_p exp(c*M_p) a_p / (sum_p exp(c*M_p) S_p + exp(sink))
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from ..elements.layouts import Axis
from ..elements.numeric import Leaf, Numeric, random_leaf
from .attention_match import AttentionMatch, Operand, Partials
from .attention_proof import depends_on, node_leaf
from .attention_sites import Explorer, Site
from .context import Context
from .descent import _PRODUCTS, Reach, fit
from .paths import Path, replay
from .refusal import Refused
from .region import statistic_inputs

TOLERANCE = 1e-9
SAMPLED_PARTS = 8
_Elements = dict[int, tuple[fx.Node, int]]


def merges_partials(sites: list[Site], normalised: bool) -> bool:
    """Whether the source spells a merge of partial attentions: every part is rescaled by a weight of its own, all the
    same number of times, or (``normalised``) every part's own weights already sum to one. (A running softmax rescales
    earlier tiles more often than later ones; branches under one common softmax are not rescaled at all.)"""
    paths = list(dict.fromkeys(site.path for site in sites))
    if len(paths) < 2:
        return False
    common = 0
    while all(len(p) > common for p in paths) and len({p[common] for p in paths}) == 1:
        common += 1
    counts = {_rescalings(path[common:]) for path in paths}
    return min(counts) > 0 and (len(counts) == 1 or normalised)


def _rescalings(path: Path) -> int:
    return sum(step.kind == "factor" or step.node.target in _PRODUCTS for step in path)


@dataclass(frozen=True)
class _Leaf:
    """Elements of ``node`` read for one row: ``index`` (base row), and how they move along (tokens.., heads)."""

    node: fx.Node
    index: torch.Tensor
    strides: tuple[int, ...]

    @property
    def per_token(self) -> bool:
        return any(self.strides[:-1])


class _Merge:
    """An output that is a weighted sum of opaque parts, under examination."""

    def __init__(self, explorer: Explorer, parts: list[Reach], context: Context):
        self.explorer, self.parts, self.context = explorer, parts, context
        self.sizes, self.axes = explorer.sizes, explorer.axes
        self.extents = explorer.extents[:-1]
        self.visits = 0

    # -- evaluation ----------------------------------------------------------------------------------------------------
    def output(self, rows: Sequence[torch.Tensor], channel: torch.Tensor, leaves: dict[fx.Node, Leaf]) -> torch.Tensor:
        engine = Numeric(self.sizes, leaves, self.context.constant)
        values = engine.values(self.explorer.output, self.explorer.output_index(*rows, channel))
        self.visits += engine.visits
        return values

    def row(self, axis: int | None = None, at: int = 0) -> list[torch.Tensor]:
        """The first token and head, moved to ``at`` along one axis."""
        return [torch.tensor([at if a == axis else 0]) for a in range(len(self.extents))]

    def read(self, node: fx.Node, row: list[torch.Tensor], leaves: dict[fx.Node, Leaf]) -> torch.Tensor:
        """The elements of a leaf that one output row reads."""
        asked: list[torch.Tensor] = []

        def record(index: torch.Tensor) -> torch.Tensor:
            asked.append(index)
            return leaves[node](index)

        self.output(row, torch.tensor([0]), {**leaves, node: record})
        return torch.unique(torch.cat(asked)) if asked else torch.zeros(0, dtype=torch.int64)

    def leaf(self, node: fx.Node, leaves: dict[fx.Node, Leaf]) -> _Leaf | Refused:
        base = self.read(node, self.row(), leaves)
        if len(base) == 0:
            return _Leaf(node, base, (0,) * len(self.extents))
        strides = []
        for axis, extent in enumerate(self.extents):
            if extent == 1:
                strides.append(0)
                continue
            near = self.read(node, self.row(axis, 1), leaves) - base
            far = self.read(node, self.row(axis, extent - 1), leaves) - base
            if len(torch.unique(near)) != 1 or bool((far != near[0] * (extent - 1)).any()):
                return Refused("kv_merge", f"{depends_on(node)} changes irregularly along tokens and heads", node)
            strides.append(int(near[0]))
        return _Leaf(node, base, tuple(strides))

    # -- parts ---------------------------------------------------------------------------------------------------------
    def part_operands(self) -> tuple[tuple[Operand, ...], bool] | Refused:
        """The parts as operands (one stacked operand when they lie evenly in one node)."""
        families = []
        for part in self.parts:
            family = fit(lambda *c, p=part: replay(p.path, self.explorer.output_index(*c), self.sizes),
                         self.explorer.extents)
            if family is None:
                return Refused("kv_merge", f"{depends_on(part.node)} has no regular layout", part.node)
            families.append(family)
        own = (*self.axes.tokens, self.axes.heads, self.axes.channels)
        steps = {b.offset - a.offset for a, b in zip(families, families[1:])}
        if len({p.node for p in self.parts}) == 1 and len(steps) == 1 and len({f.strides for f in families}) == 1:
            axes = tuple(a.with_stride(s) for a, s in zip(own, families[0].strides))
            node = self.parts[0].node
            return (Operand(node, families[0].offset, (Axis(len(families), steps.pop()), *axes)),), True
        return tuple(Operand(p.node, f.offset, tuple(a.with_stride(s) for a, s in zip(own, f.strides)))
                     for p, f in zip(self.parts, families)), False

    # -- statistics ----------------------------------------------------------------------------------------------------
    def coefficients(self, values: dict[tuple[fx.Node, int], float], nodes: Sequence[fx.Node]) -> torch.Tensor:
        """The weight of every part at the base row, with the elements of the statistics ``nodes`` 1 (or as in
        ``values``). The weights do not depend on the channel: part p is one in channel p and zero elsewhere."""
        def statistic(node: fx.Node) -> Leaf:
            def leaf(index: torch.Tensor) -> torch.Tensor:
                result = torch.ones(len(index), dtype=torch.float64)
                for (n, at), value in values.items():
                    if n is node:
                        result[index == at] = value
                return result
            return leaf

        channels = torch.arange(len(self.parts))
        row = [torch.zeros_like(channels) for _ in self.extents]
        chosen: dict[fx.Node, list[torch.Tensor]] = {}
        for number, part in enumerate(self.parts):
            at = replay(part.path, self.explorer.output_index(*row, channels), self.sizes)
            chosen.setdefault(part.node, []).append(at[number])
        leaves: dict[fx.Node, Leaf] = {node: statistic(node) for node in nodes}
        for node, ones in chosen.items():
            leaves[node] = _indicator(torch.stack(ones))
        return self.output(row, channels, leaves)

    def assign(self, statistics: list[_Leaf]) -> tuple[_Elements, _Elements, float] | Refused:
        """(part -> its log-sum-exp or maximum, part -> its sum, factor c), from how the weights react."""
        nodes = [leaf.node for leaf in statistics]
        base = self.coefficients({}, nodes)
        tops: _Elements = {}
        sums: _Elements = {}
        factor = None
        rest: list[_Leaf] = []
        for leaf in statistics:
            for position in self._sampled(leaf):
                element = (leaf.node, int(leaf.index[position]))
                ratio = torch.log(self.coefficients({element: 2.0}, nodes) / base)
                raised = (ratio - ratio.min() > 1e-9).nonzero().flatten()
                if len(raised) == 0:
                    rest.append(leaf)
                    break
                step = float(ratio.max() - ratio.min())
                if len(raised) != 1 or int(raised[0]) in tops:
                    return Refused("kv_merge", f"{depends_on(leaf.node)} is not the statistic of one part", leaf.node)
                if factor is not None and not math.isclose(step, factor, rel_tol=1e-9):
                    return Refused("kv_merge", "parts are weighted in different bases", leaf.node)
                tops[int(raised[0])], factor = element, step
        self._completed(tops, statistics)
        if len(tops) != len(self.parts):
            return Refused("kv_merge", "not every part has a statistic of its own", self.explorer.output)
        assert factor is not None  # every part gave one
        if not rest:
            return tops, {}, factor
        # With maxima that all differ, adding one to a sum changes the denominator by that part's weight.
        spread = {element: 1.0 + 0.3 * part / len(self.parts) for part, element in tops.items()}
        weights = self.coefficients(spread, nodes)
        for leaf in rest:
            for position in self._sampled(leaf):
                element = (leaf.node, int(leaf.index[position]))
                effect = float((weights / self.coefficients({**spread, element: 2.0}, nodes))[0]) - 1.0
                part = int((weights - effect).abs().argmin())
                if part in sums or not math.isclose(float(weights[part]), effect, rel_tol=1e-6):
                    return Refused("kv_merge", f"{depends_on(leaf.node)} is not the sum of one part", leaf.node)
                sums[part] = element
        self._completed(sums, rest)
        if len(sums) != len(self.parts):
            return Refused("kv_merge", "not every part has a sum of its own", self.explorer.output)
        return tops, sums, factor

    def _sampled(self, leaf: _Leaf) -> list[int]:
        """Positions of a leaf's elements to look at: all of a few, the ends of many (the proof covers the others)."""
        count = len(leaf.index)
        return list(range(count)) if count <= SAMPLED_PARTS else [0, 1, count - 1]

    def _completed(self, elements: _Elements, leaves: list[_Leaf]) -> None:
        """Fill in the parts between the sampled ones of a long statistic."""
        count = len(self.parts)
        for leaf in leaves:
            mine = {part: index for part, (node, index) in elements.items() if node is leaf.node}
            if len(leaf.index) != count or len(mine) == count or not mine:
                continue
            order = leaf.index if mine.get(0) == int(leaf.index[0]) else leaf.index.flip(0)
            for part in range(count):
                elements.setdefault(part, (leaf.node, int(order[part])))

    def operands(self, elements: _Elements, leaves: dict[fx.Node, _Leaf],
                 stacked: bool) -> tuple[Operand, ...] | Refused:
        """Statistics as operands, in the order of the parts."""
        own = (*self.axes.tokens, self.axes.heads)
        ordered = [elements[part] for part in range(len(self.parts))]
        found = [Operand(node, at, tuple(a.with_stride(s) for a, s in zip(own, leaves[node].strides)))
                 for node, at in ordered]
        if not stacked:
            return tuple(found)
        steps = {b.offset - a.offset for a, b in zip(found, found[1:])}
        if len({o.node for o in found}) != 1 or len(steps) > 1:
            return Refused("kv_merge", "stacked parts with scattered statistics", found[0].node)
        first = found[0]
        return (Operand(first.node, first.offset, (Axis(len(found), steps.pop() if steps else 0), *first.axes)),)

    # -- proof ---------------------------------------------------------------------------------------------------------
    def prove(self, parts: tuple[Operand, ...], top: tuple[Operand, ...], total: tuple[Operand, ...],
              stacked: bool, factor: float, sink: Operand | None) -> Refused | None:
        """Compares the graph with the formula at sampled rows and channels."""
        generator = torch.Generator().manual_seed(7)
        rows = [torch.tensor([0, e - 1, e // 2, int(torch.randint(0, e, (1,), generator=generator))])
                for e in self.extents]
        size = self.axes.channels.size
        channels = torch.tensor([0, size - 65 if size > 64 else 0, size // 2, size - 1])
        leaves: dict[fx.Node, Leaf] = {o.node: node_leaf(o.node, 2.0) for o in (*parts, *top)}
        positive = random_leaf(11)
        for operand in total:
            leaves[operand.node] = lambda index: positive(index) + 1.5
        if sink is not None:
            leaves[sink.node] = node_leaf(sink.node, 2.0)
        got = self.output(rows, channels, leaves)

        def values(operands: tuple[Operand, ...], coordinates: list[torch.Tensor]) -> torch.Tensor:
            """[P, samples]"""
            result = []
            for operand in operands:
                axes = operand.axes[1:] if stacked else operand.axes
                at = sum((a.stride * c for a, c in zip(axes, coordinates)), torch.tensor(operand.offset))
                if stacked:
                    at = at + operand.axes[0].stride * torch.arange(operand.axes[0].size)[:, None]
                result.append(leaves[operand.node](at.flatten()).view(at.shape if stacked else (1, -1)))
            return torch.cat(result)

        weight = torch.exp(factor * values(top, rows))
        denominator = (weight * values(total, rows) if total else weight).sum(0)
        if sink is not None:
            at = torch.tensor(sink.offset) + sink.axes[0].stride * rows[-1]
            denominator = denominator + torch.exp(leaves[sink.node](at))
        want = (weight * values(parts, [*rows, channels])).sum(0) / denominator
        wrong = ((got - want).abs() > TOLERANCE * want.abs().clamp_min(1e-3)) | ~torch.isfinite(got)
        if not bool(wrong.any()):
            return None
        bad = int(wrong.nonzero()[0])
        where = ", ".join(str(int(c[bad])) for c in (*rows, channels))
        return Refused("kv_merge", f"output [{where}] is {got[bad]:.12g} where the merge of {len(self.parts)} partials "
                                   f"with {'a' if sink else 'no'} sink gives {want[bad]:.12g}", self.explorer.output)


def _indicator(ones: torch.Tensor) -> Leaf:
    return lambda index: torch.isin(index, ones).to(torch.float64)


def recognise_partials(explorer: Explorer, opaque: list[Reach], context: Context) -> AttentionMatch | Refused:
    """The merge of partials that are themselves opaque: ``opaque`` are the parts, with their ways from the output."""
    output = explorer.output
    if not 2 <= len(opaque) <= explorer.axes.channels.size or any(r.node is output for r in opaque):
        return Refused("fmha", "no attention found", output, silent=True)
    merge = _Merge(explorer, opaque, context)
    parts = merge.part_operands()
    if isinstance(parts, Refused):
        return parts
    operands, stacked = parts
    held = {p.node for p in opaque}
    chains, region = statistic_inputs(output, held, explorer.sizes)
    if chains is None:
        return Refused("kv_merge", "the weights of the parts depend on too much", output)
    result = _statistics(merge, chains, operands, stacked, held)
    context.counters["attention_proof"] += merge.visits
    if isinstance(result, Refused):
        return result
    top, total, factor, sink = result
    return AttentionMatch(
        form="partials", axes=explorer.axes, output=output, roles=("kv_merge",), sink=sink,
        partials=Partials(operands, top, total or None, stacked, factor), interior=frozenset(region))


def _statistics(merge: _Merge, chains: list[list[fx.Node]], parts: tuple[Operand, ...], stacked: bool,
                held: set[fx.Node]) -> tuple[tuple[Operand, ...], tuple[Operand, ...], float, Operand | None] | Refused:
    """(log-sum-exps or maxima, sums, factor, sink) of a merge, proved."""
    origins: dict[fx.Node, list[list[fx.Node]]] = {}
    for chain in chains:
        origins.setdefault(chain[-1], []).append(chain)
    ones = {node: (lambda index: torch.ones(len(index), dtype=torch.float64)) for node in (*held, *origins)}
    leaves: dict[fx.Node, _Leaf] = {}
    for node in origins:
        if not node.meta["val"].dtype.is_floating_point:
            return Refused("kv_merge", f"the weights depend on {depends_on(node)}", node)
        leaf = merge.leaf(node, ones)
        if isinstance(leaf, Refused):
            return leaf
        leaves[node] = leaf
    singles = [leaf for leaf in leaves.values() if len(leaf.index) == 1 and not leaf.per_token]
    many_tokens = any(e > 1 for e in merge.extents[:-1])
    sinks: list[_Leaf | None] = [*singles] if many_tokens or len(leaves) == 1 else [*singles, None]
    refusal: Refused | None = None
    for sink_leaf in sinks or [None]:
        statistics = [leaf for leaf in leaves.values() if leaf is not sink_leaf]
        result = _with_sink(merge, statistics, leaves, sink_leaf, origins, parts, stacked)
        if not isinstance(result, Refused):
            return result
        refusal = refusal or result
    assert refusal is not None
    return refusal


def _with_sink(merge: _Merge, statistics: list[_Leaf], leaves: dict[fx.Node, _Leaf], sink_leaf: _Leaf | None,
               origins: dict[fx.Node, list[list[fx.Node]]], parts: tuple[Operand, ...], stacked: bool
               ) -> tuple[tuple[Operand, ...], tuple[Operand, ...], float, Operand | None] | Refused:
    """The statistics under the assumption that ``sink_leaf`` (or nothing) is the sink."""
    sink_values = {} if sink_leaf is None else {sink_leaf.node: sink_leaf}
    fixed = {node: (lambda index: torch.ones(len(index), dtype=torch.float64)) for node in sink_values}
    plain = merge.output

    def with_sink(rows: Any, channel: Any, given: Any) -> Any:
        return plain(rows, channel, {**fixed, **given})

    merge.output = with_sink  # type: ignore[assignment, method-assign]
    try:
        assigned = merge.assign(statistics)
    finally:
        merge.output = plain  # type: ignore[method-assign]
    if isinstance(assigned, Refused):
        return assigned
    tops, sums, factor = assigned
    top = merge.operands(tops, leaves, stacked)
    total = merge.operands(sums, leaves, stacked) if sums else ()
    if isinstance(top, Refused):
        return top
    if isinstance(total, Refused):
        return total
    if sink_leaf is None:
        return merge.prove(parts, top, total, stacked, factor, None) or (top, total, factor, None)
    chains = origins[sink_leaf.node]
    common = [node for node in reversed(chains[0]) if all(node in chain for chain in chains)]
    refusal = None
    for node in itertools.islice(common, 4):
        ones = {n: (lambda index: torch.ones(len(index), dtype=torch.float64))
                for n in (*leaves, *(p.node for p in merge.parts)) if n is not sink_leaf.node}
        leaf = merge.leaf(node, {**ones, node: lambda index: torch.ones(len(index), dtype=torch.float64)})
        if isinstance(leaf, Refused) or len(leaf.index) != 1:
            continue
        sink = Operand(node, int(leaf.index[0]), (Axis(merge.extents[-1], leaf.strides[-1]),))
        wrong = merge.prove(parts, top, total, stacked, factor, sink)
        if wrong is None:
            return top, total, factor, sink
        refusal = refusal or wrong
    return refusal or Refused("kv_merge", f"{depends_on(sink_leaf.node)} is not one sink per head", sink_leaf.node)
