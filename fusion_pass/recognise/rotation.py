"""The inverse rotation, recognised by the polynomials of the elements.

Given a node that may hold the rotated attention output (in any layout in which the channels of a head are innermost),
``recognise_rotation`` finds the tensor it was rotated from (where the untouched channels come from), the head's
channels, the axes of the rest, and for every rotated pair proves at samples

    even lane: o[e]*cos + o[e+1]*sin        odd lane: o[e+1]*cos - o[e]*sin

with cos and sin elements that depend on the token and the pair only. Formula: rotation by the conjugate phase of
interleaved pairs (2i, 2i+1), as all public DeepSeek-V4 implementations apply it to the attention output.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx

from ..elements.follow import Follower, Through
from ..elements.layouts import Axis, row_major
from ..elements.polynomials import Atom, Complex, Poly, Value
from ..elements.sizes import Sizes
from ..elements.symbolic import Symbolic, describe
from .refusal import Refused
from .structure import OuterAxis, Structure

TABLE_ADDRESS = "the table is not addressed by token and pair alone"


@dataclass(frozen=True)
class Table:
    """Where cos (or sin) of pair i lives: ``node[offset + axis strides + i*pair]``; ``part`` of a complex table."""

    node: fx.Node
    part: str
    negated: bool
    offset: int
    pair: int
    half_from: tuple[fx.Node, int] | None = None    # the dimension that holds the pairs, where its size is symbolic


@dataclass(frozen=True)
class Rotation:
    """``node`` holds the inverse rotation of ``source``: element (outer coordinates, channel d) of ``node`` is the
    rotated element ``offset + outer strides + d*channel_stride`` of ``source``."""

    node: fx.Node
    source: fx.Node
    offset: int
    axes: tuple[OuterAxis, ...]
    head_dim: int
    channel_stride: int
    rope_start: int
    cos: Table
    sin: Table

    @property
    def half(self) -> int:
        return (self.head_dim - self.rope_start) // 2


@dataclass
class _Sample:
    outer: torch.Tensor
    pair: int
    even: Value
    odd: Value
    cos: Atom | None = None
    sin: Atom | None = None


def recognise_rotation(found: Structure, sizes: Sizes, follower: Follower,
                       through: Through | None) -> Rotation | Refused:
    """Prove the changed channels of ``found`` to be the inverse rotation, and find its tables."""
    rotation = _recognise(found, sizes, follower, through)
    if isinstance(rotation, Refused) and rotation.node is found.node and TABLE_ADDRESS in rotation.reason:
        finer = _split_at_periods(found, sizes, follower, through)
        if finer is not None:
            return _recognise(finer, sizes, follower, through)
        # Rows of a table that the source picks by constants, in some order: then the picked rows are the table.
        sizes.loads_move = False
        try:
            again = _recognise(found, sizes, follower, through)
        finally:
            sizes.loads_move = True
        return again if isinstance(again, Rotation) else rotation
    return rotation


def _split_at_periods(found: Structure, sizes: Sizes, follower: Follower, through: Through | None) -> Structure | None:
    """Sequences that follow one another as one axis of tokens: where the tables start again, that is two axes."""
    axes: list[OuterAxis] = []
    for number, axis in enumerate(found.axes):
        at = torch.tensor([0, *(d for d in range(1, axis.size) if axis.size % d == 0)])
        if axis.size_from is not None or len(at) < 3:
            axes.append(axis)
            continue
        outer = torch.zeros(len(at), len(found.axes), dtype=torch.int64)
        outer[:, number] = at
        lanes = found.here_index(outer, torch.tensor(found.rope_start))
        engine = Symbolic(sizes, frozenset([found.source]))
        index = torch.zeros(len(at), dtype=torch.int64)
        for origin in follower.follow(found.node, lanes, through=through).origins:
            for lane, value in zip(origin.lanes.tolist(), engine.values(origin.node, origin.index)):
                terms = _split(value, found.source)
                if not terms:
                    return None
                index[lane] = terms[min(terms)][0].index
        follower.visits += engine.visits
        again = at[1:][index[1:] == index[0]]
        period = int(again[0]) if len(again) else axis.size
        if 1 < period < axis.size:
            axes.append(OuterAxis(axis.size // period, axis.source * period, axis.here * period, 0, 0))
        axes.append(replace(axis, size=period) if period > 1 else axis)
    return replace(found, axes=tuple(axes)) if len(axes) > len(found.axes) else None


def _recognise(found: Structure, sizes: Sizes, follower: Follower, through: Through | None) -> Rotation | Refused:
    half = (found.head_dim - found.rope_start) // 2
    samples = _sample(found, sizes, follower, through, half)
    outer_at = torch.stack([s.outer for s in samples])
    first = torch.tensor([found.rope_start + 2 * s.pair for s in samples])
    addresses = torch.stack([found.source_index(outer_at, first), found.source_index(outer_at, first + 1)], 1).tolist()
    for sample, at in zip(samples, addresses):
        refused = _check_pair(found, sizes, sample, half, at)
        if refused is not None:
            return refused
    fitted = []
    for name in ("cos", "sin"):
        table = _fit(found, samples, name, half)
        if isinstance(table, str):
            return Refused("inverse_rope", table, found.node)
        fitted.append((replace(table[0], half_from=_half_from(table[0], half, sizes)), table[1]))
    (cos, cos_strides), (sin, sin_strides) = fitted
    axes = tuple(OuterAxis(a.size, a.source, a.here, c, s, a.size_from)
                 for a, c, s in zip(found.axes, cos_strides, sin_strides))
    return Rotation(found.node, found.source, found.offset, axes, found.head_dim, found.channel_stride,
                    found.rope_start, cos, sin)


def _sample(found: Structure, sizes: Sizes, follower: Follower, through: Through | None, half: int) -> list[_Sample]:
    count = len(found.axes)
    outers = [torch.zeros(count, dtype=torch.int64)]
    for number, axis in enumerate(found.axes):
        for coordinate in sorted({1, axis.size // 2, axis.size - 1} - {0}):
            outer = torch.zeros(count, dtype=torch.int64)
            outer[number] = coordinate
            outers.append(outer)
    outers.extend(found.random_outer(3, seed=2))
    pairs = sorted({0, 1, half // 2, half - 1} & set(range(half)))
    samples = [_Sample(outer, pair, Poly({}), Poly({})) for outer in outers for pair in pairs]
    outer_at = torch.stack([s.outer for s in samples for _ in (0, 1)])
    channel = torch.tensor([found.rope_start + 2 * s.pair + odd for s in samples for odd in (0, 1)])
    trace = follower.follow(found.node, found.here_index(outer_at, channel), through=through)
    engine = Symbolic(sizes, frozenset([found.source]))
    values: list[Value] = [Poly({})] * len(channel)
    for origin in trace.origins:
        at = origin.index if origin.index is not None else torch.zeros(len(origin.lanes), dtype=torch.int64)
        for lane, value in zip(origin.lanes.tolist(), engine.values(origin.node, at)):
            values[lane] = value
    follower.visits += engine.visits
    for number, sample in enumerate(samples):
        sample.even, sample.odd = values[2 * number], values[2 * number + 1]
    return samples


def _check_pair(found: Structure, sizes: Sizes, sample: _Sample, half: int, at: list[int]) -> Refused | None:
    """Both lanes of one pair must be the inverse rotation; fills the sample's cos and sin atoms. ``at``: the source
    elements of the pair's two lanes."""
    even, odd = _split(sample.even, found.source), _split(sample.odd, found.source)
    if even is not None and odd is not None and set(even) == set(odd) == set(at):
        (cos, a), (sin, b) = even[at[0]], even[at[1]]
        (cos2, c), (sin2, d) = odd[at[1]], odd[at[0]]
        if cos == cos2 and sin == sin2 and (a, b, c, d) == (1.0, 1.0, 1.0, -1.0):
            sample.cos, sample.sin = cos, sin
            return None
    return Refused("inverse_rope", _explain(found, sizes, sample, half, at, even, odd), found.node)


