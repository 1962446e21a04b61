"""Loads and stores by index tensors: ``x[i]``, index_select, gather, embedding; ``x[i] = v``.

Where the indices are made in the graph from nothing (``torch.arange(64) ^ 1``, a list in the source) they only move
elements, as slices do; where they depend on data, the element rules of ``numeric_rules`` evaluate them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

from ..fx_access import args_of, kwargs_of
from .constants import constant_values, made_from_nothing
from .moves import Piece, broadcast_index, ravel, unravel
from .sizes import Sizes

aten = torch.ops.aten
INDEXED = (aten.index.Tensor, aten.index_select.default, aten.gather.default, aten.embedding.default,
           aten._unsafe_index.Tensor)
STORES = (aten.index_put.default, aten._unsafe_index_put.default, aten.index_copy.default)
WRITES = 1 << 14


class _DataDependent(Exception):
    pass


class BooleanIndex(Exception):
    """How many elements a boolean index reads depends on its values."""


def load_index(node: fx.Node, index: torch.Tensor, sizes: Sizes,
               values: Callable[[fx.Node, torch.Tensor], torch.Tensor]) -> tuple[fx.Node, torch.Tensor]:
    """Which elements of which tensor a load reads, given the index values (out-of-range ones wrap)."""
    target = node.target
    if target is aten.embedding.default:
        source, ids = args_of(node)[0], args_of(node)[1]
        width = sizes.shape(source)[1]
        return source, values(ids, index // width) % sizes.shape(source)[0] * width + index % width
    source = args_of(node)[0]
    shape, out_shape = sizes.shape(source), sizes.shape(node)
    coordinates = unravel(index, out_shape)
    if target is aten.index_select.default:
        dim = int(sizes.number(args_of(node)[1])) % len(shape)
        coordinates[dim] = values(args_of(node)[2], coordinates[dim]) % shape[dim]
        return source, ravel(coordinates, shape)
    if target is aten.gather.default:
        dim = int(sizes.number(args_of(node)[1])) % len(shape)
        coordinates[dim] = values(args_of(node)[2], index) % shape[dim]
        return source, ravel(coordinates, shape)
    indices = list(args_of(node)[1]) + [None] * (len(shape) - len(args_of(node)[1]))
    first, broadcast = _placed(indices, sizes)
    at_indices = coordinates[first:first + len(broadcast)]
    rest = coordinates[:first] + coordinates[first + len(broadcast):]
    where = ravel(at_indices, broadcast) if at_indices else torch.zeros_like(index)
    full: list[torch.Tensor] = []
    for dim, tensor in enumerate(indices):
        if tensor is None:
            full.append(rest.pop(0))
            continue
        value = values(tensor, broadcast_index(where, broadcast, sizes.shape(tensor)))
        if value.dtype == torch.bool:
            raise BooleanIndex
        full.append(value % shape[dim])
    return source, ravel(full, shape)


def _placed(indices: list[Any], sizes: Sizes) -> tuple[int, tuple[int, ...]]:
    """Where the indexed dimensions stand in the result, and their shape there."""
    used = [d for d, i in enumerate(indices) if i is not None]
    broadcast = torch.broadcast_shapes(*[sizes.shape(indices[d]) for d in used])  # type: ignore[no-untyped-call]
    adjacent = used == list(range(used[0], used[-1] + 1))
    return used[0] if adjacent else 0, tuple(broadcast)


def _index_tensors(node: fx.Node) -> list[fx.Node]:
    if node.target is aten.embedding.default:
        return [args_of(node)[1]]
    if node.target in (aten.index_select.default, aten.gather.default):
        return [args_of(node)[2]]
    return [i for i in args_of(node)[1] if i is not None]


def load(node: fx.Node, index: torch.Tensor, sizes: Sizes) -> list[Piece] | None:
    """A load as a move, when its indices are made from nothing."""
    if not sizes.loads_move or not all(made_from_nothing(i, sizes) for i in _index_tensors(node)):
        return None

    def values(tensor: fx.Node, at: torch.Tensor) -> torch.Tensor:
        found = constant_values(tensor, at, sizes)
        if found is None:
            raise _DataDependent
        return found

    try:
        source, at = load_index(node, index, sizes, values)
    except (_DataDependent, BooleanIndex):
        return None
    return [Piece(source, at)]


def store(node: fx.Node, index: torch.Tensor, sizes: Sizes) -> list[Piece] | None:
    """``x[i] = v`` as a move, when the indices are made from nothing and no element is written twice."""
    base, given, value = args_of(node)[:3]
    shape = sizes.shape(base)
    if node.target is aten.index_copy.default:
        dim, number, value = args_of(node)[1:4]
        given = [number if d == int(sizes.number(dim)) % len(shape) else None for d in range(len(shape))]
    elif len(args_of(node)) > 3 and args_of(node)[3] or kwargs_of(node).get("accumulate"):
        return None
    indices = list(given) + [None] * (len(shape) - len(given))
    used = [d for d, i in enumerate(indices) if i is not None]
    if not used or any(sizes.dtype(indices[d]) == torch.bool or not made_from_nothing(indices[d], sizes)
                       for d in used):
        return None
    first, broadcast = _placed(indices, sizes)
    writes = 1
    for size in broadcast:
        writes *= size
    if not 0 < writes <= WRITES:
        return None
    every = torch.arange(writes)
    targets = []
    for dim in used:
        found = constant_values(indices[dim], broadcast_index(every, broadcast, sizes.shape(indices[dim])), sizes)
        if found is None:
            return None
        targets.append(found % shape[dim])
    used_shape = tuple(shape[d] for d in used)
    written, order = ravel(targets, used_shape).sort()
    if bool((written[1:] == written[:-1]).any()):
        return None
    coordinates = unravel(index, shape)
    wanted = ravel([coordinates[d] for d in used], used_shape)
    at = torch.searchsorted(written, wanted).clamp_max(writes - 1)
    inside = written[at] == wanted
    rest = [c for d, c in enumerate(coordinates) if d not in used]
    rest_shape = [shape[d] for d in range(len(shape)) if d not in used]
    place = [*rest[:first], *unravel(order[at], broadcast), *rest[first:]]
    full = (*rest_shape[:first], *broadcast, *rest_shape[first:])
    from_value = broadcast_index(ravel(place, full), full, sizes.shape(value))
    pieces = []
    for source, chosen, where in ((value, inside, from_value), (base, ~inside, index)):
        lanes = chosen.nonzero().flatten()
        if len(lanes):
            pieces.append(Piece(source, where[lanes], lanes))
    return pieces
