# SPDX-License-Identifier: Apache-2.0
"""What the written-out forms of declared ops share."""

from __future__ import annotations

import torch
from torch import Tensor

from .bgemm import bgemm, dequantise_weight
from .fp8_quant import dequantise, unpack_exponents


class NotExpanded(Exception):
    """This call of a declared op has a form that its row does not describe; the message says which."""


def cos_sin(cache: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of a [max_pos, 2 * half] cache, cosines in the first half, sines in the second: two tables [T, half]."""
    rows = cache[positions]
    half = cache.shape[-1] // 2
    return rows[..., :half], rows[..., half:]


def fp8_product(codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, block: int,
                weight_block: int) -> Tensor:
    """codes [T, G, K] with scales [T, G, K/block] times weight [G, R, K] with its block scales: [T, G, R] fp32."""
    return bgemm(dequantise(codes, scales, block), dequantise_weight(weight, weight_scales, weight_block))


def scale_values(scales: Tensor, blocks: int) -> Tensor:
    """fp32 scales [..., blocks] out of fp32 ones or of packed UE8M0 exponents (int32, four per word)."""
    return unpack_exponents(scales, blocks) if scales.dtype == torch.int32 else scales
