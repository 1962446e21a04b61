"""The attention formula on sampled elements, and its comparison with the graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.fx as fx

from ..elements.layouts import Axis
from ..elements.numeric import Leaf
from .attention_bindings import Binder, Binding
from .attention_match import Mask, Operand
from .attention_proof import Product, Scored, _seed, depends_on, mask_leaf, node_leaf, raw_score
from .attention_sites import Explorer
from .paths import replay
from .refusal import Refused

TOLERANCE = 1e-9
SCORES = 3.0
SCALE_VALUE = 0.37


class Prover:
    """Evaluates the graph and the formula from the same random leaves, with ``sink`` (or none) as the sink."""

    def __init__(self, explorer: Explorer, binder: Binder, bindings: list[Binding],
                 constants: Callable[[fx.Node], object], sink: fx.Node | None):
        self.explorer, self.binder, self.bindings, self.constants = explorer, binder, bindings, constants
        self.sink = sink
        self.sizes, self.axes = explorer.sizes, explorer.axes
        first = bindings[0]
        self.scale = first.scale * (SCALE_VALUE if first.scale_node is not None else 1.0)
        self.spread = SCORES / abs(self.scale)
        self.visits = 0

    def leaves(self, attempt: int) -> dict[fx.Node, Leaf]:
        """Random values for rows, queries, masks, sink."""
        leaves: dict[fx.Node, Leaf] = {}
        for binding in self.bindings:
            leaves[binding.query.node] = node_leaf(binding.query.node)
            leaves[binding.piece.rows.node] = node_leaf(binding.piece.rows.node)
            for mask in binding.piece.masks:
                leaves[mask.operand.node] = mask_leaf(mask.operand.node, attempt)
            if binding.scale_node is not None:
                leaves[binding.scale_node] = lambda index: torch.full((len(index),), SCALE_VALUE, dtype=torch.float64)
        if self.sink is not None:
            leaves[self.sink] = node_leaf(self.sink, 2.0)
        return leaves

    def engine(self, leaves: dict[fx.Node, Leaf]) -> Scored:
        channels = self.axes.channels.size
        products: dict[fx.Node, Product] = {}
        for binding in self.bindings:
            query, rows = binding.segment.queries[binding.query_at], binding.segment.rows[binding.rows_at]
            node = binding.segment.scores.node
            if node not in products:
                joined = rows.path if rows.path and rows.path[0].kind == "equal" else ()
                products[node] = Product(binding.segment.scores, query.path, {}, channels, joined)
            products[node].rows[rows.node] = query.factor * rows.factor
        fused = {b.segment.site.fused.node: b.segment.site.fused for b in self.bindings
                 if b.segment.site.fused is not None}
        return Scored(self.sizes, leaves, self.constants, products, fused, self.spread)

    def samples(self) -> list[torch.Tensor]:
        """Coordinates (tokens.., head): the first and the last of every axis, and mixed ones."""
        extents = self.explorer.extents[:-1]
        generator = torch.Generator().manual_seed(len(extents))
        rows = [[0] * len(extents), [e - 1 for e in extents], [e // 2 for e in extents],
                [int(torch.randint(0, e, (1,), generator=generator)) for e in extents]]
        unique = torch.unique(torch.tensor(rows), dim=0)
        return list(unique.unbind(1))

    def channels(self) -> torch.Tensor:
        size = self.axes.channels.size
        return torch.tensor(sorted({c for c in (0, size - 65, size - 64, size - 1) if c >= 0}))

    def sink_operand(self, sink: fx.Node, leaves: dict[fx.Node, Leaf]) -> Operand | Refused:
        """Where every head's sink lives in the sink node: recorded while the graph is evaluated."""
        asked: list[torch.Tensor] = []
        leaf = leaves[sink]

        def record(index: torch.Tensor) -> torch.Tensor:
            asked.append(index)
            return leaf(index)

        def read(last: bool, heads: list[int]) -> list[int]:
            """Elements that the outputs of some heads at the first or last token read."""
            asked.clear()
            count = len(heads)
            coordinates = [torch.full((count,), a.size - 1 if last else 0) for a in self.axes.tokens]
            index = self.explorer.output_index(*coordinates, torch.tensor(heads), torch.zeros(count, dtype=torch.int64))
            engine = self.engine({**leaves, sink: record})
            engine.values(self.explorer.output, index)
            self.visits += engine.visits
            return torch.unique(torch.cat(asked)).tolist() if asked else []

        heads = self.axes.heads.size
        first = read(False, [0])
        second = read(False, [1]) if heads > 1 else first
        if len(first) != 1 or len(second) != 1:
            return Refused("fmha", f"depends on {max(len(first), len(second))} elements of {depends_on(sink)} "
                                   "per head", sink)
        stride = second[0] - first[0]
        if heads > 1 and stride == 0:
            return Refused("fmha", f"{depends_on(sink)} is not one sink per head", sink)
        if set(read(True, [0, heads - 1])) != {first[0], first[0] + (heads - 1) * stride}:
            return Refused("fmha", f"{depends_on(sink)} changes with the token, or not evenly with the head: it "
                                   "is no sink", sink)
        return Operand(sink, first[0], (Axis(heads, stride, self.axes.heads.size_from),))

    def gate(self) -> tuple[Mask, ...]:
        """The masks that also cover a key that only carries the sink (an extra row), with the axes (tokens.., 1)."""
        masks: list[Mask] = []
        for binding in self.bindings:
            site = binding.segment.site
            zeros = self.explorer.zero_rows(site).nonzero().flatten()
            if not len(zeros) or site.fused is not None or self.explorer.zero_rows_are_keys:
                continue
            for mask in binding.piece.masks:
                operand = self._beyond(binding, mask, int(zeros[0]))
                if operand is not None:
                    masks.append(Mask(operand, mask.kind, mask.coefficient))
        return tuple(masks)

    def _beyond(self, binding: Binding, mask: Mask, key: int) -> Operand | None:
        """The elements of a mask at a key of the site outside the segment, when the mask's node has them."""
        keys = mask.operand.axes[-1]
        offset = mask.operand.offset + (key - binding.segment.start) * keys.stride
        spare = [a for a in mask.operand.axes if a.stride > keys.stride]
        room = min((a.stride for a in spare), default=self.sizes.numel(mask.operand.node))
        if keys.stride == 0 or key - binding.segment.start >= room // keys.stride:
            return None
        return Operand(mask.operand.node, offset, (*mask.operand.axes[:-1], Axis(1, 0)))

    def prove(self) -> tuple[Operand | None, tuple[Mask, ...]] | Refused:
        """(sink, gate) when the graph agrees with the formula; else the first differing element."""
        sink, refusal = None, None
        if self.sink is not None:
            found = self.sink_operand(self.sink, self.leaves(0))
            if isinstance(found, Refused):
                return found
            sink = found
        gates = [()] + ([gate] if sink is not None and (gate := self.gate()) else [])
        for gate in gates:
            refusal = self._compare(sink, gate)
            if refusal is None:
                return sink, gate
        assert refusal is not None
        return refusal

    def parts_normalised(self) -> bool:
        """Whether the weights of every site sum to one by themselves (checked at the first token and head)."""
        engine = self.engine(self.leaves(0))
        for site in {b.segment.site.node: b.segment.site for b in self.bindings}.values():
            if site.fused is not None:
                continue
            first = [c[:1] for c in self.explorer.base()]
            at = replay(site.path, self.explorer.output_index(*first), self.sizes)
            weights = engine.values(site.values.lhs, site.values.indices(at)[0].flatten())
            if not abs(float(weights.sum()) - 1.0) < TOLERANCE:
                return False
        return True

    def _compare(self, sink: Operand | None, gate: tuple[Mask, ...]) -> Refused | None:
        rows = self.samples()
        channels = self.channels()
        for attempt in range(3):
            leaves = self.leaves(attempt * 1000)
            engine = self.engine(leaves)
            spread = [r[:, None].expand(len(r), len(channels)).reshape(-1) for r in rows]
            at = channels[None, :].expand(len(rows[0]), len(channels)).reshape(-1)
            index = self.explorer.output_index(*spread, at)
            got = engine.values(self.explorer.output, index).view(len(rows[0]), len(channels))
            self.visits += engine.visits
            want = self.formula(rows, channels, leaves, sink, gate)
            known = torch.isfinite(want)        # a row without a key is not
            if not bool((known & torch.isfinite(got)).any()):
                continue
            wrong = known & ~((got - want).abs() <= TOLERANCE * want.abs().clamp_min(1e-3))
            if bool(wrong.any()):
                row, column = (int(i) for i in wrong.nonzero()[0])
                where = ", ".join(str(int(r[row])) for r in rows)
                return Refused("fmha", f"output [{where}, {int(channels[column])}] is {got[row, column]:.12g} where "
                                       f"attention with {'a' if sink else 'no'} sink gives {want[row, column]:.12g}",
                               self.explorer.output)
            return None
        return Refused("fmha", "the output is not finite for random scores", self.explorer.output)

    def formula(self, rows: list[torch.Tensor], channels: torch.Tensor, leaves: dict[fx.Node, Leaf],
                sink: Operand | None, gate: tuple[Mask, ...]) -> torch.Tensor:
        """Softmax attention over all segments at (tokens.., head) x channels."""
        *tokens, head = rows
        logits, values = [], []
        for binding in self.bindings:
            keys = torch.arange(binding.segment.count)
            query = _at(binding.query, [*(t[:, None] for t in tokens), head[:, None]])
            row = _at(binding.piece.rows, [*(t[:, None] for t in tokens), keys[None, :]])
            row = row.expand(len(head), len(keys))
            score = self.spread * raw_score(_seed(binding.piece.rows.node),
                                            query.expand_as(row).flatten(), row.flatten()).view(row.shape)
            logit = self.scale * score
            for mask in binding.piece.masks:
                at = _at(mask.operand, [*(t[:, None] for t in tokens), keys[None, :]])
                logit = _masked(logit, mask, leaves[mask.operand.node], at)
            logits.append(logit)
            full = row[:, :, None] + channels * binding.piece.rows.axes[-1].stride
            values.append(leaves[binding.piece.rows.node](full.flatten()).view(full.shape))
        logit, value = torch.cat(logits, 1), torch.cat(values, 1)
        if sink is not None:
            extra = leaves[sink.node](_at(sink, [head]))[:, None]
            for mask in gate:
                at = _at(mask.operand, tokens).expand(len(head))
                extra = _masked(extra, mask, leaves[mask.operand.node], at[:, None])
            logit = torch.cat([logit, extra], 1)
            value = torch.cat([value, torch.zeros_like(value[:, :1])], 1)
        return torch.einsum("mn,mnd->md", torch.softmax(logit, 1), value)


def _at(operand: Operand, coordinates: list[torch.Tensor]) -> torch.Tensor:
    """Elements of an operand at the coordinates of its leading axes."""
    index = torch.tensor(operand.offset)
    for axis, coordinate in zip(operand.axes, coordinates):
        index = index + axis.stride * coordinate
    return index


def _masked(logit: torch.Tensor, mask: Mask, leaf: Leaf, at: torch.Tensor) -> torch.Tensor:
    value = leaf(at.expand(logit.shape).flatten()).view(logit.shape)
    if mask.kind == "add":
        return logit + mask.coefficient * value
    return logit.masked_fill(~value if mask.kind == "keep" else value, -torch.inf)

