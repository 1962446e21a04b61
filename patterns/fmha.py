# SPDX-License-Identifier: Apache-2.0
"""Role ``fmha``: attention over one latent per key that serves all heads as key and as value, with a sink."""

from __future__ import annotations

import torch
from torch import Tensor


def fmha(
    q: Tensor, kv: Tensor, mask: Tensor | None = None, sink: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Softmax attention with shared keys and values.

    q: [B, S, H, D] bf16, fp16 or fp32. kv: [B or 1, N, D] (keys shared by the queries) or [B or 1, S, N, D] (keys of
    each query, as a gather gives them), in the dtype of ``q``. mask: [B or 1, S, N], bool (True = attend) or additive,
    or None. sink: [H] or None, a logit in the denominator without a value row. scale: ``D ** -0.5`` when None. Returns
    [B, S, H, D] in ``q.dtype``; scores and softmax in fp32::

        p_n = exp(scale * q.kv_n + mask_n - m)          out = sum_n p_n kv_n / (sum_n p_n + exp(sink - m))

    Formula: ``sparse_attn`` of the official inference code, and transformers' eager attention with the sink as one more
    logit column whose probability is dropped.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    rows = kv.float() if kv.dim() == 4 else kv.float().unsqueeze(1)
    logits = torch.matmul(q.float(), rows.transpose(-1, -2)) * scale
    if mask is not None:
        if mask.dtype == torch.bool:
            logits = logits.masked_fill(~mask.unsqueeze(2), float("-inf"))
        else:
            logits = logits + mask.float().unsqueeze(2)
    keys = logits.shape[-1]
    if sink is not None:
        column = sink.float().view(1, 1, -1, 1).expand(*logits.shape[:-1], 1)
        logits = torch.cat((logits, column), dim=-1)
    return torch.matmul(torch.softmax(logits, dim=-1)[..., :keys], rows).to(q.dtype)


def gathered(
    q: Tensor, kv: Tensor, indices: Tensor, sink: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """:func:`fmha` over the rows that ``indices`` pick for each query.

    q: [B, S, H, D]. kv: [B, N, D]. indices: [B, S, K] integers; negative ones are not attended, a row that is named
    twice counts twice. Returns [B, S, H, D].
    """
    batch, queries, count = indices.shape
    at = indices.long().clamp(min=0).unsqueeze(-1).expand(batch, queries, count, kv.shape[-1])
    rows = torch.gather(kv.unsqueeze(1).expand(batch, queries, kv.shape[1], kv.shape[2]), 2, at)
    return fmha(q, rows, indices >= 0, sink, scale)
