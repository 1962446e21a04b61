# SPDX-License-Identifier: Apache-2.0
"""Reference of the grouped, block-scaled FP8 matrix product."""

import torch
from torch import Tensor

from ..modes import current
from .quant import dequantise


def weight_scale_values(weight_scales: Tensor) -> Tensor:
    """fp32 values of weight scales stored as fp32, float8_e8m0fnu, or its exponent bytes (uint8)."""
    if weight_scales.dtype == torch.float32:
        return weight_scales
    return weight_scales.view(torch.float8_e8m0fnu).to(torch.float32)


def fp8_bgemm(
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    block: int = 128,
    weight_block: int = 128,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """``out[t, g, r] = sum_k x[g, t, k] w[g, r, k]`` of the dequantised operands; see the op for shapes."""
    groups, tokens, _ = codes.shape
    rows = weight.shape[1]
    dtype = torch.float64 if out_dtype == torch.float64 else torch.float32
    out = torch.empty(tokens, groups, rows, dtype=out_dtype, device=codes.device)
    factors = weight_scale_values(weight_scales).to(dtype)
    for g in range(groups):  # one group at a time: the dequantised weights of all groups would be four times their size
        x = dequantise(codes[g : g + 1], scales[g : g + 1], block, dtype)[0]
        per_element = factors[g].repeat_interleave(weight_block, 0)[:rows].repeat_interleave(weight_block, 1)
        matrix = (weight[g].to(dtype) * per_element).mT
        # One token at a time where no other may matter: a product of several rows may sum in another order.
        parts = x.tensor_split(max(1, len(x))) if current().batch_invariant else (x,)
        out[:, g] = torch.cat([part @ matrix for part in parts]).to(out_dtype)
    return out
