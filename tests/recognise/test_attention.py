"""The attention recogniser on every corpus case: what it finds, and that the operands it writes give eager's value."""

from __future__ import annotations

import math

import pytest
import torch
from captured import CASES, Captured, axes_of, capture, load, node_values, outputs

from fusion_pass.elements.layouts import Builder
from fusion_pass.recognise.attention import recognise_attention
from fusion_pass.recognise.attention_emit import AttentionOperands, GatheredOperands, MergeOperands
from fusion_pass.recognise.attention_match import AttentionMatch, OutputAxes
from fusion_pass.recognise.context import Context
from fusion_pass.recognise.refusal import Refused

HEADS, CHANNELS = 8, 512
NAMES = sorted(path.stem for path in CASES.glob("*.py"))
# Attention is a custom operator or a FlexAttention call there: nothing to look into.
OPAQUE = ("pos_23", "pos_59", "pos_62", "pos_63")
# What the grouped projection reads is no plain attention output.
REFUSED = {
    "neg_21": "softmax scale depends on",
    "neg_23": "not the same rows",
    "neg_31": "no query-key product",
    "neg_33": "float64",
    "neg_41": "merge of 4 partials",
    "neg_43": "merge of 4 partials",
}
# Intermediate roundings to bf16 that eager makes whatever the input dtype, and that the operands do not repeat.
LOOSE = {"pos_29": 2e-2, "pos_14": 1e-4}


class NoView(Exception):
    """An operand of a match cannot be written as a view of its node."""


def recognised(case: Captured, output: torch.fx.Node, axes: OutputAxes) -> AttentionMatch | Refused:
    with torch.no_grad():
        return recognise_attention(output, axes, Context.of(case.module))


def dense_value(operands: AttentionOperands, values: dict) -> torch.Tensor:
    """The attention op's definition, in float64: [B, S, H, D]."""
    q, kv = values[operands.q].double(), values[operands.kv].double()
    scores = torch.einsum("bshd,bnd->bshn", q, kv) * operands.scale
    if operands.mask is not None:
        mask = values[operands.mask][:, :, None]
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
    if operands.sink is not None:
        sink = values[operands.sink].double()[None, None, :, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    weights = torch.softmax(scores, -1)[..., :kv.shape[1]]
    return torch.einsum("bshn,bnd->bshd", weights, kv)


def merge_value(operands: MergeOperands, values: dict) -> torch.Tensor:
    """The merge op's definition, in float64: [T, H, D]."""
    parts, top = values[operands.partials].double(), values[operands.lse_or_max].double() * operands.stat_scale
    sink = None if operands.sink is None else values[operands.sink].double()[None]
    shift = top.amax(0) if sink is None else torch.maximum(top.amax(0), sink)
    weight = torch.exp(top - shift)
    total = weight if operands.sum is None else weight * values[operands.sum].double()
    total = total.sum(0) + (0 if sink is None else torch.exp(sink - shift))
    return (weight[..., None] * torch.nan_to_num(parts)).sum(0) / total[..., None]


def replaced_value(case: Captured, match: AttentionMatch) -> tuple[torch.Tensor, torch.Tensor]:
    """(what eager has in the output, what the op makes of the written operands), both [T, H, D]."""
    operands = match.emit(Builder(case.module.graph, Context.of(case.module).sizes[0], match.output))
    if operands is None:
        raise NoView(match.output.name)
    case.module.graph.lint()
    case.module.recompile()
    values = node_values(case.module, case.inputs)
    axes = (*match.axes.tokens, match.axes.heads, match.axes.channels)
    eager = values[match.output].contiguous().as_strided([a.size for a in axes], [a.stride for a in axes],
                                                         match.axes.offset)
    value = dense_value(operands, values) if isinstance(operands, AttentionOperands) else merge_value(operands, values)
    shape = (-1, match.axes.heads.size, match.axes.channels.size)
    return eager.double().reshape(shape), value.reshape(shape)


def close(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm().clamp_min(1e-12))


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("pos") and not n.startswith(OPAQUE)])
def test_positive(name: str) -> None:
    module = load(name)
    case = capture(*module.make(dtype=torch.float32))
    context = Context.of(case.module)
    found = outputs(case.module, context.sizes[0], HEADS, CHANNELS)
    assert found or name.startswith("pos_51")
    roles = [r for r in module.EXPECT["roles"] if r in ("fmha", "kv_merge")]
    for output in found:
        axes = axes_of(output, context.sizes[0], HEADS, CHANNELS)
        match = recognised(case, output, axes)
        assert isinstance(match, AttentionMatch), match.reason
        assert list(match.roles) == roles
        got, want = replaced_value(case, match)
        assert close(got, want) < LOOSE.get(name[:6], 2e-6)


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith(tuple(REFUSED))])
def test_refused(name: str) -> None:
    module = load(name)
    dtype = {} if name.startswith("neg_33") else {"dtype": torch.float32}
    case = capture(*module.make(**dtype))
    context = Context.of(case.module)
    found = outputs(case.module, context.sizes[0], HEADS, CHANNELS)
    assert found
    for output in found:
        refusal = recognised(case, output, axes_of(output, context.sizes[0], HEADS, CHANNELS))
        assert isinstance(refusal, Refused)
        assert REFUSED[name[:6]] in refusal.reason


