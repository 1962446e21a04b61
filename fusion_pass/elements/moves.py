"""Operators that only move elements.

``sources(node, index, sizes)`` answers, for a vector of row-major indices into ``node``, from which input and which
index in it every element comes. All pure views share one rule: the view is applied to a meta tensor with the input's
shape and row-major strides, and the strides and offset of the result are the map. Operators that join tensors (cat,
scatter of a slice, padding ...) send different elements to different inputs, hence a list of pieces.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from ..fx_access import args_of, kwargs_of
from .sizes import Sizes

aten = torch.ops.aten
prims = torch.ops.prims


@dataclass(frozen=True)
class Piece:
    """Some of the asked elements: ``lanes`` (positions in the asked vector; None = all) come from ``source``.

    ``source`` is a node (then ``index`` are the row-major indices into it) or a number that all lanes are equal to.
    """

    source: fx.Node | float
    index: Any  # torch.Tensor, or None where the source is a number
    lanes: torch.Tensor | None = None


# The same elements in the same row-major order.
SAME_ORDER = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.clone.default, aten.contiguous.default,
    aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default, aten.lift.default, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.flatten.using_ints, aten.unflatten.int,
    aten.view_copy.default, aten.unsqueeze_copy.default, aten._assert_tensor_metadata.default, aten.ravel.default,
    aten._reshape_alias.default, aten.dropout.default,
}
# Views whose map is read off the strides of the same view of a meta tensor.
STRIDED = {
    aten.permute.default, aten.transpose.int, aten.t.default, aten.slice.Tensor, aten.select.int, aten.unfold.default,
    aten.diagonal.default, aten.movedim.int, aten.movedim.intlist, aten.swapaxes.default, aten.numpy_T.default,
    aten.mT.default, aten.narrow.default, aten.permute_copy.default, aten.transpose_copy.int, aten.slice_copy.Tensor,
}
EXPANDING = {aten.expand.default, aten.expand_as.default, aten.broadcast_to.default, aten.expand_copy.default}
SPLITTING = {
    aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int, aten.tensor_split.sections,
    aten.tensor_split.indices, aten.split_with_sizes_copy.default, aten.unsafe_split.Tensor, aten.unsafe_chunk.default,
}
CASTS = {aten._to_copy.default, prims.convert_element_type.default, aten.to.dtype, aten.to.device,
         aten.to.dtype_layout, aten.type_as.default}


def unravel(index: torch.Tensor, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Row-major index -> one coordinate vector per dimension."""
    # Division is what costs here: none for dimensions of one element, and none for the outermost dimension.
    coordinates: list[torch.Tensor] = []
    zero = torch.zeros_like(index)
    wide = [dim for dim, size in enumerate(shape) if size != 1]
    outermost = wide[0] if wide else -1
    for dim in reversed(range(len(shape))):
        if shape[dim] == 1:
            coordinates.append(zero)
        elif dim == outermost:
            coordinates.append(index)
        else:
            quotient = torch.floor_divide(index, shape[dim])
            coordinates.append(torch.sub(index, quotient, alpha=shape[dim]))
            index = quotient
    return coordinates[::-1]


