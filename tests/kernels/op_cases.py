# SPDX-License-Identifier: Apache-2.0
"""Arguments for every op at a given size, and float64 formulas written out independently of the reference code."""

import pytest
import torch
from torch import Tensor

NEG_INF = float("-inf")

# Where the ops are tested: the CPU always, a GPU where there is one (``-m gpu`` selects it).
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Maker:
    """Random operands on one device; sizes are symbols of the op contract."""

    def __init__(self, device="cpu", dtype=torch.float32, seed=0):
        self.device, self.dtype = torch.device(device), dtype
        self.generator = torch.Generator(device=self.device).manual_seed(seed)

    def normal(self, *shape, dtype=None, std=1.0) -> Tensor:
        x = torch.randn(*shape, generator=self.generator, device=self.device) * std
        return x.to(dtype or self.dtype)

    def integers(self, low, high, shape, dtype=torch.int32) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, device=self.device, dtype=dtype)

    def rope(self, *lead, half=32) -> tuple[Tensor, Tensor]:
        angle = torch.rand(*lead, half, generator=self.generator, device=self.device) * 6.28
        return angle.cos(), angle.sin()

    def dense(self, batch=2, queries=5, heads=4, dim=128, keys=17, sink=True, mask="none"):
        """(q, kv, mask, sink) of the dense ops."""
        q = self.normal(batch, queries, heads, dim)
        kv = self.normal(batch, keys, dim)
        keep = torch.rand(batch, queries, keys, generator=self.generator, device=self.device) < 0.7
        masks = {
            "none": None,
            "bool": keep,
            "float": torch.where(keep, self.normal(batch, queries, keys), NEG_INF),
            "min": torch.zeros(1, queries, keys, dtype=self.dtype, device=self.device).masked_fill(
                ~keep[:1], torch.finfo(self.dtype).min
            ),
        }
        return q, kv, masks[mask], self.normal(heads, dtype=torch.float32) if sink else None

    def gathered(self, tokens=5, heads=4, dim=128, pool=40, columns=9, sink=True):
        """(q, kv, indices, sink) of the gathered ops, about a fifth of the indices -1."""
        indices = self.integers(0, pool, (tokens, columns))
        indices = torch.where(self.integers(0, 5, (tokens, columns)) == 0, -1, indices)
        q, kv = self.normal(tokens, heads, dim), self.normal(pool, dim)
        return q, kv, indices, self.normal(heads, dtype=torch.float32) if sink else None

    def second_pool(self, tokens=5, dim=128, pool=30, columns=6):
        """(lengths, extra_kv, extra_indices, extra_lengths) for the gathered ops."""
        return (
            self.integers(0, 10, (tokens,)),
            self.normal(pool, dim),
            self.integers(-1, pool, (tokens, columns)),
            self.integers(0, columns + 1, (tokens,)),
        )

    def partials(self, splits=5, tokens=3, heads=4, dim=128, dtype=torch.float32, empty=True):
        """(partials, lse) with about a fifth of the partials empty and then poisoned with NaN."""
        partials = self.normal(splits, tokens, heads, dim, dtype=dtype)
        lse = self.normal(splits, tokens, heads, dtype=torch.float32, std=3.0)
        if empty:
            gone = self.integers(0, 5, (splits, tokens, heads)) == 0
            lse = lse.masked_fill(gone, NEG_INF)
            partials = partials.masked_fill(gone.unsqueeze(-1), float("nan"))
        return partials, lse

    def bgemm(self, groups=2, tokens=5, rows=192, k=512, block=128, weight_block=128, packed=False, stored="fp32"):
        """(codes, scales, weight, weight_scales) with random scales and zero padding columns."""
        codes = self.normal(groups, tokens, k, dtype=torch.float32, std=20.0).to(torch.float8_e4m3fn)
        weight = self.normal(groups, rows, k, dtype=torch.float32, std=20.0).to(torch.float8_e4m3fn)
        columns = (tokens + 3) // 4 * 4
        if packed:
            byte = self.integers(118, 130, (groups, k // block // 4, 4, columns))
            shift = torch.arange(0, 32, 8, device=self.device, dtype=torch.int32).view(1, 1, 4, 1)
            scales = (byte << shift).sum(2, dtype=torch.int32)
        else:
            scales = torch.rand(groups, k // block, columns, generator=self.generator, device=self.device) + 0.1
        scales[..., tokens:] = 0
        shape = (groups, -(-rows // weight_block), k // weight_block)
        if stored == "fp32":
            factors = torch.rand(shape, generator=self.generator, device=self.device) + 0.1
        else:
            factors = self.integers(118, 130, shape, dtype=torch.uint8)
            if stored == "e8m0":
                factors = factors.view(torch.float8_e8m0fnu)
        return codes, scales, weight, factors

    def pages(self, count=3, page_size=8, padding=40) -> Tensor:
        """A paged FP8 cache [count, bytes] of random values; the layout is written out in reference/paged.py."""
        values = self.normal(count, page_size, 448, dtype=torch.float32, std=40.0).to(torch.float8_e4m3fn)
        rotated = self.normal(count, page_size, 64, dtype=torch.bfloat16)
        data = torch.cat([values.view(torch.uint8), rotated.view(torch.uint8)], 2).flatten(1)
        exponents = self.integers(120, 126, (count, page_size * 8), dtype=torch.uint8)
        tail = self.integers(0, 256, (count, padding), dtype=torch.uint8)
        return torch.cat([data, exponents, tail], 1)

    def paged(self, tokens=5, heads=4, columns=9):
        """(q, pages, indices, sink) of the paged ops; pages of 8 rows."""
        return (
            self.normal(tokens, heads, 512),
            self.pages(),
            self.integers(-1, 26, (tokens, columns)),
            self.normal(heads, dtype=torch.float32),
        )


def every_op(make: Maker, tokens: int = 5):
    """(op name, args, kwargs) covering every op and every optional argument once; ``tokens`` queries in all."""
    m, groups, scale = make, 2, 0.09
    dense = m.dense(batch=1, queries=tokens, mask="bool")
    heads_first = dense[0].transpose(1, 2).contiguous().transpose(1, 2)
    dense_rope = m.rope(1, tokens, half=32)
    q, kv, indices, sink = m.gathered(tokens=tokens)
    rope = m.rope(tokens, half=32)
    pools = dict(zip(("lengths", "extra_kv", "extra_indices", "extra_lengths"), m.second_pool(tokens=tokens)))
    partials, lse = m.partials(tokens=tokens)
    total = torch.rand(lse.shape, device=m.device, generator=m.generator) + 0.5
    other = {"stat_scale": 0.7, "kv_split": 2, "out_dtype": torch.float16}
    packed = {"scale_rule": "ue8m0", "pack_scales": True, "block": 32}
    narrow = {"block": 32, "weight_block": 32}
    paged = m.paged(tokens=tokens)
    more_pages = {
        "lengths": m.integers(0, 10, (tokens,)),
        "extra_pages": m.pages(5, 4),
        "extra_indices": m.integers(-1, 20, (tokens, 6)),
        "extra_lengths": m.integers(0, 7, (tokens,)),
        "extra_page_size": 4,
    }
    return [
        ("attention", (*dense, scale), {}),
        ("attention", (heads_first, dense[1], None, None, scale, True, 3), {}),
        ("attention", (*m.dense(batch=1, queries=tokens, mask="float"), scale), {"window": 4}),
        ("attention_rope", (*dense, *dense_rope, scale, groups), {"causal": True}),
        ("attention_rope_quant", (*dense, *dense_rope, scale, groups), {}),
        ("attention_rope_quant", (*dense, *dense_rope, scale, groups), packed),
        ("attention_gathered", (q, kv, indices, sink, scale), {}),
        ("attention_gathered", (q, kv, indices.long(), None, scale), pools),
        ("attention_gathered_rope", (q, kv, indices, sink, *rope, scale, groups), {"lengths": pools["lengths"]}),
        ("attention_gathered_rope_quant", (q, kv, indices, sink, *rope, scale, groups), pools),
        ("attention_gathered_rope_quant", (q, kv, indices, sink, *rope, scale, groups), {**pools, **packed}),
        ("attention_partials", (q, kv, indices, scale, 3), pools),
        ("attention_paged_fp8", (*paged, scale, 8), {}),
        ("attention_paged_fp8_rope", (*paged, *rope, scale, groups, 8), more_pages),
        ("attention_paged_fp8_rope_quant", (*paged, *rope, scale, groups, 8), more_pages),
        ("inverse_rope", (q, *rope, groups), {}),
        ("inverse_rope_quant", (q, *rope, groups), {"scale_rule": "ue8m0"}),
        ("inverse_rope_quant", (q, *rope, groups), packed),
        ("merge_partials", (partials, lse, None, sink), {"return_stats": True}),
        ("merge_partials", (partials, lse, total, None), other),
        ("merge_partials_rope", (partials, lse, None, sink, *rope, groups), {"out_dtype": torch.bfloat16}),
        ("merge_partials_rope_quant", (partials, lse, None, sink, *rope, groups), {}),
        ("merge_partials_rope_quant", (partials, lse, total, sink, *rope, groups), packed),
        ("fp8_bgemm", m.bgemm(tokens=tokens), {}),
        ("fp8_bgemm", m.bgemm(tokens=tokens, **narrow, packed=True, stored="e8m0"), narrow),
        ("fp8_bgemm", m.bgemm(tokens=tokens, stored="uint8"), {"out_dtype": torch.float32}),
    ]


def attend_row(q: Tensor, keys: Tensor, logits_mask: Tensor, sink: Tensor | None, scale: float) -> Tensor:
    """One token, float64: ``q`` [H, D] over ``keys`` [N, D]; ``logits_mask`` [N] is added, -inf drops the key."""
    keep = logits_mask != NEG_INF
    keys, bias = keys[keep].double(), logits_mask[keep].double()
    logits = q.double() @ keys.T * scale + bias
    if sink is not None:
        logits = torch.cat((logits, sink.double().unsqueeze(1)), 1)
    if logits.shape[1] == 0:
        return torch.zeros_like(q, dtype=torch.float64)
    weights = torch.softmax(logits, -1)
    return weights[:, : len(keys)] @ keys


def dense_formula(q, kv, mask, sink, scale, causal=False, window=0) -> Tensor:
    """attention, token by token, from the contract's words; float64."""
    batch, queries, _, _ = q.shape
    keys = kv.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for b in range(batch):
        for s in range(queries):
            bias = torch.zeros(keys, dtype=torch.float64, device=q.device)
            if mask is not None:
                row = mask[b % mask.shape[0], s]
                bias = torch.where(row, 0.0, NEG_INF) if row.dtype == torch.bool else row.double()
            for n in range(keys):
                last = s + keys - queries
                if (causal and n > last) or (window > 0 and n <= last - window):
                    bias[n] = NEG_INF
            out[b, s] = attend_row(q[b, s], kv[b % kv.shape[0]], bias, sink, scale)
    return out


def gathered_formula(q, kv, indices, sink, scale, lengths=None, extra_kv=None, extra_indices=None, extra_lengths=None):
    """attention_gathered, token by token; float64."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for t in range(q.shape[0]):
        rows = []
        for pool, index, length in ((kv, indices, lengths), (extra_kv, extra_indices, extra_lengths)):
            if pool is None:
                continue
            picked = index[t] if length is None else index[t, : int(length[t])]
            picked = picked[(picked >= 0) & (picked < len(pool))].long()
            rows.append(pool[picked])
        rows = torch.cat(rows)
        out[t] = attend_row(q[t], rows, torch.zeros(len(rows), device=q.device), sink, scale)
    return out


def rope_formula(o: Tensor, cos: Tensor, sin: Tensor, groups: int) -> Tensor:
    """Inverse RoPE by complex multiplication with the conjugate, grouped [G, T, K]; float64."""
    o = o.double()
    tokens, heads, dim = o.shape
    width = 2 * cos.shape[-1]
    pairs = torch.view_as_complex(o[..., dim - width :].unflatten(-1, (-1, 2)).contiguous())
    turn = torch.complex(cos.double(), -sin.double()).unsqueeze(1)
    o = torch.cat((o[..., : dim - width], torch.view_as_real(pairs * turn).flatten(-2)), -1)
    return torch.stack([o[:, g * heads // groups : (g + 1) * heads // groups].flatten(1) for g in range(groups)])


def merge_formula(partials, lse, sink=None) -> Tensor:
    """Merge of normalised partials by their lse; float64. Empty partials are skipped one by one."""
    _, tokens, heads, dim = partials.shape
    out = torch.zeros(tokens, heads, dim, dtype=torch.float64, device=partials.device)
    for t in range(tokens):
        for h in range(heads):
            live = lse[:, t, h] != NEG_INF
            logits = lse[live, t, h].double()
            if sink is not None:
                logits = torch.cat((logits, sink[h : h + 1].double()))
            if len(logits):
                weights = torch.softmax(logits, 0)[: int(live.sum())]
                out[t, h] = weights @ partials[live, t, h].double()
    return out


def relative_error(got: Tensor, want: Tensor) -> float:
    """Norm of the error relative to the norm of ``want``."""
    return ((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-300)).item()
