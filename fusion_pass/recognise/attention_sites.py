"""Where an attention output multiplies weights by values, and where the scores of those weights come from.

A *site* is one contraction of weights with value rows (or one fused scaled-dot-product operator). Tiles, splits and
branches are several sites of one attention. A *segment* is the part of a site's keys whose scores come from one
query-key product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.fx as fx

from ..elements.contractions import Contraction, contraction
from ..elements.follow import Follower
from ..elements.sizes import Sizes
from ..fx_access import args_of, target_of
from .attention_match import OutputAxes
from .context import Context
from .descent import Descent, Reach, as_contraction, varies
from .paths import Path, Step, Unfollowed, advance, replay, same_origins
from .refusal import Refused
from .sums import sum_of_products

aten = torch.ops.aten
_FUSED = {getattr(aten, name).default for name in (
    "scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_attention_math",
    "_scaled_dot_product_fused_attention_overrideable") if hasattr(aten, name)}


@dataclass(frozen=True)
class Fused:
    """A fused scaled-dot-product operator taken apart: scores and weights over the virtual index [b, h, s, n]."""

    node: fx.Node
    scores: Contraction
    mask: fx.Node | None
    causal: bool
    shape: tuple[int, int, int, int]


@dataclass(frozen=True)
class Site:
    """``values`` is the contraction with the weights as its lhs and the value rows as its rhs; ``path`` leads from the
    attention output to its node."""

    node: fx.Node
    path: Path
    values: Contraction
    fused: Fused | None = None


@dataclass(frozen=True)
class Segment:
    """Keys ``start .. start + count`` of a site. ``path`` leads from the weights to the product ``scores`` (lhs: the
    queries, rhs: the keys); ``queries`` and ``rows`` are the ways from its operands, ``value_rows`` from the site's
    values, to the nodes that hold them, furthest first. ``rows`` and ``value_rows`` end in the same elements."""

    site: Site
    start: int
    count: int
    path: Path
    scores: Contraction
    queries: tuple[Reach, ...]
    rows: tuple[Reach, ...]
    value_rows: tuple[Reach, ...]


def fused_attention(node: fx.Node, sizes: Sizes) -> Fused | None:
    """``node`` as the output of a fused attention operator without dropout."""
    operator = node
    if node.op == "call_function" and len(node.args) == 2 and node.args[1] == 0 and isinstance(node.args[0], fx.Node):
        operator = node.args[0]
    if operator.op != "call_function" or operator.target not in _FUSED:
        return None
    names = [a.name for a in target_of(operator)._schema.arguments]
    given = dict(zip(names, operator.args)) | dict(operator.kwargs)
    if given.get("dropout_p", 0.0) not in (0, 0.0):
        return None
    query, key, value = args_of(operator)[:3]
    b, h, s, d = sizes.shape(query)
    _, kv_heads, n, _ = sizes.shape(value)
    scale = given.get("scale")
    scale = d ** -0.5 if scale is None else float(sizes.number(scale))

    def head(i: torch.Tensor) -> torch.Tensor:
        return i // (h * s * n) * kv_heads + i // (s * n) % h * kv_heads // h

    scores = Contraction(operator, query, key, d, lambda i, j: i // n * d + j,
                         lambda i, j: (head(i) * n + i % n) * d + j, scale=scale)
    return Fused(node, scores, given.get("attn_mask", given.get("attn_bias")), bool(given.get("is_causal", False)),
                 (b, h, s, n))


def fused_values(fused: Fused, sizes: Sizes) -> Contraction:
    """The contraction of a fused operator's weights (virtual index [b, h, s, n]) with its values."""
    value = args_of(fused.scores.node)[2]
    _, kv_heads, n, width = sizes.shape(value)
    b, h, s, _ = fused.shape
    return Contraction(
        fused.node, fused.scores.node, value, n, lambda i, j: i // width * n + j,
        lambda i, j: ((i // (h * s * width) * kv_heads + i // (s * width) % h * kv_heads // h) * n + j) * width
        + i % width)


class Explorer:
    """Finds the sites and segments of the attention whose output lives in ``output`` at ``axes``."""

    def __init__(self, output: fx.Node, axes: OutputAxes, sizes: Sizes, context: Context,
                 zero_rows_are_keys: bool = False):
        self.zero_rows_are_keys, self.left_out = zero_rows_are_keys, False
        self.output, self.axes, self.sizes, self.context = output, axes, sizes, context
        self.descent = Descent(sizes)
        self.follower = Follower(sizes)
        self._scores: dict[fx.Node, Contraction | None] = {}
        self.partial_scores: Contraction | None = None      # a product that runs over some of the channels only
        self.parts_joined: set[fx.Node] = set()     # where keys and values that are joined apart come from alike

    @property
    def extents(self) -> list[int]:
        """Sizes of the axes (tokens.., heads, channels)."""
        return [a.size for a in (*self.axes.tokens, self.axes.heads, self.axes.channels)]

    def output_index(self, *coordinates: torch.Tensor) -> torch.Tensor:
        """Row-major index into the output of the coordinates (tokens.., head, channel)."""
        strides = [a.stride for a in (*self.axes.tokens, self.axes.heads, self.axes.channels)]
        return sum((c * s for c, s in zip(coordinates, strides)), torch.full_like(coordinates[0], self.axes.offset))

    def base(self, last: bool = False) -> list[torch.Tensor]:
        """The first (or last) token and head, every channel."""
        channels = torch.arange(self.axes.channels.size)
        return [torch.full_like(channels, e - 1 if last else 0) for e in self.extents[:-1]] + [channels]

    def score(self, node: fx.Node) -> Contraction | None:
        """A contraction over at least a head's channels, or a sum of some over parts of them: only the query-key
        product is one on the way from weights."""
        if node not in self._scores:
            channels = self.axes.channels.size
            self._scores[node] = as_contraction(node, self.sizes, channels) or sum_of_products(
                node, self.context, self.sizes, channels)
        return self._scores[node]

    def is_score(self, node: fx.Node) -> bool:
        return self.score(node) is not None

    def terms(self) -> list[Reach]:
        """What the output is a linear function of, channel by channel."""
        return list(self.descent.linear(self.output, self.output_index(*self.base())))

    def as_site(self, reach: Reach, path: Path) -> Site | None:
        """The site at a reached node: the operand that changes with the channel holds the values."""
        fused = fused_attention(reach.node, self.sizes)
        if fused is not None:
            return Site(reach.node, path, fused_values(fused, self.sizes), fused)
        found = contraction(reach.node, self.sizes) if reach.node.op == "call_function" else None
        if found is None or found.scale_nodes or found.addend is not None or found.scale != 1.0:
            return None
        zero = torch.zeros_like(reach.index)
        left, right = varies(found.lhs_at(reach.index, zero)), varies(found.rhs_at(reach.index, zero))
        if left == right:
            return None
        return Site(reach.node, path, found if right else found.swapped())

    def parts(self, site: Site) -> list[Reach] | None:
        """What the values of a site consist of, when the site only adds up partial outputs."""
        if site.values.extent > 512:
            return None
        own = contraction(site.node, self.sizes)
        side = "rhs" if own is not None and own.rhs is site.values.rhs else "lhs"
        index = replay(site.path, self.output_index(*self.base()), self.sizes)
        result = []
        for term in range(site.values.extent):
            at = site.values.rhs_at(index, torch.full_like(index, term))
            step = Step(site.node, site.values.rhs, "factor", term, side)
            for reach in self.descent.linear(site.values.rhs, at):
                result.append(Reach(reach.node, reach.lanes, reach.index, (*site.path, step, *reach.path)))
        return result

    def keys(self, site: Site) -> torch.Tensor:
        """The numbers of a site's keys: without the rows that are zero, which only carry a sink (usually)."""
        zero = self.zero_rows(site)
        if not bool(zero.any()) or self.zero_rows_are_keys:
            return torch.arange(site.values.extent)
        self.left_out = True
        return (~zero).nonzero().flatten()

    def zero_rows(self, site: Site) -> torch.Tensor:
        """Which keys of a site have a value row that is zero for every token (sampled) and channel (sampled)."""
        keys = torch.arange(site.values.extent)
        zero = torch.ones(len(keys), dtype=torch.bool)
        for last in (False, True):
            coordinates = [c[[0, len(c) // 2, -1]] for c in self.base(last)]
            at = replay(site.path, self.output_index(*coordinates), self.sizes)
            _, index = site.values.indices(at)
            lanes = torch.zeros(index.numel(), dtype=torch.bool)
            for origin in self.follower.follow(site.values.rhs, index.flatten()).origins:
                if not isinstance(origin.node, fx.Node) and origin.node == 0:
                    lanes[origin.lanes] = True
            zero &= lanes.view(index.shape).all(0)
        return zero

    def by_origin(self, site: Site, keys: torch.Tensor) -> list[torch.Tensor]:
        """``keys`` cut where their value rows come from another node (parts of a cat, say)."""
        at = replay(site.path, self.output_index(*[c[:1] for c in self.base()]), self.sizes)
        trace = self.follower.follow(site.values.rhs, site.values.rhs_at(at[:1].expand(len(keys)), keys))
        origin = torch.zeros(len(keys), dtype=torch.int64)
        for number, end in enumerate(trace.origins):
            origin[end.lanes] = number
        cuts = ((origin[1:] != origin[:-1]) | (keys[1:] != keys[:-1] + 1)).nonzero().flatten() + 1
        return list(torch.tensor_split(keys, cuts))

    def segments(self, site: Site, keys: torch.Tensor) -> list[Segment] | Refused | None:
        """The segments of a site over its ``keys`` (increasing); None when its weights come from no query-key product
        at all, a refusal when they come from something that only looks like one."""
        at = replay(site.path, self.output_index(*[c[:1] for c in self.base()]), self.sizes)
        weights = site.values.lhs_at(at[:1].expand(len(keys)), keys)
        if site.fused is not None:
            reached = [Reach(site.node, torch.arange(len(keys)), weights, ())]
        else:
            reached = self.descent.scores(site.values.lhs, weights, self.is_score)
        if not reached:
            self._note_partial_scores(site, weights)
            return None
        covered = torch.zeros(len(keys), dtype=torch.int64)
        segments = []
        for reach in reached:
            covered[reach.lanes] += 1
            here = keys[reach.lanes]
            if bool((here[1:] - here[:-1] != 1).any()):
                return Refused("fmha", f"the keys of {reach.node.name} are not contiguous", reach.node)
            scores = site.fused.scores if site.fused is not None else self.score(reach.node)
            assert scores is not None  # is_score asked for one
            found = self._segment(site, at, here, reach, scores)
            if isinstance(found, Refused):
                return found
            segments.append(found)
        if bool((covered == 0).any()):
            key = int(keys[(covered == 0).nonzero()[0]])
            return Refused("fmha", f"key {key} has a value row but no query-key product", site.node)
        if bool((covered > 1).any()):
            return Refused("fmha", "a key's score comes from two products", site.node)
        return segments

    def _note_partial_scores(self, site: Site, weights: torch.Tensor) -> None:
        found = Descent(self.sizes).scores(site.values.lhs, weights[:1], lambda n: as_contraction(
            n, self.sizes, 2) is not None)
        if found and self.partial_scores is None:
            self.partial_scores = as_contraction(found[0].node, self.sizes, 2)

    def _segment(self, site: Site, at: torch.Tensor, keys: torch.Tensor, reach: Reach,
                 scores: Contraction) -> Segment | Refused:
        channels = self.axes.channels.size
        ends = torch.tensor([0, channels // 2, channels - 1])
        where = replay(site.path, self.output_index(*[c[ends] for c in self.base()]), self.sizes)
        value_index = site.values.rhs_at(where[None, :], keys[:, None]).flatten()
        values = self.descent.chain(site.values.rhs, value_index)
        failed: Reach | None = None
        for product in (scores, scores.swapped()):
            index = product.rhs_at(reach.index[:, None], ends[None, :]).flatten()
            rows = self.descent.chain(product.rhs, index, scaled=True)
            pairs = [(v, r) for r in reversed(rows) for v in values if v.node is r.node
                     and bool((v.index == r.index).all())]
            if not pairs and scores.node is product.node and rows[0].node in self.context.scratch:
                pairs = self._same_elements(rows[0], values)
            if pairs:
                queries = self.descent.chain(product.lhs, product.lhs_at(
                    reach.index[:1, None], torch.arange(channels)[None, :]).flatten(), scaled=True)
                return Segment(site, int(keys[0]), len(keys), reach.path, product, tuple(reversed(queries)),
                               tuple(r for _, r in pairs), tuple(v for v, _ in pairs))
            if failed is None or varies(rows[-1].index.view(len(keys), -1)[:, 0]):
                failed = rows[-1]                           # queries do not change with the key
        assert failed is not None
        return Refused("fmha", other_rows(values[-1], failed, len(keys), self.sizes), site.node)

    def _same_elements(self, rows: Reach, values: list[Reach]) -> list[tuple[Reach, Reach]]:
        """For keys that were joined here of parts: the source's own tensor that joins the same parts."""
        for value in values:
            trace = self.follower.follow(value.node, value.index)
            if len(trace.origins) < 2 or not same_origins(trace, self.follower.follow(rows.node, rows.index)):
                continue
            step = Step(rows.node, value.node, "equal")
            try:
                if bool((advance(step, rows.index, self.sizes) == value.index).all()):
                    self.parts_joined.update(o.node for o in trace.origins if isinstance(o.node, fx.Node))
                    return [(value, Reach(value.node, rows.lanes, value.index, (*rows.path, step), rows.factor))]
            except Unfollowed:
                continue
        return []


def other_rows(values: Reach, keys: Reach, count: int, sizes: Sizes) -> str:
    """How the values of ``count`` keys differ from the keys; both reach elements (key, channel) in that order."""
    end = "they are not the same rows"
    if values.node is not keys.node:
        return f"values come from {values.node.name}, keys from {keys.node.name}: {end}"
    name, shape = values.node.name, sizes.shape(values.node)
    mine, theirs = (_box(reach.index, shape) for reach in (values, keys))
    if mine != theirs:
        return f"values come from {name}[{mine}], keys from {name}[{theirs}]: {end}"
    at = int((values.index != keys.index).nonzero()[0])
    number = at // (len(values.index) // count)
    mine, theirs = (_box(reach.index[at:at + 1], shape) for reach in (values, keys))
    return (f"values and keys come from {name} in another order (key {number}: {name}[{mine}] as a value, "
            f"{name}[{theirs}] as a key): {end}")


def _box(index: torch.Tensor, shape: tuple[int, ...]) -> str:
    """The smallest slices that hold all elements of ``index``."""
    lines = torch.unravel_index(index, shape)
    bounds = [(int(line.min()), int(line.max())) for line in lines]
    return ", ".join(str(low) if low == high else f"{low}:{high + 1}" for low, high in bounds)
