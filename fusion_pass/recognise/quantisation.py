"""The FP8 block quantisation, proved by value.

``QuantPath`` has found the conversion to 8 bits and the scale operands; here the codes and scales are computed element
by element from random values of the attention output and compared with the reference

    amax  = max |x| over a block of 128 (or 32) channels along K,      x = rotated output
    scale = max(amax, floor) / 448                  rule "fp32"
          = 2^ceil(log2(max(amax, floor) / 448))    rule "ue8m0"
    code  = e4m3(clamp(x / scale))

at several magnitudes, among them far below the floor. Source of the rules: the public implementations (official
act_quant, DeepGEMM per_token_cast, vLLM and SGLang fused kernels); the floor is a constant of the source.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from ..elements.constants import constant_values
from ..elements.follow import Follower
from ..elements.moves import unravel
from ..elements.numeric import Leaf, Numeric, Unevaluated, random_leaf
from ..elements.sizes import Sizes
from ..fx_access import args_of
from ..patterns.fp8_quant import E4M3_MAX, block_scale
from ..patterns.inverse_rope import inverse_rope
from .quant_path import FP8, QuantPath, dtype_of
from .refusal import Refused
from .rotation import Rotation
from .unchanged import Known

aten = torch.ops.aten
BLOCKS = (128, 32)
FLOORS = {aten.clamp_min.default, aten.clamp.default, aten.maximum.default, aten.where.self, aten.fmax.default,
          aten.clamp.Tensor, aten.clamp_min.Tensor, aten.where.ScalarSelf, aten.where.ScalarOther}
MANY_ROWS = 512
CHUNK = 32
MAGNITUDES = (1.0, 1e-2, 1e-4, 1e-6, 1e-8, 1e-10, 1e-12, 1e-14)


@dataclass(frozen=True)
class Quantisation:
    """What the contraction reads is the quantised rotation: the dequantised values when ``scales`` is None, else the
    bare codes, with the block scales applied later (``scales`` says where they are kept)."""

    rule: str
    block: int
    floor: float
    scales: ScaleTensor | None = None


@dataclass(frozen=True)
class ScaleTensor:
    """``node`` holds one scale per block at ``offset + axis strides + block*per_block``."""

    node: fx.Node
    offset: int
    axes: tuple[int, ...]
    per_block: int


def rotated(rotation: Rotation, outer: torch.Tensor, source: Callable[..., Any],
            tables: Callable[..., Any]) -> torch.Tensor:
    """Reference rotation of whole heads, [M, head_dim] float64, for outer coordinates [M, axes]; ``source(index)`` and
    ``tables(table, index)`` give element values."""
    strides = torch.tensor([a.source for a in rotation.axes], dtype=torch.int64)
    base = rotation.offset + (outer * strides).sum(1)
    channels = torch.arange(rotation.head_dim)
    x = source((base[:, None] + channels * rotation.channel_stride).flatten()).view(len(outer), -1)
    pairs = torch.arange(rotation.half)
    values = []
    for table, name in ((rotation.cos, "cos"), (rotation.sin, "sin")):
        table_strides = torch.tensor([getattr(a, name) for a in rotation.axes], dtype=torch.int64)
        at = table.offset + (outer * table_strides).sum(1)[:, None] + pairs * table.pair
        values.append(tables(table, at.flatten()).view(len(outer), -1))
    cos, sin = values
    return inverse_rope(x.unsqueeze(1), cos, sin).squeeze(1)


def table_values(engine: Numeric) -> Callable[..., Any]:
    """Values of a table's elements as the rotation uses them."""
    def values(table: Any, index: torch.Tensor) -> torch.Tensor:
        value = engine.values(table.node, index)
        if table.part == "re":
            value = value.real
        elif table.part == "im":
            value = value.imag
        return -value if table.negated else value
    return values


def random_table(seed: int, is_complex: bool) -> Callable[..., Any]:
    re, im = random_leaf(seed), random_leaf(seed + 1)
    return (lambda index: torch.complex(re(index), im(index))) if is_complex else re


def _table_leaf(table: fx.Node, seed: int, sizes: Sizes) -> Leaf:
    """Random elements of a table, but for those that the source filled in (cos = 1 for channels that stay)."""
    is_complex = sizes.dtype(table).is_complex
    random, known = random_table(seed, is_complex), Known(sizes)

    def leaf(index: torch.Tensor) -> torch.Tensor:
        values, filled = random(index), known.values(table, index)
        return torch.where(torch.isnan(filled), values, filled if is_complex else filled.real)
    return leaf


