# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"
"""Epilogue shared by attention, split-KV merge and the standalone kernels: inverse RoPE, FP8 quantisation, store.

One set of device functions, so that the fused and the unfused ways cannot drift apart. Everything works on a tile of
fp32 rows ``x [ROWS, WIDTH]``: row r holds channels ``d0 .. d0 + WIDTH - 1`` of head ``head[r]`` of token ``token[r]``.

    finish_rows     inverse RoPE (HALF > 0), quantisation (QUANT > 0), store: what most kernels call
    inverse_rope_rows, quantize_rows, store_codes, store_scales, store_rows    the steps

Layouts written (G groups of HPG heads, K = HPG * D, T tokens, M = ceil(T / 4) * 4):
    rows    [G, T, K] in the output pointer's dtype; G = 1 is the ordinary [T, H, D]
    codes   [G, T, K] E4M3 bit patterns (pass the pointer of a uint8 view)
    scales  QUANT_FP32, QUANT_POW2: fp32 [G, K / BLOCK, M]; QUANT_PACKED: int32 [G, K / (4 * BLOCK), M] holding four
            exponent bytes, lowest block in the lowest byte (pass the pointer of a uint8 view: bytes are stored one by
            one, so that a tile may cover less than four blocks). Columns T .. M-1 are written as zero by the program
            that owns token T-1.

Shapes are compile-time: WIDTH a power of two that divides D, BLOCK a power of two that divides WIDTH.
Scale rules (DESIGN: "the quantisation 1x128 along K"): raw fp32 ``max(amax, floor) / 448``; power of two
``2**ceil(log2(max(amax, floor) / 448))`` by the exponent-bit trick, exact where log2 is not.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .interpreter import cast_fp32, divide_by_448, encode_e4m3, exact_divide, exact_reciprocal, load_fp32

QUANT_NONE = tl.constexpr(0)
QUANT_FP32 = tl.constexpr(1)  # raw fp32 scale
QUANT_POW2 = tl.constexpr(2)  # power-of-two scale, stored as fp32
QUANT_PACKED = tl.constexpr(3)  # power-of-two scale, exponent bytes packed four to an int32


def quant_mode(scale_rule: str | None, pack_scales: bool = False) -> int:
    """Host side: the QUANT constexpr for ``scale_rule`` ("fp32", "ue8m0", None = no quantisation).

    Raises ValueError for an unknown rule and for packed scales with any rule but "ue8m0".
    """
    if scale_rule is None:
        return int(QUANT_NONE.value)
    if scale_rule == "fp32":
        if pack_scales:
            raise ValueError("pack_scales stores exponent bytes and needs scale_rule='ue8m0'; got scale_rule='fp32'")
        return int(QUANT_FP32.value)
    if scale_rule == "ue8m0":
        return int(QUANT_PACKED.value if pack_scales else QUANT_POW2.value)
    raise ValueError(f"scale_rule must be 'fp32' or 'ue8m0'; got {scale_rule!r}")


@triton.jit
def load_tables(cos_ptr, sin_ptr, table_offsets, cos_stride, sin_stride, HALF: tl.constexpr):
    """cos and sin of rows, [R, HALF] uint64 with one in each half; arguments as of :func:`inverse_rope_rows`.

    One word for both: tables change their layout through shared memory, and the second load would wait for the first
    to have done so.
    """
    pair = tl.arange(0, HALF)
    cos = load_fp32(tl.load(cos_ptr + table_offsets[0][:, None] + pair[None, :] * cos_stride))
    sin = load_fp32(tl.load(sin_ptr + table_offsets[1][:, None] + pair[None, :] * sin_stride))
    return (cos.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | sin.to(tl.uint32, bitcast=True).to(tl.uint64)


@triton.jit
def inverse_rope_rows(
    x,
    cos_ptr,
    sin_ptr,
    table_offsets,
    cos_stride,
    sin_stride,
    d0,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    tables=None,
):
    """Undo rotary embedding on the last 2*HALF of D channels, interleaved pairs: e*cos + o*sin, o*cos - e*sin.

    x [ROWS, WIDTH] fp32. table_offsets: ([R], [R]) integer pair, element offsets of each row's first cos and sin entry,
    with R = ROWS or 1 (one position for all rows: the tables are then read once). Every offset must be readable: clamp
    those of masked rows. cos_stride, sin_stride: elements between neighbouring pairs of a table row. Channels below
    D - 2*HALF pass unchanged, and nothing is read for them. tables: what load_tables gave, if that was called earlier
    so that the wait for it overlaps with others; used where WIDTH and D are multiples of 2*HALF.
    """
    if WIDTH % (2 * HALF) == 0 and D % (2 * HALF) == 0:
        # Chunks as wide as the table: a thread then holds the few table entries of its own columns instead of one per
        # column of the whole row, and the compiler sees which of its registers can belong to the rotated chunk. On the
        # attention tile (64 x 512) that decides between no spill and a hundred bytes.
        CHUNKS: tl.constexpr = WIDTH // (2 * HALF)
        if tables is None:
            tables = load_tables(cos_ptr, sin_ptr, table_offsets, cos_stride, sin_stride, HALF)
        both = tables[:, None, :]
        cos = (both >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
        sin = both.to(tl.uint32).to(tl.float32, bitcast=True)
        rotated = (d0 // (2 * HALF) + tl.arange(0, CHUNKS) == D // (2 * HALF) - 1)[None, :, None]
        even, odd = tl.split(tl.reshape(x, [ROWS, CHUNKS, HALF, 2]))
    else:
        pair = d0 // 2 + tl.arange(0, WIDTH // 2) - (D // 2 - HALF)
        rotated = (pair >= 0)[None, :]
        cos = tl.load(cos_ptr + table_offsets[0][:, None] + pair[None, :] * cos_stride, mask=rotated, other=0.0)
        sin = tl.load(sin_ptr + table_offsets[1][:, None] + pair[None, :] * sin_stride, mask=rotated, other=0.0)
        cos = load_fp32(cos)
        sin = load_fp32(sin)
        even, odd = tl.split(tl.reshape(x, [ROWS, WIDTH // 2, 2]))
    # Selected, not multiplied by 1 and 0: an infinity below the rotated channels must not make its neighbour a NaN.
    # Which product is rounded is written down: left to the compiler it depends on the tile.
    rotated_even = tl.where(rotated, tl.fma(even, cos, odd * sin), even)
    rotated_odd = tl.where(rotated, tl.fma(odd, cos, -(even * sin)), odd)
    return tl.reshape(tl.join(rotated_even, rotated_odd), [ROWS, WIDTH])


@triton.jit
def quantize_rows(
    x,
    floor,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    QUANT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """E4M3 codes and block scales of fp32 rows.

    x [ROWS, WIDTH] fp32 -> (codes uint8 [ROWS, WIDTH/BLOCK, BLOCK], scales [ROWS, WIDTH/BLOCK]: fp32, or for
    QUANT_PACKED the biased exponent byte as int32). floor: lower bound of the absolute maximum, > 0.
    """
    blocks = tl.reshape(x, [ROWS, WIDTH // BLOCK, BLOCK])
    amax = tl.maximum(tl.max(tl.abs(blocks), axis=2), floor)
    raw = divide_by_448(amax)
    if QUANT == QUANT_FP32:
        scale = raw
        reciprocal = exact_reciprocal(raw)
        value = exact_divide(blocks, scale[:, :, None], reciprocal[:, :, None])
    else:
        # Smallest power of two not below raw: any mantissa bit carries into the exponent.
        exponent = (raw.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23
        exponent = tl.minimum(tl.maximum(exponent, 1), 253)
        value = blocks * ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, :, None]
        if QUANT == QUANT_PACKED:
            scale = exponent
        else:
            scale = (exponent << 23).to(tl.float32, bitcast=True)
    return encode_e4m3(value, NATIVE), scale


@triton.jit
def store_codes(
    codes,
    codes_ptr,
    token,
    head,
    row_mask,
    num_tokens,
    d0,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    HPG: tl.constexpr,
):
    """Store codes uint8 [ROWS, WIDTH/BLOCK, BLOCK] into [G, T, K]. token, head, row_mask: [ROWS]."""
    row = ((head // HPG).to(tl.int64) * num_tokens + token) * (HPG * D) + (head % HPG) * D + d0
    inner = tl.arange(0, WIDTH // BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(codes_ptr + row[:, None, None] + inner[None, :, :], codes, mask=row_mask[:, None, None])


@triton.jit
def store_scales(
    scales,
    scales_ptr,
    token,
    head,
    row_mask,
    num_tokens,
    d0,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    HPG: tl.constexpr,
    QUANT: tl.constexpr,
):
    """Store block scales [ROWS, WIDTH/BLOCK] token-contiguous, and zeros into the padding columns behind the last
    token."""
    columns = (num_tokens + 3) // 4 * 4
    block = (head % HPG)[:, None] * (D // BLOCK) + d0 // BLOCK + tl.arange(0, WIDTH // BLOCK)[None, :]
    group = (head // HPG).to(tl.int64)[:, None]
    if QUANT == QUANT_PACKED:
        word = group * (HPG * D // (4 * BLOCK)) + block // 4
        address = scales_ptr + (word * columns + token[:, None]) * 4 + block % 4
        step: tl.constexpr = 4
        value = scales.to(tl.uint8)
    else:
        address = scales_ptr + (group * (HPG * D // BLOCK) + block) * columns + token[:, None]
        step: tl.constexpr = 1  # type: ignore[no-redef]
        value = scales
    tl.store(address, value, mask=row_mask[:, None])
    last = (row_mask & (token == num_tokens - 1))[:, None]
    for column in tl.static_range(1, 4):
        # From the rows' own tokens: Triton 3.9's interpreter makes int32 of a block of booleans "and" a scalar one.
        padding = last & (token[:, None] + column < columns)
        tl.store(address + column * step, tl.zeros_like(value), mask=padding)


@triton.jit
def store_rows(
    x,
    out_ptr,
    token,
    head,
    row_mask,
    num_tokens,
    d0,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    HPG: tl.constexpr,
):
    """Store fp32 rows [ROWS, WIDTH] into [G, T, K], rounded once to the pointer's element type."""
    row = ((head // HPG).to(tl.int64) * num_tokens + token) * (HPG * D) + (head % HPG) * D + d0
    value = cast_fp32(x, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row[:, None] + tl.arange(0, WIDTH)[None, :], value, mask=row_mask[:, None])


@triton.jit
def finish_rows(
    x,
    out_ptr,
    scales_ptr,
    cos_ptr,
    sin_ptr,
    table_offsets,
    cos_stride,
    sin_stride,
    token,
    head,
    row_mask,
    num_tokens,
    d0,
    floor,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    HPG: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    QUANT: tl.constexpr,
    NATIVE: tl.constexpr,
    tables=None,
):
    """The whole epilogue of one tile: inverse RoPE if HALF > 0, then codes and scales (QUANT > 0) or rows in out's
    dtype.

    x [ROWS, WIDTH] fp32; token, head, row_mask [ROWS]; see inverse_rope_rows for table_offsets. With HALF = 0 the table
    arguments, with QUANT = 0 scales_ptr and floor are not touched. out_ptr: uint8 for QUANT > 0. HPG = H (one group)
    and HALF = QUANT = 0 is the plain [T, H, D] store. The quantisation reads the fp32 values: no bf16 rounding in
    between.
    """
    if HALF > 0:
        if WIDTH == D:
            x = inverse_rope_rows(
                x, cos_ptr, sin_ptr, table_offsets, cos_stride, sin_stride, d0, ROWS, WIDTH, D, HALF, tables
            )
        elif d0 + WIDTH > D - 2 * HALF:  # other slices of the row have nothing to rotate
            x = inverse_rope_rows(
                x, cos_ptr, sin_ptr, table_offsets, cos_stride, sin_stride, d0, ROWS, WIDTH, D, HALF, tables
            )
    if QUANT == QUANT_NONE:
        store_rows(x, out_ptr, token, head, row_mask, num_tokens, d0, WIDTH, D, HPG)
    else:
        codes, scales = quantize_rows(x, floor, ROWS, WIDTH, BLOCK, QUANT, NATIVE)
        store_codes(codes, out_ptr, token, head, row_mask, num_tokens, d0, WIDTH, BLOCK, D, HPG)
        store_scales(scales, scales_ptr, token, head, row_mask, num_tokens, d0, WIDTH, BLOCK, D, HPG, QUANT)
