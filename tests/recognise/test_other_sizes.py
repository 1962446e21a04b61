"""A chain that holds for the example's sizes only: the reason says what differs, and from which size to which."""

from __future__ import annotations

import re

import torch

import fusion_pass
from fusion_pass.advice import advice

HALF = 32


def attended(q, keys, values, cos, sin):
    """Attention and inverse rotation of q [tokens, groups, heads of a group, D] over keys and values [N, D]."""
    scores = torch.einsum("tghd,nd->tghn", q, keys) * 512 ** -0.5
    o = torch.einsum("tghn,nd->tghd", scores.softmax(-1), values)
    even, odd = o[..., -2 * HALF::2], o[..., 1 - 2 * HALF::2]
    cos, sin = cos[:, None, None], sin[:, None, None]
    turned = torch.stack([even * cos + odd * sin, odd * cos - even * sin], -1).flatten(-2)
    return torch.cat([o[..., :-2 * HALF], turned], -1)


def attention_chain(q, keys, values, cos, sin, weight):
    return torch.einsum("tghd,grhd->tgr", attended(q, keys, values, cos, sin), weight)


def grouped(q, kv, cos, sin, weight):
    return attention_chain(q, kv, kv, cos, sin, weight)


def halved(q, kv, cos, sin, weight):
    """Two groups whatever the number of heads: of seven heads, one is in both."""
    heads = attended(q.flatten(1, 2)[:, None], kv, kv, cos, sin)
    return torch.einsum("tgk,grk->tgr", heads.reshape(heads.shape[0], 2, -1), weight)


def near_miss(dynamic: dict[int, list[int]] | None, source=grouped) -> fusion_pass.NearMiss | None:
    """Of ``source`` with the named dimensions of its arguments dynamic (None: all of all)."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    shapes = {grouped: ((7, 2, 3, 512), (2, 16, 3, 512)), halved: ((7, 1, 6, 512), (2, 16, 1536))}[source]
    args = (torch.randn(shapes[0]), torch.randn(24, 512), torch.randn(7, HALF), torch.randn(7, HALF),
            torch.randn(shapes[1]))
    for number, dims in (dynamic or {}).items():
        for dim in dims:
            torch._dynamo.mark_dynamic(args[number], dim)
    with torch.no_grad():
        torch.compile(source, backend="fusion_pass", dynamic=True if dynamic is None else None, fullgraph=True,
                      options={"inner": "eager"})(*args)
    report = fusion_pass.reports()[-1]
    assert len(report.fused) + len(report.near_misses) == 1, report
    return report.near_misses[0] if report.near_misses else None


def test_sizes_that_may_change():
    assert near_miss({0: [0], 1: [0], 2: [0], 3: [0]}) is None


def test_the_quantity_and_both_values_are_named():
    miss = near_miss({0: [2], 4: [2]})
    assert miss is not None
    assert re.search(r"not for others: the heads per group is 3 in the example, but (\d+) with "
                     r"arg\d+_\d.shape\[2\] = \1 instead of 3$", miss.reason), miss.reason
    assert "mark_dynamic" in advice(miss)


def test_what_ends_under_other_sizes_is_told():
    miss = near_miss({0: [2], 4: [2]}, halved)
    assert miss is not None
    assert re.search(r"not for others: with arg\d+_\d.shape\[2\] = 7 instead of 6: cos of token .* expected",
                     miss.reason), miss.reason
    assert "mark_dynamic" in advice(miss)


def test_many_sizes_are_counted():
    """Under dynamic=True every size is a symbol, a width too: what differs is told by the sizes that it goes with."""
    miss = near_miss(None)
    assert miss is not None and "with arg" in miss.reason and miss.reason.count(" instead of ") <= 3, miss.reason
