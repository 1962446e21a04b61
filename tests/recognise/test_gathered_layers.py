"""Gathered attention, three layers of it, through the backend: one proof, three replacements by the gathered op."""

from __future__ import annotations

import pytest
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


def joined(q, kv, extra, indices, extra_indices, sink, cos, sin, weight):
    """The keys of two pools, picked and joined before they are multiplied: one piece, as far as the products show."""
    rows = torch.cat([kv[indices.clamp(min=0)], extra[extra_indices.clamp(min=0)]], 1)
    masked = torch.cat([indices, extra_indices], 1) < 0
    return over(rows, masked, q, sink, cos, sin, weight)


def over(rows, masked, q, sink, cos, sin, weight):
    score = torch.einsum("thd,tkd->thk", q, rows) * CHANNELS ** -0.5
    score = score.masked_fill(masked[:, None], float("-inf"))
    column = sink.view(1, -1, 1).expand(q.shape[0], -1, 1)
    weights = torch.softmax(torch.cat([score, column], -1), -1)[..., :-1]
    o = unrotated(torch.einsum("thk,tkd->thd", weights, rows), cos[:, None], sin[:, None])
    return torch.einsum("tgd,grd->tgr", o.view(-1, GROUPS, HEADS * CHANNELS // GROUPS), weight)


def joined_with_own(q, kv, own, indices, _, sink, cos, sin, weight):
    """Only some of the joined rows are picked."""
    rows = torch.cat([kv[indices.clamp(min=0)], own[:2].expand(q.shape[0], -1, -1)], 1)
    masked = torch.cat([indices < 0, torch.zeros_like(indices[:, :2], dtype=torch.bool)], 1)
    return over(rows, masked, q, sink, cos, sin, weight)


def joined_of_three(q, kv, extra, indices, extra_indices, sink, cos, sin, weight):
    """One pool more than the op takes."""
    picked = [kv[indices.clamp(min=0)], extra[extra_indices.clamp(min=0)], kv[extra_indices.clamp(0, 29)]]
    masked = torch.cat([indices, extra_indices, extra_indices], 1) < 0
    return over(torch.cat(picked, 1), masked, q, sink, cos, sin, weight)


@pytest.mark.parametrize("source, op", [(joined, "attention_gathered_rope"), (joined_with_own, "attention_rope"),
                                        (joined_of_three, "attention_rope")])
@pytest.mark.parametrize("dynamic", [False, True])
def test_joined_pools(source, op, dynamic) -> None:
    torch.manual_seed(1)
    arguments = (torch.randn(5, HEADS, CHANNELS), torch.randn(30, CHANNELS), torch.randn(40, CHANNELS),
                 torch.randint(-1, 30, (5, 9)), torch.randint(-1, 40, (5, 6)), torch.randn(HEADS), torch.randn(5, 32),
                 torch.randn(5, 32), torch.randn(GROUPS, RANK, HEADS * CHANNELS // GROUPS))
    torch._dynamo.reset()
    with torch.no_grad():
        wanted = source(*arguments)
        if dynamic:
            for i in (0, 3, 4, 6, 7):  # every tensor that has tokens
                torch._dynamo.mark_dynamic(arguments[i], 0)
        compiled = torch.compile(source, backend="fusion_pass", options={"inner": "eager"})
        found = compiled(*arguments)
    report = fusion_pass.reports()[-1]
    assert [chain.op for chain in report.fused] == [f"fusion_pass.{op}"], str(report)
    assert (found - wanted).norm() / wanted.norm() < 1e-5
    torch._dynamo.reset()