def recognise_quantisation(rotation: Rotation, path: QuantPath, sizes: Sizes, follower: Follower,
                           constants: Callable[..., Any] | None) -> Quantisation | Refused:
    """Prove what the node of ``rotation`` holds to be the block quantisation of the rotation, and find its form."""
    node = rotation.node
    for cast in path.casts:
        kinds = {dtype_of(cast), dtype_of(args_of(cast)[0])} & set(FP8)
        if kinds - {torch.float8_e4m3fn}:
            return Refused("fp8_quant", f"the codes are {next(iter(kinds))}, expected torch.float8_e4m3fn", cast)
    if not path.scales:
        return Refused("fp8_quant", "the values are converted to 8 bits without a block scale", node)
    is_codes = dtype_of(node) in FP8
    forms = [(rule, block) for rule in ("ue8m0", "fp32") for block in BLOCKS if rotation.head_dim % block == 0]
    if not forms:
        return Refused("fp8_quant", f"heads of {rotation.head_dim} channels are no whole number of blocks of "
                       f"{' or '.join(map(str, sorted(BLOCKS)))}", node)
    floors = _floor_candidates([use.scale for use in path.scales], sizes)
    for magnitude in MAGNITUDES:
        try:
            x, found = _values(rotation, sizes, constants, magnitude)
        except Unevaluated as error:
            return Refused("fp8_quant", f"the quantised values depend on {error}", node)
        fitting = [(rule, block) for rule, block in forms
                   if any(_equal(found, _quantised(x, block, rule, floor, is_codes)) for floor in floors)]
        if not fitting:
            return Refused("fp8_quant", _explain(x, found, forms, floors, is_codes), node)
        forms = fitting[:1]
        floors = [f for f in floors if _equal(found, _quantised(x, forms[0][1], forms[0][0], f, is_codes))]
    rule, block = forms[0]
    if not is_codes:
        return Quantisation(rule, block, floors[0])
    scales = _scale_tensor(rotation, path, sizes, follower, block)
    return scales if isinstance(scales, Refused) else Quantisation(rule, block, floors[0], scales)


def agrees_everywhere(rotation: Rotation, quantisation: Quantisation | None, sizes: Sizes,
                      constants: Callable[..., Any] | None) -> bool:
    """Compare many more elements than the proof: all heads of the first token, and the first head of all tokens. False
    when they differ, or when there are too many to look at."""
    fixed = [a for a in rotation.axes if not a.is_token]
    moving = [a for a in rotation.axes if a.is_token]
    rows = []
    for axes in (fixed, moving):
        counts = [a.size if a in axes else 1 for a in rotation.axes]
        total = 1
        for count in counts:
            total *= count
        if total > MANY_ROWS:
            return False
        rows.append(torch.stack(unravel(torch.arange(total), tuple(counts)), 1))
    try:
        x, found = _values(rotation, sizes, constants, 1.0, torch.cat(rows))
    except Unevaluated:
        return False
    if quantisation is None:
        return bool(((x - found).abs() <= 1e-9 * x.abs().clamp_min(1e-3)).all())
    want = _quantised(x, quantisation.block, quantisation.rule, quantisation.floor, quantisation.scales is not None)
    wrong = ~((found - want).abs() <= 1e-5 * want.abs().clamp_min(1e-37))
    blocks = wrong.view(len(wrong), -1, quantisation.block).sum(-1)
    return _equal(found, want) and int(blocks.max()) <= quantisation.block // 8