def _split(value: Value, source: fx.Node) -> dict[int, tuple[Atom, float]] | None:
    """A bilinear polynomial as {source element: (table atom, coefficient)}."""
    if isinstance(value, Complex):
        return None
    result: dict[int, tuple[Atom, float]] = {}
    for monomial, coefficient in value.terms.items():
        mine = [a for a in monomial if a.node is source]
        tables = [a for a in monomial if a.node is not source]
        if len(mine) != 1 or len(tables) != 1 or mine[0].index in result:
            return None
        result[mine[0].index] = (tables[0], coefficient)
    return result


def _explain(found: Structure, sizes: Sizes, sample: _Sample, half: int, at: list[int],
             even: dict[Any, Any] | None, odd: dict[Any, Any] | None) -> str:
    names = {found.source: "o"}
    channel = found.rope_start + 2 * sample.pair
    lane, value, want = (channel, sample.even, "+") if not _is_even_lane(even, at) else (channel + 1, sample.odd, "-")
    expected = (f"o[{channel}]*cos[{sample.pair}] + o[{channel + 1}]*sin[{sample.pair}]" if want == "+" else
                f"o[{channel + 1}]*cos[{sample.pair}] - o[{channel}]*sin[{sample.pair}]")
    text = describe(value, sizes, names)
    text = text if len(text) < 400 else text[:400] + " ..."
    hint = ""
    if even is not None and odd is not None and set(even) == set(odd) == set(at):
        signs = (even[at[0]][1], even[at[1]][1], odd[at[1]][1], odd[at[0]][1])
        if signs == (1.0, -1.0, 1.0, 1.0):
            hint = ": this is the forward rotation"
        elif even[at[0]][0] != odd[at[1]][0] or even[at[1]][0] != odd[at[0]][0]:
            hint = ": the two lanes of the pair use different cos or sin elements"
    elif even is not None and set(even) == {at[0], at[0] + half * found.channel_stride}:
        hint = f": pairs are half a rotation apart (channel {channel} with {channel + half}), not interleaved"
    return f"channel {lane}: found {text}, expected {expected}{hint}"


