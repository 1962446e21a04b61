# SPDX-License-Identifier: Apache-2.0
"""Role ``kv_merge``: one attention output out of the partial results of splits of the keys."""

from __future__ import annotations

import torch
from torch import Tensor


def kv_merge(partials: Tensor, lse: Tensor, sink: Tensor | None = None) -> Tensor:
    """Weight every split's result by its share of the softmax denominator.

    partials: [P, T, H, D], the normalised result of each split, bf16, fp16 or fp32. lse: [P, T, H] fp32, natural
    logarithm of each split's softmax denominator, -inf for a split without keys. sink: [H] or None, one more logit in
    the denominator that has no value row. Returns [T, H, D] in ``partials.dtype``::

        m = max(lse, sink)      w_p = exp(lse_p - m)      out = sum_p w_p * partial_p / (sum_p w_p + exp(sink - m))

    Formula: the log-sum-exp merge of Flash-Decoding (Dao et al. 2023), as FlashMLA's combine kernel and vLLM's
    ``merge_attn_states`` apply it; the sink enters once, after the merge.
    """
    top = lse.amax(0)
    if sink is not None:
        top = torch.maximum(top, sink.to(lse.dtype))
    weights = torch.exp(lse - top)
    total = weights.sum(0)
    if sink is not None:
        total = total + torch.exp(sink.to(lse.dtype) - top)
    merged = (weights.unsqueeze(-1) * partials.to(lse.dtype)).sum(0)
    return (merged / total.unsqueeze(-1)).to(partials.dtype)
