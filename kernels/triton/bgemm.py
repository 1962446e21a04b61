# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"
"""Grouped FP8 matrix product with block scales: ``out[t, g] = weight[g] @ x[g, t]``, E4M3 operands, fp32 accumulation.

Two shapes of one loop over K, whose step never straddles a scale block:

    SWAP      weight rows are the tensor core's M operand. For few tokens the product is a stream of weights: narrow
              token tiles waste nothing, and deep pipelines of small weight tiles keep the memory busy.
    no SWAP   tokens are M: their scales then lie along the accumulator's rows, two to four registers instead of one
              per column. Better from about 64 tokens on.

Every partial product is promoted to fp32 with its scales before the next: E4M3 tensor cores accumulate with fewer bits.
GPUs without E4M3 arithmetic (NATIVE = False) decode to bf16, which holds every E4M3 value exactly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launching import at, ensure_context
from ..modes import current
from ..tuning import bgemm as tuning
from .interpreter import cast_fp32, decode_e4m3, device_of, e4m3_is_native, round_to


@triton.jit
def _token_scales(pointers, token_mask, columns, step, BLOCKS: tl.constexpr, PACKED: tl.constexpr):
    """fp32 scales at K step ``step`` of the tokens whose first scales ``pointers`` names; BLOCKS steps share one."""
    block = step // BLOCKS
    if PACKED:
        word = tl.load(pointers + (block // 4).to(tl.int64) * columns, mask=token_mask, other=0)
        value = (((word >> (block % 4 * 8)) & 0xFF) << 23).to(tl.float32, bitcast=True)
    else:
        value = tl.load(pointers + block.to(tl.int64) * columns, mask=token_mask, other=0.0)
    return value


@triton.jit
def _weight_scales(pointers, row_mask, step, BLOCKS: tl.constexpr, BYTES: tl.constexpr, SCALAR: tl.constexpr):
    """fp32 scales of the weight rows (or of the whole tile, as a scalar) at K step ``step``."""
    if SCALAR:
        value = tl.load(pointers + step // BLOCKS)
    else:
        value = tl.load(pointers + step // BLOCKS, mask=row_mask, other=0)
    if BYTES:
        value = (value.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return value


@triton.jit
def _operand(x, NATIVE: tl.constexpr):
    """Loaded codes as a tl.dot operand: E4M3 as they are, or uint8 patterns decoded to bf16."""
    if NATIVE:
        y = x
    else:
        y = round_to(decode_e4m3(x, False), tl.bfloat16)
    return y


@triton.jit(do_not_specialize=["tokens"])
def bgemm_kernel(
    weight_descriptor,
    codes_descriptor,
    codes_ptr,
    codes_stride_g,
    codes_stride_t,
    scales_ptr,
    weight_ptr,
    weight_stride_g,
    weight_stride_r,
    factors_ptr,
    out_ptr,
    tokens,
    G: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHT_BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    PREFETCH: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Grid (row tiles x token tiles, G); row tiles run fastest, so that neighbouring programs share a token tile.

    TMA: tiles come through the descriptors (contiguous operands, [G * T, K] and [G * R, K]; rows past a group's end
    belong to the next group and are dropped at the store). PREFETCH: load the scales of step k + 1 in step k instead
    of pipelining them through shared memory.
    """
    ROW_TILES: tl.constexpr = (R + BLOCK_R - 1) // BLOCK_R
    STEPS: tl.constexpr = K // BLOCK_K
    group = tl.program_id(1)
    r0 = tl.program_id(0) % ROW_TILES * BLOCK_R
    t0 = tl.program_id(0) // ROW_TILES * BLOCK_T
    columns = (tokens + 3) // 4 * 4
    row = r0 + tl.arange(0, BLOCK_R)
    row_mask = row < R
    token = t0 + tl.arange(0, BLOCK_T)
    token_mask = token < tokens
    k = tl.arange(0, BLOCK_K)
    wide = group.to(tl.int64)

    SCALE_BLOCKS: tl.constexpr = K // BLOCK // 4 if PACKED else K // BLOCK
    token_scales = scales_ptr + wide * SCALE_BLOCKS * columns + token
    PER_ROW: tl.constexpr = K // WEIGHT_BLOCK
    factors_ptr += wide * ((R + WEIGHT_BLOCK - 1) // WEIGHT_BLOCK * PER_ROW)
    # One weight scale per tile where the tile lies inside a scale block.
    SCALAR: tl.constexpr = WEIGHT_BLOCK % BLOCK_R == 0
    if SCALAR:
        weight_scales = factors_ptr + r0 // WEIGHT_BLOCK * PER_ROW
    else:
        weight_scales = factors_ptr + row // WEIGHT_BLOCK * PER_ROW
    STEPS_X: tl.constexpr = BLOCK // BLOCK_K
    STEPS_W: tl.constexpr = WEIGHT_BLOCK // BLOCK_K

    if not TMA:
        weight_rows = weight_ptr + wide * weight_stride_g + row.to(tl.int64) * weight_stride_r
        token_rows = codes_ptr + wide * codes_stride_g + token.to(tl.int64) * codes_stride_t
        # Whole tiles of pointers, so that a step adds one scalar to them.
        if SWAP:
            weight_tile = weight_rows[:, None] + k[None, :]
            token_tile = token_rows[None, :] + k[:, None]
        else:
            weight_tile = weight_rows[None, :] + k[:, None]
            token_tile = token_rows[:, None] + k[None, :]
    if SWAP:
        acc = tl.zeros([BLOCK_R, BLOCK_T], tl.float32)
    else:
        acc = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    if PREFETCH:
        zero = group * 0
        next_x = _token_scales(token_scales, token_mask, columns, zero, STEPS_X, PACKED)
        next_w = _weight_scales(weight_scales, row_mask, zero, STEPS_W, BYTES, SCALAR)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        if TMA:
            w = weight_descriptor.load([group * R + r0, step * BLOCK_K])
            x = codes_descriptor.load([group * tokens + t0, step * BLOCK_K])
            if SWAP:
                x = x.T
            else:
                w = w.T
        elif SWAP:
            if R % BLOCK_R == 0:
                w = tl.load(weight_tile + step * BLOCK_K)
            else:
                w = tl.load(weight_tile + step * BLOCK_K, mask=row_mask[:, None], other=0.0)
            x = tl.load(token_tile + step * BLOCK_K, mask=token_mask[None, :], other=0.0)
        else:
            if R % BLOCK_R == 0:
                w = tl.load(weight_tile + step * BLOCK_K)
            else:
                w = tl.load(weight_tile + step * BLOCK_K, mask=row_mask[None, :], other=0.0)
            x = tl.load(token_tile + step * BLOCK_K, mask=token_mask[:, None], other=0.0)
        if PREFETCH:
            scale_x = next_x
            scale_w = next_w
            following = tl.minimum(step + 1, STEPS - 1)
            next_x = _token_scales(token_scales, token_mask, columns, following, STEPS_X, PACKED)
            next_w = _weight_scales(weight_scales, row_mask, following, STEPS_W, BYTES, SCALAR)
        else:
            scale_x = _token_scales(token_scales, token_mask, columns, step, STEPS_X, PACKED)
            scale_w = _weight_scales(weight_scales, row_mask, step, STEPS_W, BYTES, SCALAR)
        if SWAP:
            part = tl.dot(_operand(w, NATIVE), _operand(x, NATIVE))
            if SCALAR:
                acc += part * (scale_x * scale_w)[None, :]
            else:
                acc += part * scale_x[None, :] * scale_w[:, None]
        else:
            part = tl.dot(_operand(x, NATIVE), _operand(w, NATIVE))
            if SCALAR:
                acc += part * (scale_x * scale_w)[:, None]
            else:
                acc += part * scale_x[:, None] * scale_w[None, :]

    out_rows = out_ptr + (token.to(tl.int64) * G + group) * R
    value = cast_fp32(acc, out_ptr.dtype.element_ty)
    if SWAP:
        tl.store(out_rows[None, :] + row[:, None], value, mask=token_mask[None, :] & row_mask[:, None])
    else:
        tl.store(out_rows[:, None] + row[None, :], value, mask=token_mask[:, None] & row_mask[None, :])


def refuses(codes, scales, weight, weight_scales, block, weight_block, out_dtype) -> str | None:
    """Why the kernel cannot run these arguments of ``fp8_bgemm``, or None."""
    if out_dtype == torch.float64:
        return "float64 output (the kernel accumulates in fp32)"
    for name, width in (("block", block), ("weight_block", weight_block)):
        if width < 32 or width & (width - 1):
            return f"{name} {width} is not a power of two from 32 on"
    if codes.is_cuda and torch.cuda.get_device_capability(codes.device) < (8, 0):
        return "compute capability below 8.0"
    return None


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def fp8_bgemm(
    out: Tensor,
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    block: int = 128,
    weight_block: int = 128,
    tile: tuning.Tile | None = None,
    native: bool | None = None,
) -> None:
    """The product into ``out`` [T, G, R], contiguous. ``tile`` overrides the table, ``native=False`` forces the path of
    GPUs without E4M3 arithmetic."""
    groups, tokens, k = codes.shape
    rows = weight.shape[1]
    block_k = min(block, weight_block, 128)
    if native is None:
        native = e4m3_is_native(codes.device)
    if tile is None:
        choose = tuning.invariant_tile if current().batch_invariant else tuning.tile
        tile = choose(device_of(codes)[0], tokens, groups * rows, native)
    codes, weight = _dense_rows(codes), _dense_rows(weight)
    factors = weight_scales.contiguous()
    in_bytes = factors.dtype != torch.float32
    tma = tile.tma and native and _described(codes) and _described(weight)
    if not native:
        codes, weight = codes.view(torch.uint8), weight.view(torch.uint8)
    descriptors = (codes, codes)
    if tma:
        from triton.tools.tensor_descriptor import TensorDescriptor

        ensure_context()
        descriptors = (
            TensorDescriptor.from_tensor(weight.view(groups * rows, k), [tile.block_r, block_k]),
            TensorDescriptor.from_tensor(codes.view(groups * tokens, k), [tile.block_t, block_k]),
        )
    grid = (triton.cdiv(rows, tile.block_r) * triton.cdiv(tokens, tile.block_t), groups)
    at(bgemm_kernel, grid)(
        *descriptors,
        codes,
        *codes.stride()[:2],
        scales.contiguous(),
        weight,
        *weight.stride()[:2],
        factors.view(torch.uint8) if in_bytes else factors,
        out,
        tokens,
        G=groups,
        R=rows,
        K=k,
        BLOCK=block,
        WEIGHT_BLOCK=weight_block,
        PACKED=scales.dtype == torch.int32,
        BYTES=in_bytes,
        BLOCK_R=tile.block_r,
        BLOCK_T=tile.block_t,
        BLOCK_K=block_k,
        STAGES=tile.stages,
        SWAP=tile.swap,
        TMA=tma,
        PREFETCH=tile.prefetch_scales,
        NATIVE=native,
        num_warps=tile.num_warps,
        num_stages=tile.stages,
    )


def _described(x: Tensor) -> bool:
    """Whether a TMA descriptor can cover ``x``: contiguous, 16-byte aligned."""
    return x.is_contiguous() and x.data_ptr() % 16 == 0 and x.shape[-1] % 16 == 0
