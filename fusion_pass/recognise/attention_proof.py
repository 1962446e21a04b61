"""The proof that a graph computes attention: the same numbers as the formula, for random scores, rows, masks, sinks.

Query-key products are leaves: their value is a hash of the query and of the key row that they multiply, so no head's
channels are summed, and two products of the same query and row agree however the source tiles, splits or repeats them.
That they do multiply whole queries with whole key rows is checked apart (``check_product``).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.fx as fx

from ..elements.contractions import Contraction, contraction
from ..elements.follow import Follower, Origin
from ..elements.moves import broadcast_index
from ..elements.numeric import Numeric, Unevaluated, random_leaf
from ..elements.sizes import Sizes
from ..fx_access import args_of
from .attention_sites import Fused, Segment
from .descent import LOG_SOFTMAX, SOFTMAX, is_tensor, number_factors
from .paths import Path, replay

aten = torch.ops.aten
_ZERO_STATISTICS = {aten.amax.default, aten.amin.default, aten.max.dim, aten.max.default, aten.logsumexp.default,
                    aten.min.dim}
_UNIT_STATISTICS = {aten.sum.dim_IntList, aten.sum.default, aten.mean.dim}


@dataclass(frozen=True)
class Product:
    """A query-key product: from its operands to the nodes that hold queries and key rows. ``rows`` maps the latter to
    the factor that queries and rows were multiplied by on the way; ``lanes`` channels are the product's own, further
    ones are evaluated. ``joined``: the way to the (only) rows, where moves alone do not lead there."""

    scores: Contraction
    query_path: Path
    rows: dict[fx.Node, float]
    lanes: int
    joined: Path = ()


def raw_score(seed: int, query: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """The random product of the query that starts at element ``query`` with the row that starts at ``row``."""
    return random_leaf(seed)(query * (1 << 31) + row)


class Scored(Numeric):
    """Numeric evaluation with query-key products as leaves. ``spread``: the products are in (-spread, spread)."""

    def __init__(self, sizes: Sizes, leaves: dict[fx.Node, Callable[[torch.Tensor], torch.Tensor]],
                 constants: Callable[[fx.Node], object], products: dict[fx.Node, Product],
                 fused: dict[fx.Node, Fused], spread: float):
        super().__init__(sizes, leaves, constants)
        self.products, self.fused, self.spread = products, fused, spread
        self.follower = Follower(sizes)

    def _compute(self, node: fx.Node, index: torch.Tensor) -> torch.Tensor:
        self.sizes.seen.add(node)
        if node in self.fused:
            return self._attend(self.fused[node], index)
        product = self.products.get(node)
        if product is None:
            return super()._compute(node, index)
        value = self.product(product, index)
        found = product.scores
        if found.addend is not None and found.addend_scale:
            at = broadcast_index(index, self.sizes.shape(found.node), self.sizes.shape(found.addend))
            value = value + found.addend_scale * self.values(found.addend, at)
        return value

    def product(self, product: Product, index: torch.Tensor) -> torch.Tensor:
        """``scale * sum(query * row)`` of the outputs ``index``."""
        found = product.scores
        first = torch.zeros_like(index)
        result = torch.zeros(len(index), dtype=torch.float64)
        plain = torch.ones(len(index), dtype=torch.bool)
        if product.joined:
            (node,), at = product.rows, replay(product.joined, found.rhs_at(index, first), self.sizes)
            origins = [Origin(node, torch.arange(len(index)), at)]
        else:
            origins = self.follower.follow(found.rhs, found.rhs_at(index, first), frozenset(product.rows),
                                           number_factors(self.sizes)).origins
        for origin in origins:
            if origin.node not in product.rows:
                continue
            lanes = origin.lanes
            query = replay(product.query_path, found.lhs_at(index[lanes], first[lanes]), self.sizes)
            factor = self.spread * product.rows[origin.node]
            result[lanes] = factor * raw_score(_seed(origin.node), query, origin.index)
            plain[lanes] = False
            if found.extent > product.lanes:
                result[lanes] += self._sum(found, index[lanes], torch.arange(product.lanes, found.extent))
        rest = plain.nonzero().flatten()
        if len(rest):
            # Rows that are no keys (a sink as an extra row): whatever their product is.
            result[rest] = self._sum(found, index[rest], torch.arange(found.extent))
        return result * found.scale

    def _sum(self, found: Contraction, index: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        unique, where = torch.unique(index, return_inverse=True)
        left, right = found.indices(unique, k)
        lhs = self.values(found.lhs, left.flatten()).view(left.shape)
        return (lhs * self.values(found.rhs, right.flatten()).view(right.shape)).sum(1)[where]

    def fused_scores(self, fused: Fused, index: torch.Tensor) -> torch.Tensor:
        """Masked scores at the virtual index [b, h, s, n]."""
        scores = self.product(self.products[fused.scores.node], index)
        if fused.mask is not None:
            at = broadcast_index(index, fused.shape, self.sizes.shape(fused.mask))
            mask = self.values(fused.mask, at)
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        if fused.causal:
            _, _, s, n = fused.shape
            scores = scores.masked_fill(index % n > index // n % s, -torch.inf)
        return scores

    def _attend(self, fused: Fused, index: torch.Tensor) -> torch.Tensor:
        value = args_of(fused.scores.node)[2]
        _, kv_heads, keys, width = self.sizes.shape(value)
        _, h, s, n = fused.shape
        rows, where = torch.unique(index // width, return_inverse=True)
        virtual = (rows[:, None] * n + torch.arange(n)).flatten()
        weights = torch.softmax(self.fused_scores(fused, virtual).view(len(rows), n), 1)
        head = index // (h * s * width) * kv_heads + index // (s * width) % h * kv_heads // h
        at = (head[:, None] * n + torch.arange(n)) * width + (index % width)[:, None]
        return (weights[where] * self.values(value, at.flatten()).view(at.shape)).sum(1)


class Neutral(Numeric):
    """Evaluates attention weights with every row statistic made neutral (sums 1, maxima 0, softmax an exponential)
    and every product equal to ``raw``: what is left is how one score becomes one weight. Unknown inputs are
    ``unknown``."""

    def __init__(self, sizes: Sizes, leaves: dict[fx.Node, Callable[[torch.Tensor], torch.Tensor]],
                 constants: Callable[[fx.Node], object], products: dict[fx.Node, Contraction],
                 region: set[fx.Node], raw: float, unknown: float = 1.0):
        super().__init__(sizes, leaves, constants)
        self.products, self.region, self.raw, self.unknown = products, region, raw, unknown

    def _compute(self, node: fx.Node, index: torch.Tensor) -> torch.Tensor:
        if node in self.products:
            found = self.products[node]
            value = torch.full((len(index),), self.raw * found.scale, dtype=torch.float64)
            if found.addend is not None and found.addend_scale:
                at = broadcast_index(index, self.sizes.shape(node), self.sizes.shape(found.addend))
                value = value + found.addend_scale * self.values(found.addend, at)
            return value
        if node in self.region:
            target = node.target
            if target in SOFTMAX:
                return torch.exp(self.values(args_of(node)[0], index))
            if target in LOG_SOFTMAX:
                return self.values(args_of(node)[0], index)
            if target in _ZERO_STATISTICS or (len(node.args) == 2 and isinstance(node.args[0], fx.Node)
                                              and node.args[0].target in _ZERO_STATISTICS):
                return torch.zeros(len(index), dtype=torch.float64)
            if target in _UNIT_STATISTICS or contraction(node, self.sizes) is not None:
                return torch.ones(len(index), dtype=torch.float64)
            return super()._compute(node, index)
        try:
            return super()._compute(node, index)
        except Unevaluated:
            dtype = self.sizes.dtype(node)
            if dtype.is_floating_point or dtype == torch.bool:
                return torch.full((len(index),), self.unknown, dtype=torch.float64).to(
                    torch.bool if dtype == torch.bool else torch.float64)
            return torch.zeros(len(index), dtype=torch.int64)


def check_product(segment: Segment, query_at: int, rows_at: int, outputs: torch.Tensor, channels: int,
                  query_stride: int, row_stride: int, sizes: Sizes) -> str | None:
    """Whether the products ``outputs`` multiply channel by channel the query and the key row; else what is wrong."""
    found = segment.scores
    k = torch.arange(channels)
    left, right = found.indices(outputs, k)
    shape = left.shape
    query = replay(segment.queries[query_at].path, left.flatten(), sizes).view(shape)
    rows = replay(segment.rows[rows_at].path, right.flatten(), sizes).view(shape)
    for name, index, stride in (("query", query, query_stride), ("key", rows, row_stride)):
        wrong = (index != index[:, :1] + k * stride).nonzero()
        if len(wrong):
            return f"the product multiplies channel {int(wrong[0][1])} of the {name} out of order"
    return None


def _seed(node: fx.Node) -> int:
    return zlib.crc32(node.name.encode())


def node_leaf(node: fx.Node, spread: float = 1.0) -> Callable[[torch.Tensor], torch.Tensor]:
    """Random values of a node's elements."""
    return random_leaf(_seed(node) + 1, spread)


def mask_leaf(node: fx.Node, attempt: int = 0) -> Callable[[torch.Tensor], torch.Tensor]:
    """Random mask elements: half of a bool mask set; of a floating one, a third -inf-like, the others random."""
    leaf = random_leaf(_seed(node) + 2 + attempt)
    if node.meta["val"].dtype == torch.bool:
        return lambda index: leaf(index) > 0
    return lambda index: torch.where(leaf(index) > 0.4, -1e30, leaf(index))


def depends_on(node: fx.Node) -> str:
    """A node as a person knows it: its name, and for a tensor its dtype and shape."""
    if not is_tensor(node):
        return node.name
    value = node.meta["val"]
    return f"{node.name} ({str(value.dtype).removeprefix('torch.')} {list(value.shape)})"
