"""Remembered ways from an element back to an element that it depends on.

A ``Path`` is found once, for a few sampled elements, and then maps any other element of its start to the element of
its end: that is how the strides of an operand along tokens, heads, channels and keys are read off.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.fx as fx

from ..elements.contractions import contraction
from ..elements.follow import Follower, Trace
from ..elements.layouts import row_major
from ..elements.moves import broadcast_index, ravel, sources, unravel
from ..elements.sizes import Sizes
from ..fx_access import args_of

aten = torch.ops.aten
MEETING_DEPTH = 32


class Unfollowed(Exception):
    """A remembered way does not exist for some other element."""


@dataclass(frozen=True)
class Step:
    """From ``node`` to its operand ``operand``: ``kind`` is "move", "point" (pointwise, broadcast), "same" (softmax),
    "factor" (term ``fixed`` of a contraction; ``side`` names the operand), "term" (term ``fixed`` of a sum),
    "rows" (the mask of a boolean assignment), "scalar" (a single element), "meet" (the tensor that all parts of a
    joined one are taken from), "equal" (another tensor that joins the same parts)."""

    node: fx.Node
    operand: fx.Node
    kind: str
    fixed: int = 0
    side: str = ""


Path = tuple[Step, ...]


def advance(step: Step, index: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """The element of ``step.operand`` for every element ``index`` of ``step.node``."""
    node, operand = step.node, step.operand
    if step.kind == "move":
        result = torch.full_like(index, -1)
        sizes.seen.add(node)
        for piece in sources(node, index, sizes) or []:
            if piece.source is operand:
                if piece.lanes is None:
                    every: torch.Tensor = piece.index
                    return every
                result[piece.lanes] = piece.index
        if bool((result < 0).any()):
            raise Unfollowed(f"{node.name} takes elements from elsewhere than {operand.name}")
        return result
    if step.kind == "meet":
        return _meeting(node, index, operand, sizes)
    if step.kind == "equal":
        return _equal(node, index, operand, sizes)
    if step.kind == "point":
        return broadcast_index(index, sizes.shape(node), sizes.shape(operand))
    if step.kind == "same":
        return index
    if step.kind == "factor":
        found = contraction(node, sizes)
        assert found is not None
        at = found.lhs_at if step.side == "lhs" else found.rhs_at
        return at(index, torch.full_like(index, step.fixed))
    if step.kind == "term":
        return _reduced_index(node, index, step.fixed, sizes)
    if step.kind == "rows":
        return index // (sizes.numel(node) // max(sizes.numel(operand), 1))
    return torch.zeros_like(index)


def _meeting(node: fx.Node, index: torch.Tensor, operand: fx.Node, sizes: Sizes) -> torch.Tensor:
    """The elements of ``operand`` that those of ``node`` come from by moves, along whatever branches."""
    result = torch.full_like(index, -1)
    work: list[tuple[fx.Node, torch.Tensor, torch.Tensor, int]] = [(node, index, torch.arange(len(index)), 0)]
    while work:
        here, at, lanes, depth = work.pop()
        if here is operand:
            result[lanes] = at
            continue
        sizes.seen.add(here)
        pieces = sources(here, at, sizes) if depth < MEETING_DEPTH else None
        if pieces is None or not all(isinstance(piece.source, fx.Node) for piece in pieces):
            raise Unfollowed(f"{node.name} takes elements from elsewhere than {operand.name}")
        for piece in pieces:
            assert isinstance(piece.source, fx.Node)
            work.append((piece.source, piece.index, lanes if piece.lanes is None else lanes[piece.lanes], depth + 1))
    return result


def same_origins(first: Trace, second: Trace) -> bool:
    """Do two traces of as many elements end in the same elements, one by one?"""
    ends = {origin.node: origin for origin in second.origins}
    return len(first.origins) == len(second.origins) and all(
        a.node in ends and a.index is not None and torch.equal(a.lanes, ends[a.node].lanes)
        and torch.equal(a.index, ends[a.node].index) for a in first.origins)


def _equal(node: fx.Node, index: torch.Tensor, operand: fx.Node, sizes: Sizes) -> torch.Tensor:
    """The elements of ``operand`` that come from the same elements as those of ``node``: its dimensions are looked for
    among the strides of ``operand``, and every answer is compared by where both come from."""
    follower = Follower(sizes)
    strides: list[int] = []
    shape = sizes.shape(node)
    for size, here in zip(shape, row_major(shape)):
        at = torch.tensor([0, size // 2, size - 1])
        own = follower.follow(node, at * here)
        found = None
        for stride in (*row_major(sizes.shape(operand)), 0):
            if stride * (size - 1) < sizes.numel(operand) and same_origins(
                    follower.follow(operand, at * stride), own):
                found = stride
                break
        if found is None:
            raise Unfollowed(f"{node.name} and {operand.name} are not laid out alike")
        strides.append(found)
    result = sum((c * s for c, s in zip(unravel(index, shape), strides)), torch.zeros_like(index))
    if bool((result >= sizes.numel(operand)).any()) or not same_origins(
            follower.follow(operand, result), follower.follow(node, index)):
        raise Unfollowed(f"{node.name} and {operand.name} join other elements")
    return result


def replay(path: Path, index: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    for step in path:
        index = advance(step, index, sizes)
    return index


def reduced(node: fx.Node, sizes: Sizes) -> tuple[list[int], int, bool]:
    """(reduced dimensions, number of terms, keepdim) of a sum."""
    shape = sizes.shape(args_of(node)[0])
    dims = sizes.argument(node.args[1]) if len(node.args) > 1 else None
    dims = list(range(len(shape))) if not dims else [d % len(shape) for d in dims]
    total = 1
    for d in dims:
        total *= shape[d]
    keepdim = bool(node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False))
    return dims, total, keepdim


def _reduced_index(node: fx.Node, index: torch.Tensor, term: int, sizes: Sizes) -> torch.Tensor:
    shape = sizes.shape(args_of(node)[0])
    dims, _, keepdim = reduced(node, sizes)
    coordinates = unravel(index, sizes.shape(node))
    if keepdim:
        coordinates = [c for d, c in enumerate(coordinates) if d not in dims]
    inner = unravel(torch.full_like(index, term), tuple(shape[d] for d in dims))
    full: list[torch.Tensor] = []
    for d in range(len(shape)):
        full.append(inner[dims.index(d)] if d in dims else coordinates.pop(0))
    return ravel(full, shape)
