# SPDX-License-Identifier: Apache-2.0
"""Reference of dense attention: one KV latent per token serves as K and V for all heads."""

import torch
from torch import Tensor

from .quant import quantise
from .rope import group_heads, rotate_inverse
from .softmax import compute_dtype, divide_or_zero, rows_per_chunk, softmax_numerator

NEG_INF = float("-inf")


def _attend(
    q: Tensor, kv: Tensor, mask: Tensor | None, sink: Tensor | None, scale: float, causal: bool, window: int
) -> Tensor:
    """Attention of ``q`` [B, S, H, D] over ``kv`` [B or 1, N, D]; returns [B, S, H, D] in the compute dtype."""
    batch, queries, heads, dim = q.shape
    keys = kv.shape[1]
    dtype = compute_dtype(q.dtype)
    out = torch.zeros(batch, queries, heads, dim, dtype=dtype, device=q.device)
    if out.numel() == 0 or keys == 0:
        return out
    step = rows_per_chunk(heads * keys * dtype.itemsize)
    offset = keys - queries  # the last query sees the last key
    position = torch.arange(keys, device=q.device)
    values = kv.to(dtype)
    finite = torch.isfinite(values).all(-1)
    if clean := bool(finite.all()):
        finite_values = values
    else:
        finite_values = values.masked_fill(~finite.unsqueeze(-1), 0.0)
    for b in range(batch):
        b_kv, b_mask = (0 if kv.shape[0] == 1 else b), (0 if mask is None or mask.shape[0] == 1 else b)
        for start in range(0, queries, step):
            stop = min(queries, start + step)
            # Keys no query of this chunk can see are not even read.
            low = max(0, start + offset - window + 1) if window > 0 else 0
            high = min(keys, stop + offset) if causal else keys
            if high <= low:
                continue
            rows = q[b, start:stop].to(dtype).reshape(-1, dim)
            scores = (rows @ values[b_kv, low:high].mT).mul_(scale).view(stop - start, heads, high - low)
            visible = None
            if causal or window > 0:
                last = torch.arange(start, stop, device=q.device).unsqueeze(-1) + offset
                n = position[low:high]
                visible = n <= last if causal else torch.ones(1, 1, dtype=torch.bool, device=q.device)
                if window > 0:
                    visible = visible & (n > last - window)
            if mask is not None:
                part = mask[b_mask, start:stop, low:high]
                if mask.dtype == torch.bool:
                    visible = part if visible is None else visible & part
                else:
                    scores = scores + part.to(dtype).unsqueeze(1)
                    attended = part != NEG_INF
                    visible = attended if visible is None else visible & attended
            if visible is not None:
                scores = scores.masked_fill_(~visible.unsqueeze(1), NEG_INF)
            p, denominator, _ = softmax_numerator(scores, sink)
            result = p.view(-1, high - low) @ finite_values[b_kv, low:high]
            result = divide_or_zero(result.view(stop - start, heads, dim), denominator)
            if not clean:
                # 0 * NaN = NaN: a masked row must not leak, an attended one must, as in any softmax(q k) v.
                shown = torch.ones_like(p[:, 0], dtype=torch.bool) if visible is None else visible.expand_as(p[:, 0])
                for token in (shown & ~finite[b_kv, low:high]).any(-1).nonzero().flatten().tolist():
                    rows = values[b_kv, low:high][shown[token]]
                    result[token] = divide_or_zero(p[token][:, shown[token]] @ rows, denominator[token])
            out[b, start:stop] = result
    return out


def attention(
    q: Tensor,
    kv: Tensor,
    mask: Tensor | None,
    sink: Tensor | None,
    scale: float,
    causal: bool = False,
    window: int = 0,
) -> Tensor:
    """Softmax attention with sink; shapes as in :mod:`fusion_pass.kernels.ops.attention`.

    With ``p[n] = exp(scale * q.kv[n] + mask[n] - m)``: ``out = sum_n p[n] kv[n] / (sum_n p[n] + exp(sink - m))``.
    """
    return _attend(q, kv, mask, sink, scale, causal, window).to(q.dtype)


def _rotated(
    q: Tensor,
    kv: Tensor,
    mask: Tensor | None,
    sink: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    groups: int,
    causal: bool,
    window: int,
) -> Tensor:
    out = _attend(q, kv, mask, sink, scale, causal, window)
    batch, queries, heads, dim = out.shape
    cos, sin = (table.expand(batch, -1, -1).flatten(0, 1) for table in (cos, sin))
    return group_heads(rotate_inverse(out.view(batch * queries, heads, dim), cos, sin), groups)


def attention_rope(
    q: Tensor,
    kv: Tensor,
    mask: Tensor | None,
    sink: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    groups: int,
    causal: bool = False,
    window: int = 0,
) -> Tensor:
    """Attention, then inverse RoPE in the compute dtype, then one rounding: [G, B*S, H/G*D] in q.dtype."""
    return _rotated(q, kv, mask, sink, cos, sin, scale, groups, causal, window).to(q.dtype)


def attention_rope_quant(
    q: Tensor,
    kv: Tensor,
    mask: Tensor | None,
    sink: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    groups: int,
    block: int = 128,
    scale_rule: str = "fp32",
    floor: float = 1e-12,
    pack_scales: bool = False,
    causal: bool = False,
    window: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attention, inverse RoPE and 1 x ``block`` E4M3 quantisation from the unrounded result: (codes, scales)."""
    out = _rotated(q, kv, mask, sink, cos, sin, scale, groups, causal, window)
    return quantise(out, block, scale_rule, floor, pack_scales)