def _is_even_lane(even: dict[Any, Any] | None, at: list[int]) -> bool:
    return even is not None and set(even) == set(at) and even[at[0]][1] == 1.0 and even[at[1]][1] == 1.0


def _fit(found: Structure, samples: list[_Sample], name: str, half: int) -> tuple[Table, list[int]] | str:
    """The table's strides along every outer axis and along the pairs, checked on all samples."""
    atoms = {(tuple(s.outer.tolist()), s.pair): getattr(s, name) for s in samples}
    zero = (0,) * len(found.axes)
    first: Atom = atoms[zero, 0]
    pair = atoms[zero, 1].index - first.index if half > 1 else 0
    strides = []
    for number in range(len(found.axes)):
        one = tuple(int(i == number) for i in range(len(found.axes)))
        strides.append(atoms[one, 0].index - first.index)
    for (outer, i), atom in atoms.items():
        index = first.index + sum(s * c for s, c in zip(strides, outer)) + i * pair
        if (atom.node, atom.part, atom.negated) != (first.node, first.part, first.negated) or atom.index != index:
            return (f"{name} of token {outer}, pair {i} is element {atom.index} of {atom.node.name}, expected element "
                    f"{index} of {first.node.name}: {TABLE_ADDRESS}")
    return Table(first.node, first.part, first.negated, first.index, pair), strides


def _half_from(table: Table, half: int, sizes: Sizes) -> tuple[fx.Node, int] | None:
    """With ``dynamic=True`` the width of a table that is a graph's input is a symbol as well."""
    shape = sizes.shape(table.node)
    for dim, (step, length) in enumerate(zip(row_major(shape), shape)):
        if step == table.pair and length == half and not isinstance(table.node.meta["val"].shape[dim], int):
            return table.node, dim
    return None


def source_axes(rotation: Rotation, axes: tuple[OuterAxis, ...]) -> list[Axis]:
    """Those outer axes as axes of the source tensor."""
    return [Axis(a.size, a.source, a.size_from) for a in axes]
