# SPDX-License-Identifier: Apache-2.0
"""Role ``bgemm``: the grouped output projection (``o_a_proj`` / ``wo_a``), one matrix product per group of heads."""

from __future__ import annotations

import torch
from torch import Tensor


def bgemm(x: Tensor, weight: Tensor) -> Tensor:
    """``out[t, g, r] = sum_k x[t, g, k] * weight[g, r, k]``.

    x: [T, G, K], the rotated output with the heads of a group side by side (K = heads per group x head_dim), bf16, fp16
    or fp32. weight: [G, R, K] in the same dtype. Returns [T, G, R] in that dtype (fp32 accumulation).

    Formula: ``einsum("bsgd,grd->bsgr", o, wo_a)`` of the official inference code. The FP8 form is the same product of
    the dequantised operands: ``fp8_quant.dequantise`` and :func:`dequantise_weight`.
    """
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)


def dequantise_weight(codes: Tensor, scales: Tensor, block: int = 128) -> Tensor:
    """Codes [..., R, K] E4M3 with one scale per ``block`` x ``block`` -> fp32 [..., R, K].

    scales: [..., ceil(R/block), ceil(K/block)], fp32 or float8_e8m0fnu (a power of two).
    """
    rows, columns = codes.shape[-2:]
    wide = scales.float().repeat_interleave(block, dim=-2)[..., :rows, :]
    return codes.float() * wide.repeat_interleave(block, dim=-1)[..., :columns]