def ravel(coordinates: list[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    """One coordinate vector per dimension -> row-major index."""
    if not coordinates:
        return torch.zeros((), dtype=torch.int64)
    index = coordinates[0]
    for coordinate, size in zip(coordinates[1:], shape[1:]):
        index = index * size + coordinate if size != 1 else index
    return index


def broadcast_index(index: torch.Tensor, shape: tuple[int, ...], source_shape: tuple[int, ...]) -> torch.Tensor:
    """Row-major index into ``shape`` -> row-major index into a tensor of ``source_shape`` broadcast to it."""
    if shape == source_shape:
        return index
    if all(size == 1 for size in source_shape):
        return torch.zeros_like(index)
    coordinates = unravel(index, shape)[len(shape) - len(source_shape):]
    zero = torch.zeros_like(index)
    return ravel([zero if size == 1 else c for c, size in zip(coordinates, source_shape)], source_shape)


def _strided(index: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    result = torch.full_like(index, int(view.storage_offset()))
    for size, coordinate, stride in zip(view.shape, unravel(index, tuple(view.shape)), view.stride()):
        if stride and size != 1:
            result = torch.add(result, coordinate, alpha=stride)
    return result


def is_float_cast(node: fx.Node) -> bool:
    """A cast between ordinary floating types: the value stays, up to a rounding that is recorded, not followed."""
    if node.target not in CASTS or not isinstance(args_of(node)[0], fx.Node):
        return False
    before, after = args_of(node)[0].meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    if before.dtype == after.dtype:
        return True
    ordinary = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    return before.dtype in ordinary and after.dtype in ordinary


Rule = Callable[[fx.Node, torch.Tensor, Sizes], list[Piece] | None]


def sources(node: fx.Node, index: torch.Tensor, sizes: Sizes) -> list[Piece] | None:
    """Where the elements ``index`` of ``node`` come from, or None when ``node`` computes rather than moves.

    Ordinary float-to-float casts count as moves.
    """
    if node.op != "call_function":
        return None
    target = node.target
    if target in SAME_ORDER:
        if target is aten.dropout.default and args_of(node)[2]:
            return None
        return [Piece(args_of(node)[0], index)]
    if target in CASTS:
        return [Piece(args_of(node)[0], index)] if is_float_cast(node) else None
    if target in STRIDED:
        base = torch.empty(sizes.shape(args_of(node)[0]), device="meta", dtype=torch.int8)
        view = target(base, *[sizes.argument(a) for a in args_of(node)[1:]],
                      **{k: sizes.argument(v) for k, v in kwargs_of(node).items()})
        return [Piece(args_of(node)[0], _strided(index, view))]
    if target in EXPANDING:
        return [Piece(args_of(node)[0], broadcast_index(index, sizes.shape(node), sizes.shape(args_of(node)[0])))]
    rule = _RULES.get(target)
    return None if rule is None else rule(node, index, sizes)


def _getitem(node: fx.Node, index: torch.Tensor, sizes: Sizes) -> list[Piece] | None:
    parent, which = args_of(node)
    if not isinstance(parent, fx.Node) or parent.target not in SPLITTING:
        return None
    base = torch.empty(sizes.shape(args_of(parent)[0]), device="meta", dtype=torch.int8)
    views = parent.target(base, *[sizes.argument(a) for a in args_of(parent)[1:]],
                          **{k: sizes.argument(v) for k, v in kwargs_of(parent).items()})
    return [Piece(args_of(parent)[0], _strided(index, views[which]))]


def _dimension(node: fx.Node, position: int, default: int, rank: int, sizes: Sizes) -> int:
    value = args_of(node)[position] if len(args_of(node)) > position else kwargs_of(node).get("dim", default)
    return int(sizes.number(value)) % rank


def _cat(node: fx.Node, index: torch.Tensor, sizes: Sizes) -> list[Piece]:
    parts = [p for p in args_of(node)[0] if sizes.shape(p) != (0,)]
    shape = sizes.shape(node)
    dim = _dimension(node, 1, 0, len(shape), sizes)
    coordinates = unravel(index, shape)
    pieces, start = [], 0
    for part in parts:
        part_shape = sizes.shape(part)
        stop = start + part_shape[dim]
        lanes = ((coordinates[dim] >= start) & (coordinates[dim] < stop)).nonzero().flatten()
        if len(lanes):
            inner = [c[lanes] for c in coordinates]
            inner[dim] = inner[dim] - start
            pieces.append(Piece(part, ravel(inner, part_shape), lanes))
        start = stop
    return pieces


def _stack(node: fx.Node, index: torch.Tensor, sizes: Sizes) -> list[Piece]:
    shape = sizes.shape(node)
    dim = _dimension(node, 1, 0, len(shape), sizes)
    coordinates = unravel(index, shape)
    which = coordinates.pop(dim)
    pieces = []
    for number, part in enumerate(args_of(node)[0]):
        lanes = (which == number).nonzero().flatten()
        if len(lanes):
            inner = [c[lanes] for c in coordinates]
            at = ravel(inner, sizes.shape(part)) if inner else torch.zeros_like(lanes)
            pieces.append(Piece(part, at, lanes))
    return pieces


def _choose(inside: torch.Tensor, first: Piece, second: Piece) -> list[Piece]:
    """Lanes where ``inside`` from ``first``, the others from ``second`` (both given for all lanes)."""
    pieces = []
    for piece, chosen in ((first, inside), (second, ~inside)):
        lanes = chosen.nonzero().flatten()
        if len(lanes):
            pieces.append(Piece(piece.source, None if piece.index is None else piece.index[lanes], lanes))
    return pieces


def _pad(node: fx.Node, index: torch.Tensor, sizes: Sizes) -> list[Piece]:
    source, pads = args_of(node)[0], sizes.argument(args_of(node)[1])
    fill = sizes.argument(args_of(node)[2]) if len(args_of(node)) > 2 else kwargs_of(node).get("value", 0.0)
    shape, source_shape = sizes.shape(node), sizes.shape(source)
    coordinates = unravel(index, shape)
    inside = torch.ones_like(index, dtype=torch.bool)
    for position in range(len(pads) // 2):
        dim = len(shape) - 1 - position
        coordinates[dim] = coordinates[dim] - pads[2 * position]
        inside &= (coordinates[dim] >= 0) & (coordinates[dim] < source_shape[dim])
    return _choose(inside, Piece(source, ravel(coordinates, source_shape)), Piece(float(fill or 0.0), None))


def _slice_scatter(node: fx.Node, index: torch.Tensor, sizes: Sizes) -> list[Piece]:
    names = ("input", "src", "dim", "start", "end", "step")
    given = dict(zip(names, args_of(node))) | dict(kwargs_of(node))
    base = given["input"] if "input" in given else given["self"]
    src = given["src"]
    shape, src_shape = sizes.shape(node), sizes.shape(src)
    dim = int(sizes.number(given.get("dim", 0))) % len(shape)
    step = int(sizes.number(given.get("step", 1)))
    start = given.get("start")
    start = 0 if start is None else int(sizes.number(start))
    start = min(max(start + shape[dim] if start < 0 else start, 0), shape[dim])
    coordinates = unravel(index, shape)
    offset = coordinates[dim] - start
    inside = (offset >= 0) & (offset % step == 0) & (offset // step < src_shape[dim])
    inner = list(coordinates)
    inner[dim] = offset // step
    return _choose(inside, Piece(src, ravel(inner, src_shape)), Piece(base, index))


def _select_scatter(node: fx.Node, index: torch.Tensor, sizes: Sizes) -> list[Piece]:
    base, src = args_of(node)[0], args_of(node)[1]
    shape = sizes.shape(node)
    dim = int(sizes.number(args_of(node)[2])) % len(shape)
    which = int(sizes.number(args_of(node)[3])) % shape[dim]
    coordinates = unravel(index, shape)
    inside = coordinates.pop(dim) == which
    at = ravel(coordinates, sizes.shape(src)) if coordinates else torch.zeros_like(index)
    return _choose(inside, Piece(src, at), Piece(base, index))


def _copy(node: fx.Node, index: torch.Tensor, sizes: Sizes) -> list[Piece]:
    return [Piece(args_of(node)[1], broadcast_index(index, sizes.shape(node), sizes.shape(args_of(node)[1])))]


def _flip(node: fx.Node, index: torch.Tensor, sizes: Sizes) -> list[Piece]:
    shape = sizes.shape(node)
    coordinates = unravel(index, shape)
    for dim in sizes.argument(args_of(node)[1]):
        coordinates[dim] = shape[dim] - 1 - coordinates[dim]
    return [Piece(args_of(node)[0], ravel(coordinates, shape))]


def _roll(node: fx.Node, index: torch.Tensor, sizes: Sizes) -> list[Piece] | None:
    if not sizes.loads_move:
        return None
    shape = sizes.shape(node)
    shifts = sizes.argument(args_of(node)[1])
    dims = sizes.argument(args_of(node)[2]) if len(args_of(node)) > 2 else []
    shifts = [shifts] if isinstance(shifts, int) else shifts
    dims = [dims] if isinstance(dims, int) else dims
    if not dims:
        return [Piece(args_of(node)[0], (index - shifts[0]) % max(sizes.numel(node), 1))]
    coordinates = unravel(index, shape)
    for shift, dim in zip(shifts, dims):
        coordinates[dim] = (coordinates[dim] - shift) % shape[dim]
    return [Piece(args_of(node)[0], ravel(coordinates, shape))]


def _load(node: fx.Node, index: torch.Tensor, sizes: Sizes) -> list[Piece] | None:
    from .loads import load
    return load(node, index, sizes)


def _store(node: fx.Node, index: torch.Tensor, sizes: Sizes) -> list[Piece] | None:
    from .loads import store
    return store(node, index, sizes)


def _repeat(node: fx.Node, index: torch.Tensor, sizes: Sizes) -> list[Piece]:
    source_shape, shape = sizes.shape(args_of(node)[0]), sizes.shape(node)
    coordinates = unravel(index, shape)[len(shape) - len(source_shape):]
    return [Piece(args_of(node)[0], ravel([c % s for c, s in zip(coordinates, source_shape)], source_shape))]


def _repeat_interleave(node: fx.Node, index: torch.Tensor, sizes: Sizes) -> list[Piece] | None:
    dim = args_of(node)[2] if len(args_of(node)) > 2 else kwargs_of(node).get("dim")
    times = int(sizes.number(args_of(node)[1]))
    if dim is None:
        return [Piece(args_of(node)[0], index // times)]
    shape, source_shape = sizes.shape(node), sizes.shape(args_of(node)[0])
    coordinates = unravel(index, shape)
    coordinates[dim] = coordinates[dim] // times
    return [Piece(args_of(node)[0], ravel(coordinates, source_shape))]


def _block_diag(node: fx.Node, index: torch.Tensor, sizes: Sizes) -> list[Piece]:
    row, column = unravel(index, sizes.shape(node))
    pieces, row0, column0 = [], 0, 0
    rest = torch.ones_like(index, dtype=torch.bool)
    for block in args_of(node)[0]:
        rows, columns = (sizes.shape(block) if len(sizes.shape(block)) == 2 else (1, sizes.numel(block)))
        inside = (row >= row0) & (row < row0 + rows) & (column >= column0) & (column < column0 + columns)
        lanes = inside.nonzero().flatten()
        if len(lanes):
            pieces.append(Piece(block, (row[lanes] - row0) * columns + column[lanes] - column0, lanes))
        rest &= ~inside
        row0, column0 = row0 + rows, column0 + columns
    lanes = rest.nonzero().flatten()
    if len(lanes):
        pieces.append(Piece(0.0, None, lanes))
    return pieces


def _diag_embed(node: fx.Node, index: torch.Tensor, sizes: Sizes) -> list[Piece]:
    given = dict(zip(("offset", "dim1", "dim2"), args_of(node)[1:])) | dict(kwargs_of(node))
    shape, source_shape = sizes.shape(node), sizes.shape(args_of(node)[0])
    dims = [int(sizes.number(given.get(name, default))) % len(shape) for name, default in (("dim1", -2), ("dim2", -1))]
    offset = int(sizes.number(given.get("offset", 0)))
    coordinates = unravel(index, shape)
    row, column = coordinates[dims[0]], coordinates[dims[1]]
    rest = [c for d, c in enumerate(coordinates) if d not in dims]
    return _choose(column - row == offset, Piece(args_of(node)[0], ravel([*rest, torch.minimum(row, column)],
                                                                         source_shape)), Piece(0.0, None))


def _triangle(keep_lower: bool) -> Rule:
    def rule(node: fx.Node, index: torch.Tensor, sizes: Sizes) -> list[Piece]:
        shape = sizes.shape(node)
        given = args_of(node)[1] if len(args_of(node)) > 1 else kwargs_of(node).get("diagonal", 0)
        diagonal = int(sizes.number(given))
        *_, row, column = unravel(index, shape)
        inside = (column - row <= diagonal) if keep_lower else (column - row >= diagonal)
        return _choose(inside, Piece(args_of(node)[0], index), Piece(0.0, None))
    return rule


def _constant(value_of: Callable[[fx.Node, Sizes], Any]) -> Rule:
    def rule(node: fx.Node, index: torch.Tensor, sizes: Sizes) -> list[Piece] | None:
        value = value_of(node, sizes)
        return None if not isinstance(value, (bool, int, float)) else [Piece(value, None)]
    return rule


def _filled(position: int) -> Rule:
    return _constant(lambda node, sizes: sizes.argument(args_of(node)[position]))


def _as_strided(node: fx.Node, index: torch.Tensor, sizes: Sizes) -> list[Piece] | None:
    value = args_of(node)[0].meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.is_contiguous():
        return None
    strides = sizes.argument(args_of(node)[2])
    offset = args_of(node)[3] if len(args_of(node)) > 3 else kwargs_of(node).get("storage_offset")
    result = torch.full_like(index, 0 if offset is None else int(sizes.number(offset)))
    for coordinate, stride in zip(unravel(index, sizes.shape(node)), strides):
        result = result + coordinate * stride
    return [Piece(args_of(node)[0], result)]


_RULES: dict[Any, Rule] = {
    operator.getitem: _getitem,
    aten.cat.default: _cat, aten.stack.default: _stack, aten.constant_pad_nd.default: _pad, aten.pad.default: _pad,
    aten.slice_scatter.default: _slice_scatter, aten.select_scatter.default: _select_scatter,
    aten.copy.default: _copy, aten.flip.default: _flip, aten.repeat.default: _repeat, aten.roll.default: _roll,
    aten.index.Tensor: _load, aten.index_select.default: _load, aten.gather.default: _load,
    aten.embedding.default: _load, aten._unsafe_index.Tensor: _load, aten.index_put.default: _store,
    aten._unsafe_index_put.default: _store, aten.index_copy.default: _store, aten.diag_embed.default: _diag_embed,
    aten.repeat_interleave.self_int: _repeat_interleave, aten.block_diag.default: _block_diag,
    aten.tril.default: _triangle(True), aten.triu.default: _triangle(False), aten.as_strided.default: _as_strided,
    aten.zeros.default: _constant(lambda n, s: 0.0), aten.zeros_like.default: _constant(lambda n, s: 0.0),
    aten.new_zeros.default: _constant(lambda n, s: 0.0), aten.ones.default: _constant(lambda n, s: 1.0),
    aten.ones_like.default: _constant(lambda n, s: 1.0), aten.new_ones.default: _constant(lambda n, s: 1.0),
    aten.full.default: _filled(1), aten.full_like.default: _filled(1), aten.new_full.default: _filled(2),
    aten.scalar_tensor.default: _filled(0), aten.fill.Scalar: _filled(1),
}


def is_move(node: fx.Node) -> bool:
    """Does ``node`` only move elements (judged by its operator; casts apart)?"""
    target = node.target
    return node.op == "call_function" and (
        target in SAME_ORDER or target in STRIDED or target in EXPANDING or target in SPLITTING
        or target in _RULES and _RULES[target] not in (_load, _store))