def _uneven(magnitude: float, chunk: int) -> Leaf:
    """Random values whose size changes from chunk to chunk: else all blocks would have one power-of-two scale. It
    changes by more than E4M3's range of normal numbers: a power-of-two scale moves the exponent alone, so the width of
    a block shows only where a scale is too large for some of its values."""
    value, size = random_leaf(11, magnitude), random_leaf(12, 8.0)
    return lambda index: value(index) * torch.exp2(size(index // chunk).round())


def _values(rotation: Rotation, sizes: Sizes, constants: Callable[..., Any] | None, magnitude: float,
            outer: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The rotation and the node's elements, [M, head_dim] each, from random attention outputs of one magnitude."""
    leaves = {rotation.source: _uneven(magnitude, CHUNK * rotation.channel_stride)}
    tables = sorted({rotation.cos.node, rotation.sin.node}, key=lambda n: n.name)
    for number, table in enumerate(tables):
        leaves[table] = _table_leaf(table, 20 + 2 * number, sizes)
    engine = Numeric(sizes, leaves, constants)
    outer = _outer_samples(rotation) if outer is None else outer
    x = rotated(rotation, outer, leaves[rotation.source], table_values(engine))
    here = torch.tensor([a.here for a in rotation.axes], dtype=torch.int64)
    lanes = (outer * here).sum(1)[:, None] + torch.arange(rotation.head_dim)
    return x, engine.values(rotation.node, lanes.flatten()).view(len(outer), -1)


def _quantised(x: torch.Tensor, block: int, rule: str, floor: float, codes_only: bool) -> torch.Tensor:
    blocks = x.view(len(x), -1, block)
    scale = block_scale(blocks.abs().amax(-1, keepdim=True), rule, floor)
    codes = (blocks / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float32).to(torch.float8_e4m3fn).to(torch.float64)
    return (codes if codes_only else codes * scale).view(x.shape)


def _equal(found: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal up to float64 noise; a value that sits on a rounding border of E4M3 may fall to either side."""
    wrong = ~((found - want).abs() <= 1e-5 * want.abs().clamp_min(1e-37))       # not-a-number is wrong
    return int(wrong.sum()) * 2000 <= found.numel()


def _explain(x: torch.Tensor, found: torch.Tensor, forms: list[tuple[str, int]], floors: list[float],
             is_codes: bool) -> str:
    rule, block = forms[0]
    want = _quantised(x, block, rule, floors[0], is_codes)
    row, channel = (~((found - want).abs() <= 1e-5 * want.abs())).nonzero()[0].tolist()
    kind = "code" if is_codes else "dequantised value"
    return (f"channel {channel}: {kind} {found[row, channel]:.6g} for {x[row, channel]:.6g}, expected "
            f"{want[row, channel]:.6g} (blocks of {block}, scale = "
            f"{'amax/448' if rule == 'fp32' else 'power of two above amax/448'}); neither that nor the other "
            "scale rule or block of 32 gives the source's values")


def _outer_samples(rotation: Rotation) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    rows = [torch.zeros(len(rotation.axes), dtype=torch.int64)]
    rows.extend(torch.stack([torch.randint(0, a.size, (), generator=generator) for a in rotation.axes])
                for _ in range(2) if rotation.axes)
    return torch.stack(rows)


def _scale_tensor(rotation: Rotation, path: QuantPath, sizes: Sizes, follower: Follower,
                  block: int) -> ScaleTensor | Refused:
    """The node with one element per block that the codes were divided by, and its strides."""
    here = rotation.node

    def address(index: torch.Tensor) -> tuple[fx.Node, torch.Tensor] | None:
        uses = QuantPath(sizes, path.cones)
        follower.follow(here, index, through=uses)
        if len(uses.scales) != 1:
            return None
        only = follower.follow(uses.scales[0].scale, uses.scales[0].scale_index).only()
        return None if only is None or not isinstance(only.node, fx.Node) else (only.node, only.index)

    channels = torch.arange(rotation.head_dim)
    found = address(channels)
    if found is None:
        return Refused("fp8_quant", "the block scales are not read from one tensor", here)
    node, index = found
    per_block = int(index[block] - index[0]) if rotation.head_dim > block else 0
    if not bool((index == index[0] + channels // block * per_block).all()):
        return Refused("fp8_quant", "the scale is not addressed by block", node)
    strides = []
    for axis in rotation.axes:
        moved = address(torch.tensor([0, axis.here, axis.here * (axis.size - 1)]))
        stride = int(moved[1][1] - moved[1][0]) if moved is not None else 0
        if moved is None or moved[0] is not node or int(moved[1][2] - moved[1][0]) != stride * (axis.size - 1):
            return Refused("fp8_quant", "the scale is not addressed by token, group and block", node)
        strides.append(stride)
    return ScaleTensor(node, int(index[0]), tuple(strides), per_block)


def _floor_candidates(scales: list[fx.Node], sizes: Sizes) -> list[float]:
    """Constants of minimum-clamps behind the scales (applied to amax or to amax/448), and none at all."""
    found: list[float] = []
    stack = list(scales)
    seen: set[fx.Node] = set()
    while stack and len(seen) < 200:
        node = stack.pop()
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        if node.target in FLOORS:
            for number in (*node.args[1:3], node.kwargs.get("min"), node.kwargs.get("other")):
                value = _number(number, sizes)
                if value is not None and value > 0:
                    found.append(value)
        if node.target in (aten.abs.default,):
            continue
        stack.extend(node.all_input_nodes)
    candidates: list[float] = []
    for value in sorted(set(found)):
        candidates.extend((value, value * E4M3_MAX))
    return [*candidates, 0.0] if candidates else [0.0]


def _number(value: object, sizes: Sizes) -> float | None:
    """A number, or the first element of a tensor that the graph makes from nothing."""
    if isinstance(value, (int, float)):
        return float(value)
    if not isinstance(value, fx.Node) or not isinstance(value.meta.get("val"), torch.Tensor):
        return None
    first = constant_values(value, torch.zeros(1, dtype=torch.int64), sizes) if sizes.numel(value) else None
    return None if first is None or first.is_complex() else float(first[0])
