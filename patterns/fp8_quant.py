# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-calls
"""Role ``fp8_quant``: block quantisation of the rotated output to E4M3, and the forms its scales are kept in."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
SCALE_RULES = ("fp32", "ue8m0")


def block_scale(amax: Tensor, scale_rule: str, floor: float) -> Tensor:
    """The scale of blocks whose largest magnitude is ``amax`` (fp32 or fp64, any shape), in its dtype.

    "fp32": ``max(amax, floor) / 448``. "ue8m0": the smallest power of two that is not below it, found in the bits of
    the fp32 value (log2 rounds, and a scale one step too small saturates codes). Raises ValueError for another rule.
    """
    scale = amax.clamp(min=floor) / E4M3_MAX
    if scale_rule == "fp32":
        return scale
    if scale_rule != "ue8m0":
        raise ValueError(f"fp8_quant: expected a scale rule out of {SCALE_RULES}, got {scale_rule!r}")
    bits = scale.float().contiguous().view(torch.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32).to(amax.dtype)


def fp8_quant(
    x: Tensor, block: int = 128, scale_rule: str = "fp32", floor: float = 1e-12
) -> tuple[Tensor, Tensor]:
    """Quantise in blocks of 1 x ``block`` along the last dimension.

    x: [..., K] of a float dtype, K a multiple of ``block`` (128 in DeepSeek-V4, 32 in V4.1). Returns codes [..., K]
    float8_e4m3fn and scales [..., K/block] fp32 (fp64 for fp64 ``x``), so that ``x ~ codes * scale``::

        s = block_scale(max |x|)        code = e4m3(clamp(x / s, -448, 448))        (round to nearest even)

    Formula: the official ``act_quant`` and DeepGEMM's ``per_token_cast_to_fp8``; the rule and the floor are a parameter
    because implementations differ in them (raw fp32 in transformers and TensorRT-LLM, power of two in vLLM and SGLang;
    floors 1e-4, 1e-10, 1e-12).
    """
    wide = x if x.dtype == torch.float64 else x.float()
    blocks = wide.unflatten(-1, (x.shape[-1] // block, block))
    scales = block_scale(blocks.abs().amax(-1), scale_rule, floor)
    codes = (blocks / scales.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return codes.flatten(-2), scales


def dequantise(codes: Tensor, scales: Tensor, block: int = 128) -> Tensor:
    """``codes * scale``: codes [..., K] E4M3, scales [..., K/block] (a float dtype), result [..., K] fp32."""
    blocks: Tensor = codes.float().unflatten(-1, (codes.shape[-1] // block, block))
    return (blocks * scales.float().unsqueeze(-1)).flatten(-2)


def pack_exponents(scales: Tensor) -> Tensor:
    """Powers of two [..., N] fp32 -> int32 [..., ceil(N/4)], four biased exponents per word, the first in the low byte.

    Source: DeepGEMM's UE8M0 scale operand.
    """
    exponents = (scales.contiguous().view(torch.int32) >> 23) & 0xFF
    exponents = torch.nn.functional.pad(exponents, (0, -scales.shape[-1] % 4))
    bytes_of: Tensor = exponents.unflatten(-1, (exponents.shape[-1] // 4, 4))
    low = bytes_of[..., 0] | (bytes_of[..., 1] << 8)
    return low | (bytes_of[..., 2] << 16) | (bytes_of[..., 3] << 24)


def unpack_exponents(words: Tensor, blocks: int) -> Tensor:
    """The inverse of :func:`pack_exponents`: int32 [..., ceil(blocks/4)] -> fp32 [..., blocks]."""
    exponents = torch.stack([(words >> shift) & 0xFF for shift in (0, 8, 16, 24)], dim=-1).flatten(-2)[..., :blocks]
    return (exponents << 23).contiguous().view(torch.float32)