def gathered_value(operands: GatheredOperands, values: dict) -> torch.Tensor:
    """The gathered op's definition, in float64: [T, H, D]."""
    q = values[operands.q].double()
    rows, seen = [], []
    for pool in operands.pools:
        indices = values[pool.indices].long()
        rows.append(values[pool.kv].double()[indices.clamp(min=0)])
        seen.append(indices >= 0)
    kv = torch.cat(rows, 1)
    scores = torch.einsum("thd,tkd->thk", q, kv) * operands.scale
    scores = scores.masked_fill(~torch.cat(seen, 1)[:, None], -math.inf)
    sink = torch.full(q.shape[1:2], -math.inf) if operands.sink is None else values[operands.sink].double()
    weights = torch.softmax(torch.cat([scores, sink[None, :, None].expand(len(q), -1, 1)], -1), -1)[..., :-1]
    return torch.einsum("thk,tkd->thd", weights, kv)


def two_pools(q, kv, pool, indices, more):
    """[B, S, H, D] queries; a window per request (batch) and picked rows of one pool, each with its mask."""
    near = torch.gather(kv, 1, indices.clamp(min=0).flatten(1)[..., None].expand(-1, -1, CHANNELS))
    near = near.view(*indices.shape, CHANNELS)
    far = pool[more.clamp(min=0)]
    scores = []
    for rows, index in ((near, indices), (far, more)):
        score = torch.einsum("bshd,bskd->bshk", q, rows) * 0.05
        scores.append(torch.where(index[:, :, None] >= 0, score, float("-inf")))
    weights = torch.softmax(torch.cat(scores, -1), -1)
    count = indices.shape[-1]
    return (torch.einsum("bshk,bskd->bshd", weights[..., :count], near)
            + torch.einsum("bshk,bskd->bshd", weights[..., count:], far))


@pytest.mark.parametrize("name", ["pos_01", "pos_07", "pos_14", "two_pools"])
def test_gathered(name: str) -> None:
    if name == "two_pools":
        torch.manual_seed(0)
        case = capture(two_pools, (torch.randn(3, 4, HEADS, CHANNELS), torch.randn(3, 20, CHANNELS),
                                   torch.randn(50, CHANNELS), torch.randint(-1, 20, (3, 4, 6)),
                                   torch.randint(-1, 50, (3, 4, 9))))
        output = next(n for n in case.module.graph.nodes if n.op == "output").args[0][0]
    else:
        module = load(next(n for n in NAMES if n.startswith(name)))
        case = capture(*module.make(dtype=torch.float32))
        output, *_ = outputs(case.module, Context.of(case.module).sizes[0], HEADS, CHANNELS)
    sizes = Context.of(case.module).sizes[0]
    match = recognised(case, output, axes_of(output, sizes, HEADS, CHANNELS))
    assert isinstance(match, AttentionMatch), match.reason
    assert len(match.gathered) == len(match.kv) == (2 if name == "two_pools" else 1)
    operands = match.emit_gathered(Builder(case.module.graph, sizes, output))
    case.module.graph.lint()
    case.module.recompile()
    values = node_values(case.module, case.inputs)
    got = gathered_value(operands, values)
    assert close(values[output].double().reshape(got.shape), got) < (1e-4 if name == "pos_14" else 2e-6)
