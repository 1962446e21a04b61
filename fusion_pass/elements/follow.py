"""Follow many elements back to the nodes that compute them, through moves and float casts only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from .moves import Piece, is_float_cast, sources
from .sizes import Sizes

Through = Callable[[fx.Node, torch.Tensor], list[Piece] | None]


@dataclass
class Origin:
    """Elements of one asked vector that all come from ``node`` (or are the number ``node``)."""

    node: fx.Node | float
    lanes: torch.Tensor
    index: Any  # torch.Tensor, or None for a number


@dataclass
class Trace:
    """Result of ``follow``: the origins, and every node that was passed on the way (casts apart)."""

    origins: list[Origin]
    passed: set[fx.Node] = field(default_factory=set)
    casts: list[fx.Node] = field(default_factory=list)

    def only(self) -> Origin | None:
        """The single origin of all lanes, or None."""
        return self.origins[0] if len(self.origins) == 1 else None


class Follower:
    """Follows elements; counts the node visits (tests bound the pass's cost by it)."""

    def __init__(self, sizes: Sizes):
        self.sizes = sizes
        self.visits = 0

    def follow(self, node: fx.Node, index: torch.Tensor, stop: frozenset[fx.Node] = frozenset(),
               through: Through | None = None) -> Trace:
        """Back from ``index`` of ``node`` until a node that computes, a graph input, or a node in ``stop``.

        Lanes that reach the same node by different ways end in one Origin. ``through`` may let a computing node pass:
        it names the operand elements to go on with.
        """
        trace = Trace([])
        ends: dict[fx.Node | float, list[tuple[torch.Tensor, Any]]] = {}
        work: list[tuple[fx.Node | float, Any, torch.Tensor]] = [
            (node, index, torch.arange(len(index)))]
        while work:
            here, at, lanes = work.pop()
            pieces = None
            if isinstance(here, fx.Node) and here not in stop:
                self.visits += 1
                self.sizes.seen.add(here)
                pieces = sources(here, at, self.sizes)
                if pieces is None and through is not None:
                    pieces = through(here, at)
            if pieces is None or not isinstance(here, fx.Node):
                ends.setdefault(here, []).append((lanes, at))
                continue
            trace.passed.add(here)
            if is_float_cast(here):
                trace.casts.append(here)
            for piece in pieces:
                work.append((piece.source, piece.index, lanes if piece.lanes is None else lanes[piece.lanes]))
        for end, parts in ends.items():
            lanes = torch.cat([p[0] for p in parts])
            order = torch.argsort(lanes)
            at = None if parts[0][1] is None else torch.cat([p[1] for p in parts])[order]
            trace.origins.append(Origin(end, lanes[order], at))
        trace.origins.sort(key=lambda origin: int(origin.lanes[0]) if len(origin.lanes) else -1)
        return trace
