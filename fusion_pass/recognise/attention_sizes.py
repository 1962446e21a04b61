"""One attention under two assignments of the size symbols: what it is for all sizes.

Offsets and sizes of an operand are concrete numbers. Whether 39 of 40 rows means "the first 39" or "all but the last"
only shows under a second assignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..elements.layouts import Axis, row_major
from ..elements.sizes import Sizes
from .attention_match import AttentionMatch, Cut, Gathered, KeyPiece, Mask, Operand, Partials
from .refusal import Refused


class _Disagreement(Exception):
    pass


def agreed(match: AttentionMatch, other: AttentionMatch, sizes: Sizes, other_sizes: Sizes) -> AttentionMatch | Refused:
    """``match`` (found under ``sizes``) in a form that also gives ``other`` (found under ``other_sizes``)."""
    compare = _Comparison(sizes, other_sizes)
    try:
        if (match.form, match.roles, match.sink is None, match.scale_node is None) != (
                other.form, other.roles, other.sink is None, other.scale_node is None):
            raise _Disagreement("its form changes")
        if abs(match.scale - other.scale) > 1e-9 * abs(match.scale):
            raise _Disagreement("the softmax scale changes")
        partials = None
        a, b = match.partials, other.partials
        if a is not None and b is not None:
            if (a.stacked, a.total is None) != (b.stacked, b.total is None):
                raise _Disagreement("the statistics change")
            total = None if a.total is None or b.total is None else compare.operands(a.total, b.total)
            partials = Partials(compare.operands(a.parts, b.parts), compare.operands(a.top, b.top), total, a.stacked,
                                a.stat_scale)
        return replace(
            match, partials=partials,
            q=None if match.q is None or other.q is None else compare.operand(match.q, other.q),
            kv=compare.pieces(match.kv, other.kv),
            sink=None if match.sink is None or other.sink is None else compare.operand(match.sink, other.sink),
            sink_gate=compare.masks(match.sink_gate, other.sink_gate),
            gathered=compare.gathered(match.gathered, other.gathered))
    except _Disagreement as error:
        return Refused("fmha", f"the attention is not the same for all sizes: {error}", match.output)


class _Comparison:
    def __init__(self, sizes: Sizes, other: Sizes):
        self.sizes, self.other = sizes, other

    def pieces(self, mine: Sequence[KeyPiece], others: Sequence[KeyPiece]) -> tuple[KeyPiece, ...]:
        if len(mine) != len(others):
            raise _Disagreement("the number of key pieces changes")
        return tuple(KeyPiece(self.operand(a.rows, b.rows), self.masks(a.masks, b.masks))
                     for a, b in zip(mine, others))

    def masks(self, mine: Sequence[Mask], others: Sequence[Mask]) -> tuple[Mask, ...]:
        if [(m.kind, m.operand.node) for m in mine] != [(m.kind, m.operand.node) for m in others]:
            raise _Disagreement("the masks change")
        return tuple(replace(a, operand=self.operand(a.operand, b.operand)) for a, b in zip(mine, others))

    def gathered(self, mine: Sequence[Gathered], others: Sequence[Gathered]) -> tuple[Gathered, ...]:
        """The gathered form where it holds for both; without it the dense form is left."""
        key = [(g.pool, g.wrapped, g.first, g.steps) for g in mine]
        if key != [(g.pool, g.wrapped, g.first, g.steps) for g in others]:
            return ()
        try:
            return tuple(replace(a, indices=self.operand(a.indices, b.indices)) for a, b in zip(mine, others))
        except _Disagreement:
            return ()

    def operands(self, mine: Sequence[Operand], others: Sequence[Operand]) -> tuple[Operand, ...]:
        if len(mine) != len(others):
            raise _Disagreement("the number of partials changes")
        return tuple(self.operand(a, b) for a, b in zip(mine, others))

    def operand(self, mine: Operand, other: Operand) -> Operand:
        candidates = [replace(mine, fallbacks=()), *mine.fallbacks]
        found = []
        for candidate in candidates:
            for counterpart in (other, *other.fallbacks):
                if counterpart.node is candidate.node:
                    both = self._both(candidate, counterpart)
                    if both is not None:
                        found.append(both)
        if not found:
            raise _Disagreement(f"{mine.node.name} is read in another way")
        return replace(found[0], fallbacks=tuple(found[1:]))

    def _both(self, mine: Operand, other: Operand) -> Operand | None:
        """The operand for both assignments, with its node cut along symbolic dimensions that it uses in part."""
        shape, other_shape = self.sizes.shape(mine.node), self.other.shape(mine.node)
        strides, other_strides = row_major(shape), row_major(other_shape)
        if shape == other_shape:
            # Keys that all tokens share have a token axis of stride 0, whatever its size.
            same = len(mine.axes) == len(other.axes) and mine.offset == other.offset and all(
                a.stride == b.stride and (a.size == b.size or a.stride == 0) for a, b in zip(mine.axes, other.axes))
            return mine if same else None
        starts = _coordinates(mine.offset, shape, strides)
        other_starts = _coordinates(other.offset, other_shape, other_strides)
        cuts: list[Cut] = []
        places: list[tuple[int, int] | None] = []       # (dimension, step in it) of every axis
        for a, b in zip(mine.axes, other.axes):
            place, other_place = _place(a, shape, strides), _place(b, other_shape, other_strides)
            if place != other_place and a.size > 1 and b.size > 1:
                return None
            places.append(place or other_place)
        sizes = list(shape)
        for dim, (length, other_length) in enumerate(zip(shape, other_shape)):
            along = [(a, b) for a, b, place in zip(mine.axes, other.axes, places) if place == (dim, 1)]
            inside = any(place is not None and place[0] == dim for place in places)
            if length == other_length or (len(along) != 1 and inside):
                if starts[dim] != other_starts[dim]:
                    return None
                continue
            size, other_size = (along[0][0].size, along[0][1].size) if along else (1, 1)
            cut = _cut(dim, (starts[dim], size, length), (other_starts[dim], other_size, other_length))
            if cut is None:
                return None
            if (cut.start, cut.end) != (0, None):
                cuts.append(cut)
                sizes[dim], starts[dim] = size, 0
        if not cuts:
            return mine
        strides = row_major(sizes)
        axes = []
        for axis, place in zip(mine.axes, places):
            if place is None or axis.stride == 0:
                axes.append(axis)
                continue
            dim, step = place
            is_cut = any(cut.dim == dim for cut in cuts)
            size_from = axis.size_from
            if is_cut and size_from is None and step == 1 and not _constant(mine, other, places, dim):
                size_from = (mine.node, dim)
            axes.append(Axis(axis.size, step * strides[dim], size_from))
        offset = sum(s * c for s, c in zip(strides, starts))
        return Operand(mine.node, offset, tuple(axes), (), tuple(cuts))


def _constant(mine: Operand, other: Operand, places: list[tuple[int, int] | None], dim: int) -> bool:
    return all(a.size == b.size for a, b, place in zip(mine.axes, other.axes, places) if place == (dim, 1))


def _coordinates(offset: int, shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    return [offset // step % length for step, length in zip(strides, shape)]


def _place(axis: Axis, shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int] | None:
    if axis.stride == 0 or axis.size == 1:
        return None
    for dim, (length, step) in enumerate(zip(shape, strides)):
        if step <= axis.stride < step * length and axis.stride % step == 0:
            return dim, axis.stride // step
    return None


def _cut(dim: int, first: tuple[int, int, int], second: tuple[int, int, int]) -> Cut | None:
    """start:end along a dimension that gives (start, size) for both lengths, negative numbers from the end."""
    (start, size, length), (other_start, other_size, other_length) = first, second
    end, other_end = start + size, other_start + other_size
    if start == other_start:
        begin = start
    elif length - start == other_length - other_start:
        begin = start - length
    else:
        return None
    if length - end == other_length - other_end:
        return Cut(dim, begin, None if end == length else end - length)
    return Cut(dim, begin, end) if end == other_end else None
