# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-calls
"""Reference of the 1 x block E4M3 quantisation and of its two scale layouts."""

import torch
from torch import Tensor

INF = float("inf")
E4M3_MAX = 448.0
E4M3 = torch.float8_e4m3fn


def scale_columns(tokens: int) -> int:
    """Columns of a scale tensor: tokens rounded up to 4, so that every row is 16-byte aligned (TMA)."""
    return (tokens + 3) // 4 * 4


def _power_of_two_exponent(s: Tensor) -> Tensor:
    """Biased exponent (int32) of the smallest power of two >= ``s``, for positive normal fp32 ``s``.

    Adding 0x7FFFFF carries into the exponent field unless the mantissa is zero: exact, unlike ceil(log2(s)). Infinity
    gets the largest exponent that kernels can invert, so that it stays within its byte.
    """
    return ((s.contiguous().view(torch.int32) + 0x7FFFFF) >> 23).clamp(1, 253)


def quantise(
    x: Tensor, block: int = 128, scale_rule: str = "fp32", floor: float = 1e-12, pack_scales: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantise ``x`` [G, T, K] in blocks of ``block`` along K.

    ``scale_rule`` "fp32": ``s = max(amax, floor) / 448``; "ue8m0": the smallest power of two not below that. Codes are
    ``e4m3(clamp(x / s, -448, 448))``, round to nearest even. A NaN does not count in amax: its own code is NaN, the
    rest of the block is quantised without it. Returns codes [G, T, K] float8_e4m3fn and scales, whose
    columns beyond T are zero: fp32 [G, K/block, M], or with ``pack_scales`` int32 [G, K/(4*block), M] holding four
    biased exponents per word, lowest block in the low byte.
    """
    groups, tokens, k = x.shape
    blocks = x.unflatten(-1, (k // block, block))
    top = blocks.abs().nan_to_num(0.0, INF).amax(-1) if x.numel() else x.new_zeros(groups, tokens, k // block)
    # By a tensor: by a number, torch multiplies with its rounded reciprocal on a GPU.
    scales = (top.clamp(min=floor) / top.new_full((), E4M3_MAX)).float()
    if scale_rule == "ue8m0":
        exponent = _power_of_two_exponent(scales)
        scales = (exponent << 23).view(torch.float32)
    codes = (blocks / scales.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).flatten(-2)
    columns = scale_columns(tokens)
    if not pack_scales:
        stored = scales.new_zeros(groups, k // block, columns)
        stored[..., :tokens] = scales.transpose(1, 2)
        return codes, stored
    shift = torch.arange(0, 32, 8, dtype=torch.int32, device=x.device)
    words = (exponent.unflatten(-1, (k // block // 4, 4)) << shift).sum(-1, dtype=torch.int32)
    stored = words.new_zeros(groups, k // block // 4, columns)
    stored[..., :tokens] = words.transpose(1, 2)
    return codes, stored


def expand_scales(scales: Tensor, tokens: int) -> Tensor:
    """Either stored form -> fp32 scale per token and block: [G, T, K/block]."""
    scales = scales[..., :tokens]
    if scales.dtype == torch.int32:
        shift = torch.arange(0, 32, 8, dtype=torch.int32, device=scales.device)
        exponent = (scales.unsqueeze(2) >> shift.view(1, 1, 4, 1)) & 0xFF
        scales = (exponent << 23).view(torch.float32).flatten(1, 2)
    return scales.transpose(1, 2)


def dequantise(codes: Tensor, scales: Tensor, block: int = 128, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of ``codes`` [G, T, K] under ``scales`` in either stored form."""
    groups, tokens, k = codes.shape
    blocks: Tensor = codes.to(dtype).unflatten(-1, (k // block, block))
    return (blocks * expand_scales(scales, tokens).to(dtype).unsqueeze(-1)).flatten(-2)
