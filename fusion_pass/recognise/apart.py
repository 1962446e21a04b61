"""Attention that the source computes piece by piece: a loop over tokens, requests, blocks of queries, or heads, whose
results are stacked or concatenated. Every piece is an attention of its own; if their operands line up (as the selects
or slices of one tensor do), together they are one attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.fx as fx

from ..elements.follow import Follower
from ..elements.layouts import Axis
from ..elements.sizes import Sizes
from .attention_match import AttentionMatch, Gathered, KeyPiece, Mask, Operand, OutputAxes
from .congruence import congruent
from .refusal import Refused

MAX_PIECES = 128


class _Apart(Exception):
    pass


@dataclass(frozen=True)
class Division:
    """The output is made of pieces along ``axis`` (position among tokens.., heads), which start at ``starts``."""

    axis: int
    starts: tuple[int, ...]
    sizes: tuple[int, ...]


def division(output: fx.Node, axes: OutputAxes, sizes: Sizes) -> Division | None:
    """Along which axis the output is put together from different nodes, if along any."""
    follower = Follower(sizes)
    for number, axis in enumerate((*axes.tokens, axes.heads)):
        if axis.size == 1:
            continue
        index = axes.offset + torch.arange(axis.size) * axis.stride
        origins = follower.follow(output, index).origins
        if len(origins) < 2:
            continue
        owner = torch.zeros(axis.size, dtype=torch.int64)
        for which, origin in enumerate(origins):
            owner[origin.lanes] = which
        cuts = (owner[1:] != owner[:-1]).nonzero().flatten() + 1
        starts = [0, *cuts.tolist()]
        if len(starts) != len(origins) or len(starts) > MAX_PIECES or axis.size_from is not None:
            return None
        ends = [*starts[1:], axis.size]
        return Division(number, tuple(starts), tuple(e - s for s, e in zip(starts, ends)))
    return None


def recognise_apart(axes: OutputAxes, found: Division,
                    recognise: Callable[[OutputAxes], AttentionMatch | Refused]) -> AttentionMatch | Refused:
    """One attention for all pieces, or why it is none."""
    matches = []
    for start, size in zip(found.starts, found.sizes):
        part = recognise(_part(axes, found.axis, start, size))
        if isinstance(part, Refused):
            return part
        matches.append(part)
    try:
        return _Joiner(axes, found, matches).joined()
    except _Apart as error:
        return Refused("fmha", f"the pieces of the output do not line up: {error}", matches[0].output)


def _part(axes: OutputAxes, number: int, start: int, size: int) -> OutputAxes:
    """The axes of one piece (all axes stay, with their sizes in the piece)."""
    every = [*axes.tokens, axes.heads]
    offset = axes.offset + start * every[number].stride
    every[number] = Axis(size, every[number].stride)
    return OutputAxes(tuple(every[:-1]), every[-1], axes.channels, offset)


class _Joiner:
    def __init__(self, axes: OutputAxes, found: Division, matches: list[AttentionMatch]):
        self.axes, self.found, self.matches = axes, found, matches
        self.first = matches[0]
        self.is_head = found.axis == len(axes.tokens)
        self.copies: set[fx.Node] = set()

    def joined(self) -> AttentionMatch:
        first = self.first
        for other in self.matches[1:]:
            if (other.form, other.roles, other.sink is None, other.sink_gate, len(other.kv), other.scale_node) != (
                    "dense", first.roles, first.sink is None, (), len(first.kv), first.scale_node):
                raise _Apart("they are of different kinds")
            if abs(other.scale - first.scale) > 1e-9 * abs(first.scale):
                raise _Apart("they have different softmax scales")
        if first.form != "dense" or first.sink_gate:
            raise _Apart("they are no plain attentions")
        pieces = [self.piece([m.kv[i] for m in self.matches]) for i in range(len(first.kv))]
        try:
            gathered = tuple(self.gathered([m.gathered[i] for m in self.matches])
                             for i in range(min(len(m.gathered) for m in self.matches)))
        except _Apart:
            gathered = ()
        query = self.operand([m.q for m in self.matches if m.q is not None], self.found.axis)
        sink = None if first.sink is None else self.operand(
            [m.sink for m in self.matches if m.sink is not None], 0 if self.is_head else None)
        return replace(
            first, axes=self.axes, q=query, kv=tuple(pieces), sink=sink,
            gathered=gathered if len(gathered) == len(pieces) else (),
            copies=frozenset(self.copies).union(*(m.copies for m in self.matches)),
            interior=frozenset().union(*(m.interior for m in self.matches)),
            casts=tuple(dict.fromkeys(c for m in self.matches for c in m.casts)))

    def piece(self, pieces: list[KeyPiece]) -> KeyPiece:
        axis = None if self.is_head else self.found.axis
        masks = []
        for same in zip(*(p.masks for p in pieces), strict=False):
            if len({(m.kind, m.coefficient) for m in same}) != 1:
                raise _Apart("their masks are of different kinds")
            masks.append(Mask(self.operand([m.operand for m in same], axis), same[0].kind, same[0].coefficient))
        if len({len(p.masks) for p in pieces}) != 1:
            raise _Apart("not all of them are masked")
        return KeyPiece(self.operand([p.rows for p in pieces], axis), tuple(masks))

    def gathered(self, parts: list[Gathered]) -> Gathered:
        if self.is_head or len({(g.pool, g.wrapped, g.first, g.steps) for g in parts}) != 1:
            raise _Apart("their pools differ")
        return replace(parts[0], indices=self.operand([g.indices for g in parts], self.found.axis))

    def operand(self, operands: list[Operand], axis: int | None) -> Operand:
        """One operand of the pieces' operands; ``axis`` None: it must be the same for all of them."""
        first = operands[0]
        shape = [a for n, a in enumerate(first.axes) if n != axis]
        for other in operands[1:]:
            same = [a for n, a in enumerate(other.axes) if n != axis] == shape
            if other.cuts or not same or not congruent(other.node, first.node):
                raise _Apart(f"{first.node.name} and {other.node.name} are no parts of one tensor")
            self.copies |= {other.node} - {first.node}
        starts, sizes = self.found.starts, self.found.sizes
        if axis is None:
            if any(other.offset != first.offset for other in operands):
                raise _Apart(f"the pieces read different parts of {first.node.name}")
            return replace(first, fallbacks=())
        step = (operands[1].offset - first.offset) // (starts[1] - starts[0])
        for operand, start, size in zip(operands, starts, sizes):
            if operand.offset != first.offset + start * step or (size > 1 and operand.axes[axis].stride != step):
                raise _Apart(f"the pieces read scattered parts of {first.node.name}")
        axes = list(first.axes)
        axes[axis] = Axis(sum(sizes), step)
        return Operand(first.node, first.offset, tuple(axes))
