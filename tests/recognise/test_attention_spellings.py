"""Ways to write the same attention, beyond the corpus: each is recognised, as one op, with eager's value."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from captured import axes_of, capture
from test_attention import CHANNELS, HEADS, close, recognised, replaced_value

from fusion_pass.recognise.attention_match import AttentionMatch
from fusion_pass.recognise.context import Context
from fusion_pass.recognise.refusal import Refused

SCALE = CHANNELS ** -0.5
TOKENS, KEYS = 7, 40
LOG2E = 1.4426950408889634

# q [T, H, D], kv [N, D], mask [T, N] (0 or -1e9), sink [H] -> [T, H, D]


def scores(q, kv, mask):
    return torch.einsum("thd,nd->htn", q, kv) * SCALE + mask


def column(sink, tokens):
    return sink.view(-1, 1, 1).expand(-1, tokens, 1)


def normalise(score, sink):
    """[H, T, N] weights: softmax with the sink as a column that is dropped."""
    return torch.softmax(torch.cat([score, column(sink, score.shape[1])], -1), -1)[..., :-1]


def mask_as_addend(q, kv, mask, sink):
    score = torch.baddbmm(mask[:, None, :].expand(-1, HEADS, -1), q, kv.t().expand(q.shape[0], -1, -1), alpha=SCALE)
    return torch.bmm(normalise(score.transpose(0, 1), sink).transpose(0, 1), kv.expand(q.shape[0], -1, -1))


def sink_in_front(q, kv, mask, sink):
    weights = torch.softmax(torch.cat([column(sink, len(q)), scores(q, kv, mask)], -1), -1)[..., 1:]
    return torch.einsum("htn,nd->thd", weights, kv)


def log_domain(q, kv, mask, sink):
    score = scores(q, kv, mask)
    lse = torch.logaddexp(torch.logsumexp(score, -1), sink[:, None])
    return torch.einsum("htn,nd->htd", torch.exp(score - lse[..., None]), kv).transpose(0, 1)


def base_two(q, kv, mask, sink):
    score = torch.einsum("thd,nd->htn", q * (SCALE * LOG2E), kv) + mask * LOG2E
    top = score.amax(-1, keepdim=True)
    weights = torch.exp2(score - top)
    total = weights.sum(-1, keepdim=True) + torch.exp2(sink.view(-1, 1, 1) * LOG2E - top)
    return (torch.einsum("htn,nd->htd", weights, kv) / total).transpose(0, 1).contiguous()


def causal_triangle(q, kv, mask, sink):
    kv = kv[:q.shape[0]]
    triangle = torch.full((len(q), len(q)), float("-inf")).triu(1)
    return torch.einsum("htn,nd->thd", normalise(scores(q, kv, triangle), sink), kv)


def window_of_positions(q, kv, mask, sink):
    kv = kv[:q.shape[0]]
    at = torch.arange(len(q))
    visible = (at[None] <= at[:, None]) & (at[None] > at[:, None] - 3)
    return torch.einsum("htn,nd->thd", normalise(scores(q, kv, 0.0).masked_fill(~visible, -1e9), sink), kv)


def mask_times_weights(q, kv, mask, sink):
    score = scores(q, kv, 0.0)
    top = score.amax(-1, keepdim=True)
    weights = torch.exp(score - top) * (mask > -0.5)
    total = weights.sum(-1, keepdim=True) + torch.exp(sink.view(-1, 1, 1) - top)
    return torch.einsum("htn,nd->thd", weights / total, kv)


def mask_of_floats(q, kv, mask, sink):
    keep = (mask > -0.5).float()
    return torch.einsum("htn,nd->thd", normalise(scores(q, kv, (1.0 - keep) * -1e30), sink), kv)


def running_softmax(q, kv, mask, sink):
    top = torch.full(q.shape[:2], -1e30)
    total, sums = torch.zeros_like(top), torch.zeros_like(q)
    for start in range(0, len(kv), 8):
        rows = kv[start:start + 8]
        score = torch.einsum("thd,nd->thn", q, rows) * SCALE + mask[:, None, start:start + 8]
        new = torch.maximum(top, score.amax(-1))
        old, weights = torch.exp(top - new), torch.exp(score - new[..., None])
        total = total * old + weights.sum(-1)
        sums, top = sums * old[..., None] + torch.einsum("thn,nd->thd", weights, rows), new
    new = torch.maximum(top, sink)
    return sums * torch.exp(top - new)[..., None] / (total * torch.exp(top - new) + torch.exp(sink - new))[..., None]


def running_softmax_from_sink(q, kv, mask, sink):
    top, total, sums = sink[None].expand(q.shape[0], -1), torch.ones(q.shape[:2]), torch.zeros_like(q)
    for start in range(0, len(kv), 20):
        rows = kv[start:start + 20]
        score = torch.einsum("thd,nd->thn", q, rows) * SCALE + mask[:, None, start:start + 20]
        new = torch.maximum(top, score.amax(-1))
        old, weights = torch.exp(top - new), torch.exp(score - new[..., None])
        total = total * old + weights.sum(-1)
        sums, top = sums * old[..., None] + torch.einsum("thn,nd->thd", weights, rows), new
    return sums / total[..., None]


def loop_over_tokens(q, kv, mask, sink):
    result = []
    for one, hidden in zip(q, mask):
        score = one @ kv.t() * SCALE + hidden
        result.append(torch.softmax(torch.cat([score, sink[:, None]], -1), -1)[:, :-1] @ kv)
    return torch.stack(result)


def blocks_of_queries(q, kv, mask, sink):
    return torch.cat([torch.einsum("htn,nd->thd", normalise(scores(a, kv, b), sink), kv)
                      for a, b in zip(q.split(4), mask.split(4))])


def loop_over_heads(q, kv, mask, sink):
    result = []
    for head in range(HEADS):
        score = q[:, head] @ kv.t() * SCALE + mask
        own = sink[head].view(1, 1).expand(q.shape[0], 1)
        result.append(torch.softmax(torch.cat([score, own], -1), -1)[:, :-1] @ kv)
    return torch.stack(result, 1)


def stacked_splits(q, kv, mask, sink):
    rows, hidden = kv.view(4, -1, CHANNELS), mask.view(mask.shape[0], 4, 1, -1).permute(1, 0, 2, 3)
    score = torch.einsum("thd,pnd->pthn", q, rows) * SCALE + hidden
    top = score.amax(-1)
    weights = torch.exp(score - top[..., None])
    part, sums = weights.sum(-1), torch.einsum("pthn,pnd->pthd", weights, rows)
    new = torch.maximum(top.amax(0), sink)
    factor = torch.exp(top - new)
    return (sums * factor[..., None]).sum(0) / ((part * factor).sum(0) + torch.exp(sink - new))[..., None]


def merged_pairwise(q, kv, mask, sink):
    out = lse = None
    for rows, hidden in zip(kv.chunk(4), mask.chunk(4, 1)):
        score = torch.einsum("thd,nd->thn", q, rows) * SCALE + hidden[:, None]
        part, part_lse = torch.softmax(score, -1) @ rows, torch.logsumexp(score, -1)
        if out is None:
            out, lse = part, part_lse
            continue
        new = torch.logaddexp(lse, part_lse)
        out = out * torch.exp(lse - new)[..., None] + part * torch.exp(part_lse - new)[..., None]
        lse = new
    return out * torch.sigmoid(lse - sink)[..., None]


FMHA = [mask_as_addend, sink_in_front, log_domain, base_two, causal_triangle, window_of_positions, mask_times_weights,
        mask_of_floats, running_softmax, running_softmax_from_sink, loop_over_tokens, blocks_of_queries,
        loop_over_heads]
MERGES = [stacked_splits, merged_pairwise]


def inputs() -> tuple:
    torch.manual_seed(0)
    return (torch.randn(TOKENS, HEADS, CHANNELS), torch.randn(KEYS, CHANNELS),
            torch.where(torch.rand(TOKENS, KEYS) > 0.6, -1e9, 0.0), torch.randn(HEADS))


def found(source: Callable) -> tuple:
    case = capture(source, inputs())
    output = next(n for n in case.module.graph.nodes if n.op == "output").args[0][0]
    return case, recognised(case, output, axes_of(output, Context.of(case.module).sizes[0], HEADS, CHANNELS))


@pytest.mark.parametrize("source", FMHA + MERGES, ids=lambda f: f.__name__)
def test_spelling(source: Callable) -> None:
    case, match = found(source)
    assert isinstance(match, AttentionMatch), match.reason
    assert match.roles == (("fmha", "kv_merge") if source in MERGES else ("fmha",))
    assert math.isclose(match.scale, SCALE, rel_tol=1e-6) and match.sink is not None
    got, want = replaced_value(case, match)
    assert close(got, want) < 3e-6


# Near misses: what differs from attention with a sink is named.


def sink_with_weight(q, kv, mask, sink):
    return torch.einsum("htn,nd->thd", torch.softmax(scores(q, kv, mask) + sink.view(-1, 1, 1) * 0.1, -1) * 0.9, kv)


def two_scales(q, kv, mask, sink):
    score = torch.cat([scores(q, kv[:20], 0.0), scores(q, kv[20:], 0.0) * 1.5], -1)
    return torch.einsum("htn,nd->thd", normalise(score, sink), kv)


def shifted_rows(q, kv, mask, sink):
    return torch.einsum("htn,nd->thd", normalise(scores(q, kv, mask), sink), kv.roll(1, 0))


def bias_per_head(q, kv, mask, sink):
    return torch.einsum("htn,nd->thd", normalise(scores(q, kv, mask) + sink.view(-1, 1, 1) * kv[:, 0], sink), kv)


def squared_scores(q, kv, mask, sink):
    return torch.einsum("htn,nd->thd", normalise(scores(q, kv, 0.0) ** 2, sink), kv)


def dropped_half(q, kv, mask, sink):
    return torch.einsum("htn,nd->thd", normalise(scores(q, kv, mask), sink)[..., :20], kv[:20])


def channels_reversed(q, kv, mask, sink):
    return torch.einsum("htn,nd->thd", normalise(scores(q, kv.flip(1), mask), sink), kv)


def other_tokens_sink(q, kv, mask, sink):
    return torch.einsum("htn,nd->thd", normalise(scores(q, kv, mask), q[0, :, 0]), kv) * sink.view(1, -1, 1)


@pytest.mark.parametrize("source", [sink_with_weight, two_scales, shifted_rows, bias_per_head, squared_scores,
                                    dropped_half, channels_reversed, other_tokens_sink], ids=lambda f: f.__name__)
def test_near_miss(source: Callable) -> None:
    _, refusal = found(source)
    assert isinstance(refusal, Refused) and refusal.reason
