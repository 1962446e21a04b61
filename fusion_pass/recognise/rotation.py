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

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx

from ..elements.follow import Follower, Through
from ..elements.layouts import Axis, probe, radix, row_major
from ..elements.sizes import Sizes
from ..elements.symbolic import Atom, Complex, Poly, Symbolic, Value, describe
from .refusal import Refused

ROW = 2048
TABLE_ADDRESS = "the table is not addressed by token and pair alone"


@dataclass(frozen=True)
class OuterAxis:
    """An axis of the rotated output other than the channels: strides in the source, in the node, in the tables."""

    size: int
    source: int
    here: int
    cos: int
    sin: int
    size_from: tuple[fx.Node, int] | None = None

    @property
    def is_token(self) -> bool:
        """The rotation changes along it, so it runs over tokens."""
        return bool(self.cos or self.sin)


@dataclass(frozen=True)
class Table:
    """Where cos (or sin) of pair i lives: ``node[offset + axis strides + i*pair]``; ``part`` of a complex table."""

    node: fx.Node
    part: str
    negated: bool
    offset: int
    pair: int


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


@dataclass(frozen=True)
class Structure:
    """Where the untouched channels of ``node`` come from, before anything is known of the rotated ones."""

    node: fx.Node
    source: fx.Node
    offset: int
    axes: tuple[OuterAxis, ...]
    head_dim: int
    channel_stride: int
    rope_start: int

    def source_index(self, outer: torch.Tensor, channel: torch.Tensor) -> torch.Tensor:
        """``outer``: coordinates [M, number of axes]; ``channel`` [M]."""
        strides = torch.tensor([a.source for a in self.axes], dtype=torch.int64)
        return self.offset + (outer * strides).sum(1) + channel * self.channel_stride

    def here_index(self, outer: torch.Tensor, channel: torch.Tensor) -> torch.Tensor:
        strides = torch.tensor([a.here for a in self.axes], dtype=torch.int64)
        return (outer * strides).sum(1) + channel

    def random_outer(self, count: int, seed: int = 0) -> torch.Tensor:
        """``count`` random coordinates of the outer axes, [count, axes]."""
        generator = torch.Generator().manual_seed(seed)
        columns = [torch.randint(0, a.size, (count,), generator=generator) for a in self.axes]
        return torch.stack(columns, 1) if columns else torch.zeros(count, 0, dtype=torch.int64)


def read_structure(node: fx.Node, sizes: Sizes, follower: Follower, through: Through | None) -> Structure | None:
    """The layout of the untouched channels, or None when ``node`` is not a partly changed copy of one tensor."""
    numel, shape = sizes.numel(node), sizes.shape(node)
    row = torch.arange(min(numel, ROW))
    trace = follower.follow(node, row, through=through)
    if not trace.origins or not isinstance(trace.origins[0].node, fx.Node) or int(trace.origins[0].lanes[0]) != 0:
        return None
    source = trace.origins[0].node
    index = torch.full((len(row),), -1, dtype=torch.int64)
    index[trace.origins[0].lanes] = trace.origins[0].index
    inside = index >= 0
    if len(row) < 2 or not inside[1]:
        return None
    stride = int(index[1] - index[0])
    run = inside & (index == index[0] + row * stride)
    changed = (~run).nonzero()
    if len(changed) == 0 or bool(inside[int(changed[0])]):
        return None
    start = int(changed[0])
    back = inside[start:].nonzero()
    if len(back) == 0 and len(row) < numel:
        return None
    head_dim = start + int(back[0]) if len(back) else len(row)
    if (head_dim - start) % 2 or stride == 0:
        return None
    outer, inner = list(shape), 1
    while outer:
        inner *= outer.pop()
        if inner % head_dim == 0:
            break
    if inner % head_dim:
        return None
    outer_dims = len(outer)
    if inner // head_dim > 1:
        outer.append(inner // head_dim)
    axes: list[OuterAxis] = []
    for dim, (size, here) in enumerate(zip(outer, [s * head_dim for s in row_major(outer)])):
        if size == 1:
            continue
        only = follower.follow(node, probe(size) * here, through=through).only()
        if only is None or only.node is not source:
            return None
        parts = radix(only.index - int(index[0]), size)
        if parts is None:
            return None
        parts = _split_at_source_dims(parts, source, sizes)
        axes.extend(_axes(node, source, dim if dim < outer_dims else None, parts, here, sizes))
    found = Structure(node, source, int(index[0]), tuple(axes), head_dim, stride, start)
    outer_at = found.random_outer(48)
    channel = torch.randint(0, start, (48,), generator=torch.Generator().manual_seed(1))
    only = follower.follow(node, found.here_index(outer_at, channel), through=through).only()
    if only is None or only.node is not source or not bool(
            (only.index == found.source_index(outer_at, channel)).all()):
        return None
    return found


def _split_at_source_dims(parts: list[tuple[int, int]], source: fx.Node, sizes: Sizes) -> list[tuple[int, int]]:
    """An axis that runs over two dimensions of the source (tokens and groups of heads, say) becomes two axes."""
    borders = row_major(sizes.shape(source))
    result = []
    for size, stride in parts:
        inner: list[tuple[int, int]] = []
        for border in sorted(borders):
            count = border // stride if stride > 0 else 0
            if stride > 0 and border % stride == 0 and 1 < count < size and size % count == 0:
                inner.append((count, stride))
                size, stride = size // count, border
        result.extend([(size, stride), *reversed(inner)])
    return result


def _axes(node: fx.Node, source: fx.Node, dim: int | None, parts: list[tuple[int, int]], here: int,
          sizes: Sizes) -> list[OuterAxis]:
    """Axes of one dimension of ``node``; a symbolic size is read from the source's own dimension if it is one."""
    symbolic = dim is not None and not isinstance(node.meta["val"].shape[dim], int)
    strides = row_major(sizes.shape(source))
    axes, step = [], here
    for size, stride in reversed(parts):
        size_from: tuple[fx.Node, int] | None = None
        if dim is not None and symbolic:
            for at, (own, length) in enumerate(zip(strides, source.meta["val"].shape)):
                if own == stride and sizes.shape(source)[at] == size and not isinstance(length, int):
                    size_from = (source, at)
            if size_from is None and len(parts) == 1:
                size_from = (node, dim)
            if size_from is None:
                size_from = _input_of_size(node, dim, size, sizes)
        axes.append(OuterAxis(size, stride, step, 0, 0, size_from))
        step *= size
    return axes[::-1]


def _input_of_size(node: fx.Node, dim: int, size: int, sizes: Sizes) -> tuple[fx.Node, int] | None:
    """A graph input's dimension that is the part of ``size`` elements of a dimension joining several axes (batch and
    tokens, say): the joint dimension divided by the other, fixed, axes."""
    others = sizes.shape(node)[dim] // size
    wanted = sympy.expand(node.meta["val"].shape[dim].node.expr / others)
    for value in node.graph.find_nodes(op="placeholder"):
        shape = value.meta["val"].shape if isinstance(value.meta.get("val"), torch.Tensor) else ()
        for at, length in enumerate(shape):
            if isinstance(length, torch.SymInt) and sympy.expand(length.node.expr - wanted) == 0:
                return value, at
    return None


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
        fitted.append(table)
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


def source_axes(rotation: Rotation, axes: tuple[OuterAxis, ...]) -> list[Axis]:
    """Those outer axes as axes of the source tensor."""
    return [Axis(a.size, a.source, a.size_from) for a in axes]
