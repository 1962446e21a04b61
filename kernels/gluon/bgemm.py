# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="import-untyped"
"""Launcher of the Hopper FP8 grouped GEMM."""

import math

import torch
from torch import Tensor

from ..launching import at, ensure_context
from ..modes import current
from ..tuning.bgemm import Form, hopper_form
from .gate import hopper_reason

TUNING = {"CONSUMER_REGISTERS": 232, "PRODUCER_REGISTERS": 40}
# Few tokens need few registers, and leave the rest to the CTAs of the kernel before: these start beside them.
SWAP_TUNING = {"CONSUMER_REGISTERS": 80, "PRODUCER_REGISTERS": 40, "maxnreg": 72}


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
    for name in ("block", "weight_block"):
        if parameters[name] != 128:
            return f"{name} {parameters[name]}; 128 only"
    if parameters["out_dtype"] not in (torch.bfloat16, torch.float16):
        return f"output dtype {parameters['out_dtype']}; 16-bit only"
    if width % 512:
        return f"K {width} is not a multiple of 512"
    if weight.shape[1] % 128:
        return f"R {weight.shape[1]} is not a multiple of 128"
    for name, x in (("codes", codes), ("scales", scales), ("weight", weight)):
        if x.is_contiguous() and x.data_ptr() % 16:
            return f"{name} do not start at a multiple of 16 bytes"
    if scales.numel() * 4 >= 1 << 31 or groups * tokens >= 1 << 31:
        return "sizes beyond 32-bit offsets"
    return None


def launch(
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    out: Tensor,
    *,
    form: Form | None = None,
    pdl: bool = True,
    weight_ready: bool = False,
    tuning: dict[str, int] | None = None,
) -> None:
    """out[t, g, r] = sum over k of (codes * scales)[g, t, k] * (weight * weight_scales)[g, r, k].

    codes [G, T, K] and weight [G, R, K] float8_e4m3fn; scales fp32 [G, K/128, M] or int32 [G, K/512, M] (four exponent
    bytes per word, lowest block in the low byte), M >= T a multiple of 4; weight_scales [G, R/128, K/128] fp32,
    float8_e8m0fnu or uint8 exponents; out [T, G, R] contiguous, 16-bit. T must be positive. pdl: start while the kernel
    before finishes, and wait for it before any operand is read; let a kernel behind start likewise. weight_ready:
    as the mode of that name; with pdl, some of the weight is then loaded before the wait.
    """
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .bgemm_kernel import bgemm_kernel
    from .bgemm_overlapped import overlapped_bgemm_kernel

    groups, tokens, width = codes.shape
    rows = weight.shape[1]
    copied = not weight.is_contiguous()  # by the kernel in front
    codes, scales, weight, weight_scales = (x.contiguous() for x in (codes, scales, weight, weight_scales))
    sms = torch.cuda.get_device_properties(codes.device).multi_processor_count
    form = form or hopper_form(tokens, groups * rows, sms)
    blocks_t = math.ceil(tokens / form.tokens)
    row_tiles = rows // form.weight_rows
    count = groups * blocks_t * row_tiles
    bytes_layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    flat_layout = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    ensure_context()
    byte_weights = weight_scales.element_size() == 1
    arguments = (
        TensorDescriptor.from_tensor(codes.view(groups * tokens, width), [form.tokens, 128], bytes_layout),
        TensorDescriptor.from_tensor(weight.view(groups * rows, width), [form.weight_rows, 128], bytes_layout),
        TensorDescriptor.from_tensor(scales.view(-1), [max(form.tokens, 32)], flat_layout),
        weight_scales.view(torch.uint8) if byte_weights else weight_scales,
    )
    prefetch = form.prefetch if pdl and blocks_t == 1 else 0
    early = min(form.early, (width - prefetch) // (128 * form.blocks)) if pdl and weight_ready and not copied else 0
    sizes = (count, tokens, blocks_t, scales.shape[-1], early)
    options = {
        "ROW_TILES": row_tiles,
        "K_BLOCKS": width // 128,
        "STAGES": form.stages,
        "PACKED_X": scales.dtype == torch.int32,
        "BYTES_W": byte_weights,
        "PDL": pdl,
        "num_warps": 4,
        **({"launch_pdl": True} if pdl else {}),
        **((SWAP_TUNING if form.swap else TUNING) | (tuning or {})),
    }
    grid = (min(sms, count),)
    if form.overlapped:
        out_layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        to = TensorDescriptor.from_tensor(out.view(tokens, groups * rows), [64, 64], out_layout)
        unroll = 8 if width % 1024 == 0 else 4
        at(overlapped_bgemm_kernel, grid)(*arguments, to, *sizes, UNROLL=unroll, **options)
        return
    at(bgemm_kernel, grid)(
        *arguments,
        weight,
        out,
        *sizes,
        GROUPS=groups,
        TOKENS=form.tokens,
        WEIGHT_ROWS=form.weight_rows,
        BLOCKS=form.blocks,
        SWAP=form.swap,
        LET_IN=pdl and blocks_t == 1,  # two tiles of tokens were 2 us slower so, three and more do not gain
        PREFETCH=prefetch,
        **options,
    )
