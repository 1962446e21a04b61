"""Gathered attention, three layers of it, through the backend: one proof, three replacements by the gathered op."""

from __future__ import annotations

import torch

import fusion_pass

HEADS, CHANNELS, GROUPS, RANK = 8, 512, 2, 64


def unrotated(o, cos, sin):
    even, odd = o[..., -64:].unflatten(-1, (-1, 2)).unbind(-1)
    tail = torch.stack([even * cos + odd * sin, odd * cos - even * sin], -1).flatten(-2)
    return torch.cat([o[..., :-64], tail], -1)


def layer(q, kv, indices, sink, cos, sin, weight):
    rows = kv[indices.clamp(min=0)]
    score = torch.einsum("thd,tkd->thk", q, rows) * CHANNELS ** -0.5
    score = score.masked_fill((indices < 0)[:, None], float("-inf"))
    column = sink.view(1, -1, 1).expand(q.shape[0], -1, 1)
    weights = torch.softmax(torch.cat([score, column], -1), -1)[..., :-1]
    o = unrotated(torch.einsum("thk,tkd->thd", weights, rows), cos[:, None], sin[:, None])
    return torch.einsum("tgd,grd->tgr", o.view(-1, GROUPS, HEADS * CHANNELS // GROUPS), weight)


def layers(cos, sin, each):
    return [layer(q, kv, indices, sink, cos, sin, weight) for q, kv, indices, sink, weight in each]


def test_gathered_layers() -> None:
    torch.manual_seed(0)
    each = [(torch.randn(5, HEADS, CHANNELS), torch.randn(30, CHANNELS), torch.randint(-1, 30, (5, 9)),
             torch.randn(HEADS), torch.randn(GROUPS, RANK, HEADS * CHANNELS // GROUPS)) for _ in range(3)]
    cos, sin = torch.randn(5, 32), torch.randn(5, 32)
    torch._dynamo.reset()
    with torch.no_grad():
        wanted = layers(cos, sin, each)
        found = torch.compile(layers, backend="fusion_pass", options={"inner": "eager", "strict": True})(cos, sin, each)
    report = fusion_pass.reports()[-1]
    assert [chain.op for chain in report.fused] == ["fusion_pass.attention_gathered_rope"] * 3
    for got, want in zip(found, wanted):
        assert (got - want).norm() / want.norm() < 1e-5
