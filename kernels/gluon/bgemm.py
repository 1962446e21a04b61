# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="import-untyped"
"""Launcher of the Hopper FP8 grouped GEMM, the form for token counts where the tensor cores are the limit.

Below MIN_TOKENS the weight read is the limit and the portable Triton kernel (swapped operands, small tiles) is faster.
"""

import math

import torch
from torch import Tensor

from ..modes import current
from .gate import hopper_reason

MIN_TOKENS = 192
TUNING = {"CONSUMER_REGISTERS": 232, "PRODUCER_REGISTERS": 40}


def unsupported_reason(
    codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, **parameters
) -> str | None:
    """Why this kernel cannot run (or should not, at this token count), or None; arguments as of :func:`launch`.

    parameters: block, weight_block, out_dtype.
    """
    if reason := hopper_reason(codes.device):
        return reason
    groups, tokens, width = codes.shape
    if current().batch_invariant:
        return "batch_invariant: one kernel for every number of tokens, the portable one"
    if tokens < MIN_TOKENS:
        return f"{tokens} tokens: below {MIN_TOKENS} the weight-streaming kernel is faster"
    for name in ("block", "weight_block"):
        if parameters[name] != 128:
            return f"{name} {parameters[name]}; 128 only"
    if parameters["out_dtype"] not in (torch.bfloat16, torch.float16):
        return f"output dtype {parameters['out_dtype']}; 16-bit only"
    if width % 512:
        return f"K {width} is not a multiple of 512"
    if weight.shape[1] % 128:
        return f"R {weight.shape[1]} is not a multiple of 128"
    if scales.numel() * 4 >= 1 << 31 or groups * tokens >= 1 << 31:
        return "sizes beyond 32-bit offsets"
    return None


def choose_halves(tokens: int, groups: int, row_tiles: int, sm_count: int) -> int:
    """Tiles of 256 tokens (2) or of 128 (1): whichever needs the smaller total of waves times work per tile."""
    cost = {
        halves: math.ceil(groups * row_tiles * math.ceil(tokens / (128 * halves)) / sm_count) * (halves + 0.15)
        for halves in (1, 2)
    }
    return min(cost, key=cost.__getitem__)


def launch(
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    out: Tensor,
    *,
    halves: int | None = None,
    tuning: dict[str, int] | None = None,
) -> None:
    """out[t, g, r] = sum over k of (codes * scales)[g, t, k] * (weight * weight_scales)[g, r, k].

    codes [G, T, K] and weight [G, R, K] float8_e4m3fn; scales fp32 [G, K/128, M] or int32 [G, K/512, M] (four exponent
    bytes per word, lowest block in the low byte), M >= T; weight_scales [G, R/128, K/128] fp32, float8_e8m0fnu or uint8
    exponents; out [T, G, R] contiguous, 16-bit. T must be positive.
    """
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .bgemm_kernel import bgemm_kernel

    groups, tokens, width = codes.shape
    rows = weight.shape[1]
    codes, scales, weight, weight_scales = (x.contiguous() for x in (codes, scales, weight, weight_scales))
    sms = torch.cuda.get_device_properties(codes.device).multi_processor_count
    halves = halves or choose_halves(tokens, groups, rows // 128, sms)
    blocks_m = math.ceil(tokens / (128 * halves))
    count = groups * blocks_m * (rows // 128)
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    packed = scales.dtype == torch.int32
    byte_weights = weight_scales.element_size() == 1
    bgemm_kernel[(min(sms, count),)](
        TensorDescriptor.from_tensor(codes.view(groups * tokens, width), [64, 128], layout),
        TensorDescriptor.from_tensor(weight.view(groups * rows, width), [128, 128], layout),
        scales.view(torch.int8) if packed else scales,
        weight_scales.view(torch.uint8) if byte_weights else weight_scales,
        out,
        count,
        tokens,
        blocks_m,
        scales.shape[-1],
        ROW_TILES=rows // 128,
        K_BLOCKS=width // 128,
        HALVES=halves,
        PACKED_X=packed,
        BYTES_W=byte_weights,
        num_warps=4,
        **(TUNING | (tuning or {})),
    )
