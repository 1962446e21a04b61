"""The operands written for one number of tokens and keys are right for any other: nothing is baked in."""

from __future__ import annotations

import pytest
import torch
from captured import axes_of, capture, node_values
from test_attention import CHANNELS, HEADS, close, dense_value, merge_value

from fusion_pass.elements.layouts import Builder
from fusion_pass.recognise.attention import recognise_attention
from fusion_pass.recognise.attention_emit import AttentionOperands
from fusion_pass.recognise.attention_match import AttentionMatch
from fusion_pass.recognise.attention_sizes import agreed
from fusion_pass.recognise.context import Context

SCALE = CHANNELS ** -0.5


def sink_column(q, kv, mask, sink):
    """[B, H, S, D] queries, [B, N, D] rows, additive [B, 1, S, N] mask, the sink as a column."""
    score = torch.matmul(q, kv[:, None].transpose(2, 3)) * SCALE + mask
    column = sink.view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
    weights = torch.softmax(torch.cat([score, column], -1), -1)[..., :-1]
    return torch.matmul(weights, kv[:, None].expand(-1, HEADS, -1, -1)).transpose(1, 2).contiguous()


def sink_row(q, kv, mask, sink):
    """The sink as the score of an extra zero row, masked like a key."""
    q, mask = q[0].transpose(0, 1), mask[0, 0] > -0.5
    rows = torch.cat([kv[0], kv.new_zeros(1, CHANNELS)])
    mask = torch.cat([mask, mask[:, :1]], 1)
    score = torch.einsum("thd,kd->htk", q, rows) * SCALE
    last = torch.arange(rows.shape[0]) == rows.shape[0] - 1
    score = torch.where(last, sink.view(-1, 1, 1), score).masked_fill(~mask, float("-inf"))
    return torch.einsum("htk,kd->thd", torch.softmax(score, -1), rows)


def two_pieces(q, kv, mask, sink):
    """Window and compressed keys under one softmax, each multiplied apart; one of them per token."""
    q, window = q[0].transpose(0, 1), kv[0, :3].expand(q.shape[2], -1, -1) * 1.5
    far = torch.einsum("thd,kd->thk", q, kv[0]) * SCALE + mask[0, 0][:, None]
    near = torch.einsum("thd,tkd->thk", q, window) * SCALE
    score = torch.cat([far, near, sink.view(1, -1, 1).expand(q.shape[0], -1, 1)], -1)
    weights = torch.softmax(score, -1)
    count = kv.shape[1]
    return (torch.einsum("thk,kd->thd", weights[..., :count], kv[0])
            + torch.einsum("thk,tkd->thd", weights[..., count:count + 3], window))


def merged_halves(q, kv, mask, sink):
    """Two branches merged by their log-sum-exps, the sink as a sigmoid."""
    q = q[0].transpose(0, 1)
    other = kv[0] * 2
    parts = []
    for rows in (kv[0], other):
        score = torch.einsum("thd,kd->thk", q, rows) * SCALE + mask[0, 0][:, None]
        parts.append((torch.einsum("thk,kd->thd", torch.softmax(score, -1), rows), torch.logsumexp(score, -1)))
    (a, la), (b, lb) = parts
    top = torch.maximum(la, lb)
    wa, wb = torch.exp(la - top), torch.exp(lb - top)
    lse = top + torch.log(wa + wb)
    o = (a * wa[..., None] + b * wb[..., None]) / (wa + wb)[..., None]
    return o * torch.sigmoid(lse - sink)[..., None]


def scaled_dot_product(q, kv, mask, sink):
    """The fused operator, without a sink."""
    rows = kv[:, None].expand(-1, HEADS, -1, -1)
    o = torch.nn.functional.scaled_dot_product_attention(q, rows, rows, attn_mask=mask, scale=SCALE)
    return o.transpose(1, 2)


def inputs(batch: int, tokens: int, keys: int) -> tuple:
    torch.manual_seed(tokens)
    mask = torch.where(torch.rand(batch, 1, tokens, keys) > 0.6, -1e9, 0.0)
    return (torch.randn(batch, HEADS, tokens, CHANNELS), torch.randn(batch, keys, CHANNELS), mask, torch.randn(HEADS))


def marked(args: tuple) -> tuple:
    q, kv, mask, _ = args
    torch._dynamo.mark_dynamic(q, 2)
    torch._dynamo.mark_dynamic(mask, 2)
    torch._dynamo.mark_dynamic(kv, 1)
    torch._dynamo.mark_dynamic(mask, 3)
    return args


@pytest.mark.parametrize("source", [sink_column, sink_row, two_pieces, merged_halves, scaled_dot_product],
                         ids=lambda f: f.__name__)
def test_other_sizes(source) -> None:
    batch = 2 if source in (sink_column, scaled_dot_product) else 1
    case = capture(source, marked(inputs(batch, 5, 20)), None)
    other = capture(source, marked(inputs(batch, 9, 31)), None)
    context = Context.of(case.module)
    output = next(n for n in case.module.graph.nodes if n.op == "output").args[0][0]
    axes = axes_of(output, context.sizes[0], HEADS, CHANNELS)
    assert any(axis.size_from for axis in axes.tokens)
    found = []
    for sizes in context.sizes:
        found.append(recognise_attention(output, axes_of(output, sizes, HEADS, CHANNELS), context, sizes))
        assert isinstance(found[-1], AttentionMatch), found[-1].reason
    match = agreed(*found, *context.sizes)
    assert isinstance(match, AttentionMatch), match.reason
    operands = match.emit(Builder(case.module.graph, context.sizes[0], output))
    assert operands is not None
    case.module.recompile()
    for given in (case.inputs, other.inputs):
        values = node_values(case.module, given)
        value = dense_value if isinstance(operands, AttentionOperands) else merge_value
        assert close(value(operands, values).reshape(-1, HEADS, CHANNELS),
                     values[output].double().reshape(-1, HEADS, CHANNELS)) < 2e-6
