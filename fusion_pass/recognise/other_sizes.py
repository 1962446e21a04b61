"""In words: why a chain that holds for the sizes of the user's example does not hold for others."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.fx as fx

from ..elements.sizes import Sizes
from .chain_types import Chain
from .refusal import Refused

NAMED = 3               # symbolic sizes that a reason names at most


def what_differs(chain: Chain, other: Chain | Refused | None, graph: fx.Graph, sizes: Sizes,
                 other_sizes: Sizes) -> str:
    """The reason of a near miss. ``chain`` was found under ``sizes``; ``other`` is what its contraction came to under
    ``other_sizes``: another chain, a refusal, or (None) nothing that looks like a chain."""
    begin = "the chain holds for the example's sizes but not for others"
    moved = list(_moved(graph, sizes, other_sizes))
    if not isinstance(other, Chain):
        why = "no rotated heads stand before the product" if other is None else other.reason
        return f"{begin}: with {_listed(moved)}: {why}"
    mine, theirs = chain.quantities(), other.quantities()
    name = next(name for name in mine if mine[name] != theirs[name])
    # A quantity that goes with one size is told by that size.
    same = [m for m in moved if m[1:] == (mine[name], theirs[name])] or moved
    return f"{begin}: {name} is {_text(mine[name])} in the example, but {_text(theirs[name])} with {_listed(same)}"


def _moved(graph: fx.Graph, sizes: Sizes, other: Sizes) -> Iterator[tuple[str, int, int]]:
    """(size, in the example, in the other assignment) of the inputs' sizes that change, every symbol once."""
    named: set[object] = set()
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt) and not size.node.is_constant() and size.node.expr not in named:
                named.add(size.node.expr)
                mine, theirs = int(sizes.number(size)), int(other.number(size))
                if mine != theirs:
                    yield f"{node.name}.shape[{dim}]", mine, theirs


def _listed(moved: list[tuple[str, int, int]]) -> str:
    texts = [f"{name} = {theirs} instead of {mine}" for name, mine, theirs in moved]
    more = len(texts) - NAMED
    return ", ".join(texts[:NAMED]) + (f" and {more} more sizes changed" if more > 0 else "") or "other sizes"


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(_text(v) for v in value)
    return "absent" if value is None else str(value)
