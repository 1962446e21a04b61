# SPDX-License-Identifier: Apache-2.0
"""Calls of every op in the forms and at the sizes that models use, as the dispatcher hands them to the ops."""

from __future__ import annotations

import torch
from op_cases import Maker

SCALE = 512**-0.5


def cases(tokens: int, seed: int, heads: int = 64, groups: int = 8, device: str = "cuda", rank: int = 1024):
    """(op, arguments, modes) of the forms that models call; data, but no size, depends on ``seed``."""
    m = Maker(device, torch.bfloat16, seed)
    quants = ((128, "fp32", 1e-10, False), (128, "ue8m0", 1e-10, True))
    found = []
    for batch, queries in {(tokens, 1), (1, tokens)}:
        masks = ("none", "bool", "float")
        for kind in masks:
            q, kv, mask, sink = m.dense(batch, queries, heads, 512, 640, mask=kind)
            shape = (SCALE, True, 128) if kind == "none" else (SCALE, False, 0)
            rope = m.rope(batch, queries)
            found.append(("attention", (q, kv, mask, sink, *shape), {}))
            found.append(("attention_rope", (q, kv, mask, sink, *rope, SCALE, groups, *shape[1:]), {}))
            found += [
                ("attention_rope_quant", (q, kv, mask, sink, *rope, SCALE, groups, *quant, *shape[1:]), {})
                for quant in quants
            ]
        shared = m.rope(1, queries)
        found.append(("attention_rope", (q, kv, None, sink, *shared, SCALE, groups, True, 0), {}))
    q, kv, indices, sink = m.gathered(tokens, heads, 512, 2000, 128)
    rope = m.rope(tokens)
    wide = torch.cat(m.rope(tokens), 1)
    strided = (wide[:, :32], wide[:, 32:])
    more = (m.integers(0, 129, (tokens,)), m.normal(3000, 512), m.integers(-1, 3000, (tokens, 512)),
            m.integers(0, 513, (tokens,)))  # fmt: skip
    for pools in ((None,) * 4, more):
        for modes in ({}, {"batch_invariant": True}):
            found.append(("attention_gathered", (q, kv, indices, sink, SCALE, *pools), modes))
            found.append(("attention_gathered_rope", (q, kv, indices, None, *rope, SCALE, groups, *pools), modes))
            found.append(("attention_gathered_rope_quant",
                          (q, kv, indices, sink, *rope, SCALE, groups, *quants[0], *pools), modes))  # fmt: skip
    found.append(("attention_gathered_rope", (q, kv, indices, sink, *strided, SCALE, groups, *more), {}))
    found.append(("attention_gathered", (q, kv, indices.long(), sink, SCALE, *more), {}))
    found.append(("attention_partials", (q, kv, indices, SCALE, 3, *more), {}))
    pages, extra = m.pages(40, 64, 64), m.pages(300, 2, 48)
    lists = (m.integers(-1, 2560, (tokens, 128)), m.integers(-1, 600, (tokens, 512)))
    second = (more[0], extra, lists[1], more[3], 2)
    for pools in ((None, None, None, None, 1), second):
        found.append(("attention_paged_fp8", (q, pages, lists[0], sink, SCALE, 64, *pools), {}))
        for quant in quants:
            args = (q, pages, lists[0], sink, *rope, SCALE, groups, 64, *quant, *pools)
            found.append(("attention_paged_fp8_rope_quant", args, {}))
    found.append(("attention_paged_fp8_rope", (q, pages, lists[0], sink, *rope, SCALE, groups, 64, *second), {}))
    odd = m.pages(40, 64, 40)[:, :-2]
    found.append(("attention_paged_fp8", (q, odd, lists[0], sink, SCALE, 64, *second), {}))
    found.append(("inverse_rope", (q, *rope, groups), {}))
    found += [("inverse_rope_quant", (q, *rope, groups, *quant), {}) for quant in quants]
    for dtype in (torch.bfloat16, torch.float32):
        partials, lse = m.partials(6, tokens, heads, 512, dtype)
        found.append(("merge_partials", (partials, lse, None, sink, 1.0, None, True, torch.bfloat16), {}))
        found.append(("merge_partials_rope", (partials, lse, None, sink, *rope, groups, 1.0, None, dtype), {}))
        found.append(
            ("merge_partials_rope_quant", (partials, lse, None, sink, *rope, groups, *quants[0], 1.0, None), {})
        )
    width = heads // groups * 512
    for packed, stored in ((False, "fp32"), (True, "e8m0")):
        operands = m.bgemm(groups, tokens, rank, width, packed=packed, stored=stored)
        for modes in ({}, {"batch_invariant": True}, {"weight_ready": True}):
            found.append(("fp8_bgemm", (*operands, 128, 128, torch.bfloat16), modes))
    return found
