# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-calls
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"
"""Standalone inverse RoPE and inverse RoPE + FP8 quantisation of an attention output, for chains that cannot be fused
further (attention from another library, or from a kernel without the epilogue).

A memory-bound kernel: 2 bytes read and 1 written per element. One program takes several tokens of one head, so that
every lane has several 16-byte loads in flight and the scales, which are token-contiguous, leave as vectors; a warp per
row, the usual form, keeps too little in flight to reach the memory's rate.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launching import at
from .epilogue import QUANT_NONE, QUANT_PACKED, finish_rows, quant_mode
from .interpreter import INTERPRET, e4m3_is_native, load_fp32, pdl_wait, supports_pdl

# Most rows (tokens x heads) launched dependent on the kernel before (programmatic dependent launch). Measured on an
# H200: 0.3 us less at one token, 0.1 to 0.2 at 128 to 256 tokens of 128 heads, nothing above.
PDL_MAX_ROWS = 1 << 15


@triton.jit(do_not_specialize=["num_tokens"])
def _rope_quant_kernel(
    o_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    scales_ptr,
    num_tokens,
    o_stride_t,
    o_stride_h,
    cos_stride_t,
    cos_stride,
    sin_stride_t,
    sin_stride,
    floor,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    HPG: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    QUANT: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    # Heads run fastest: neighbouring programs read neighbouring memory of one token tile.
    head = tl.program_id(0)
    d0 = tl.program_id(1) * WIDTH
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    row_mask = token < num_tokens
    clamped = tl.minimum(token, num_tokens - 1).to(tl.int64)
    channel = d0 + tl.arange(0, WIDTH)
    pdl_wait(PDL)
    rows = o_ptr + clamped * o_stride_t + head.to(tl.int64) * o_stride_h
    x = load_fp32(tl.load(rows[:, None] + channel[None, :]))
    finish_rows(
        x,
        out_ptr,
        scales_ptr,
        cos_ptr,
        sin_ptr,
        (clamped * cos_stride_t, clamped * sin_stride_t),
        cos_stride,
        sin_stride,
        token,
        head + tl.zeros([TOKENS], tl.int32),
        row_mask,
        num_tokens,
        d0,
        floor,
        TOKENS,
        WIDTH,
        D,
        HPG,
        HALF,
        BLOCK,
        QUANT,
        NATIVE,
    )


def largest_tile(extent: int, limit: int) -> int:
    """Largest power of two that divides ``extent`` and does not exceed ``limit``."""
    return min(extent & -extent, limit)


def layout(num_tokens: int, heads: int, dim: int) -> tuple[int, int, int]:
    """(tokens per program, warps, channels per program) for ``num_tokens`` tokens of ``heads`` heads."""
    if INTERPRET.value:
        return (4 if num_tokens > 2 else 1), 1, largest_tile(dim, 512)
    if num_tokens * heads <= 1024:  # fewer rows than the GPU has room for warps: lowest latency
        return 1, 4, largest_tile(dim, 512)
    if num_tokens * heads <= 4096:  # few programs, which start sooner than many
        return 4, 4, largest_tile(dim, 512)
    return 2, 1, largest_tile(dim, 512)


def _launch(o, cos, sin, groups, out, scales, block, quant, floor, tile=None, pdl=None):
    num_tokens, heads, dim = o.shape
    half = cos.shape[-1]
    if num_tokens == 0:
        return
    if o.stride(-1) != 1:
        o = o.contiguous()
    cos, sin = cos.expand(num_tokens, half), sin.expand(num_tokens, half)
    tokens, warps, width = tile or layout(num_tokens, heads, dim)
    if quant and width < block:
        raise ValueError(f"a tile of {width} channels cannot quantise blocks of {block}")
    # Triton grids allow 65,535 programs on the last axis only.
    if triton.cdiv(num_tokens, tokens) > 65535:
        tokens = max(tokens, triton.next_power_of_2(triton.cdiv(num_tokens, 65535)))
    # The launch's latency then passes while the kernel before drains. Its memory is touched behind the wait only.
    pdl = supports_pdl(o.device) and (num_tokens * heads <= PDL_MAX_ROWS if pdl is None else pdl)
    grid = (heads, dim // width, triton.cdiv(num_tokens, tokens))
    at(_rope_quant_kernel, grid)(
        o,
        cos,
        sin,
        out,
        scales,
        num_tokens,
        o.stride(0),
        o.stride(1),
        cos.stride(0),
        cos.stride(1),
        sin.stride(0),
        sin.stride(1),
        floor,
        TOKENS=tokens,
        WIDTH=width,
        D=dim,
        HPG=heads // groups,
        HALF=half,
        BLOCK=block,
        QUANT=quant,
        NATIVE=e4m3_is_native(o.device),
        PDL=pdl,
        num_warps=warps,
        **({"launch_pdl": True} if pdl else {}),
    )


def inverse_rope(
    o: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    groups: int,
    *,
    out: torch.Tensor | None = None,
    tile: tuple[int, int, int] | None = None,
    pdl: bool | None = None,
) -> torch.Tensor:
    """Inverse rotary embedding on the last 2*half channels, regrouped for the BGEMM.

    o [T, H, D] bf16, fp16 or fp32, any token and head strides; cos, sin [T, half] forward tables of each token's own
    position, any float dtype and strides -> [G, T, K] in o.dtype, K = H / groups * D. ``tile`` overrides (tokens per
    program, warps, channels per program), ``pdl`` whether the launch may overlap the
    end of the kernel before. Arguments are not checked here: the op does that.
    """
    num_tokens, heads, dim = o.shape
    if out is None:
        out = o.new_empty((groups, num_tokens, heads // groups * dim))
    _launch(o, cos, sin, groups, out, out, 1, int(QUANT_NONE.value), 1.0, tile, pdl)
    return out


def empty_quantized(
    num_tokens: int, heads: int, dim: int, groups: int, block: int, quant: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised (codes [G, T, K] float8_e4m3fn, scales) of the layout that ``quant`` (a QUANT constant) names."""
    k = heads // groups * dim
    columns = -(-num_tokens // 4) * 4
    codes = torch.empty((groups, num_tokens, k), dtype=torch.float8_e4m3fn, device=device)
    if quant == int(QUANT_PACKED.value):
        return codes, torch.empty((groups, k // (4 * block), columns), dtype=torch.int32, device=device)
    return codes, torch.empty((groups, k // block, columns), dtype=torch.float32, device=device)


def scale_pointer(scales: torch.Tensor, quant: int) -> torch.Tensor:
    """The tensor a kernel takes for ``scales``: packed words are addressed by the byte."""
    return scales.view(torch.uint8) if quant == int(QUANT_PACKED.value) else scales


def inverse_rope_quant(
    o: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    groups: int,
    block: int = 128,
    scale_rule: str = "fp32",
    floor: float = 1e-12,
    pack_scales: bool = False,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    tile: tuple[int, int, int] | None = None,
    pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``inverse_rope`` followed by E4M3 quantisation per token and ``block`` channels, from the rotated fp32 values.

    Returns (codes [G, T, K] float8_e4m3fn, scales fp32 [G, K/block, M] or packed int32 [G, K/(4*block), M]), M = T
    rounded up to 4, padding columns zero. ValueError for an unknown scale_rule and for packed fp32 scales.
    """
    quant = quant_mode(scale_rule, pack_scales)
    num_tokens, heads, dim = o.shape
    codes, scales = out or empty_quantized(num_tokens, heads, dim, groups, block, quant, o.device)
    _launch(o, cos, sin, groups, codes.view(torch.uint8), scale_pointer(scales, quant), block, quant, floor, tile, pdl)
    return codes, scales
