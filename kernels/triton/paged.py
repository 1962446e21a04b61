# SPDX-License-Identifier: Apache-2.0
"""Decodes the rows of a paged FP8 cache that a batch of tokens attends into bf16 rows of a workspace.

The portable form of attention over FP8 pages: this kernel, then gathered attention over the workspace, a chunk of
tokens at a time. Values are products of E4M3 codes and powers of two, so their bf16 form is exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.paged import EXPONENT_BYTES, HEAD_DIM, NOPE, VALUE_BYTES, page_bytes
from .interpreter import cast_fp32, decode_e4m3, e4m3_is_native

WORKSPACE_BYTES = 160 << 20
ROWS = 8  # per program


@triton.jit(do_not_specialize=["columns", "row_count", "page_size", "token0"])
def _decode_kernel(
    pages,
    indices,
    lengths,
    out,
    out_indices,
    page_stride,
    index_stride,
    columns,
    row_count,
    page_size,
    token0,
    out_columns,
    first_column,
    HAS_LENGTHS: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
    NOPE: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_BYTES: tl.constexpr,
    EXPONENT_BYTES: tl.constexpr,
):
    local = tl.program_id(0)
    token = token0 + local
    column = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    limit = columns
    if HAS_LENGTHS:
        limit = tl.minimum(limit, tl.load(lengths + token).to(tl.int32))
    index = tl.load(indices + token.to(tl.int64) * index_stride + column, mask=column < limit, other=-1)
    valid = (index >= 0) & (index < row_count)
    index = tl.where(valid, index, 0)
    page, offset = index // page_size, index % page_size
    start = page.to(tl.int64) * page_stride
    values = pages + start + offset * VALUE_BYTES
    exponents = pages + start + page_size * VALUE_BYTES + offset * EXPONENT_BYTES
    channel = tl.arange(0, DIM)
    is_nope = channel < NOPE
    load = valid[:, None] & is_nope[None, :]
    code = tl.load(values[:, None] + channel[None, :], mask=load, other=0)
    exponent = tl.load(exponents[:, None] + (channel // 64)[None, :], mask=load, other=127)
    # 2 ** (e - 127); the exponent byte 0 would be a subnormal, twice a half of it avoids that
    scale = (tl.maximum(exponent.to(tl.int32), 1) << 23).to(tl.float32, bitcast=True)
    scale = tl.where(exponent == 0, scale * 0.5, scale)
    nope = decode_e4m3(code, NATIVE) * scale
    place = 2 * tl.maximum(channel - NOPE, 0) + NOPE
    rest = valid[:, None] & ~is_nope[None, :]
    low = tl.load(values[:, None] + place[None, :], mask=rest, other=0).to(tl.uint32)
    high = tl.load(values[:, None] + place[None, :] + 1, mask=rest, other=0).to(tl.uint32)
    rope = ((low | (high << 8)) << 16).to(tl.float32, bitcast=True)
    x = tl.where(is_nope[None, :], nope, rope)
    row = local.to(tl.int64) * out_columns + first_column + column
    write = (column < columns)[:, None]
    tl.store(out + row[:, None] * DIM + channel[None, :], cast_fp32(x, out.dtype.element_ty), mask=write)
    tl.store(out_indices + row, tl.where(valid, row, -1).to(tl.int32), mask=column < columns)


def decode_rows(
    pages: Tensor,
    page_size: int,
    indices: Tensor,
    lengths: Tensor | None,
    out: Tensor,
    out_indices: Tensor,
    first_column: int,
    token0: int,
    tokens: int,
) -> None:
    """Decode the rows of tokens token0 .. token0 + tokens - 1 and list them.

    pages, indices [T, K], lengths [T]: of the op. out: [tokens * W, 512], the row of token t's column k at
    (t - token0) * W + first_column + k; out_indices: int32 [tokens, W], that row, or -1 where the key is invalid.
    """
    data = page_bytes(pages, page_size)
    if indices.stride(-1) != 1:
        indices = indices.contiguous()
    columns = indices.shape[1]
    if columns == 0:
        return
    _decode_kernel[(tokens, triton.cdiv(columns, ROWS))](
        data,
        indices,
        indices if lengths is None else lengths.contiguous(),
        out,
        out_indices,
        data.stride(0),
        indices.stride(0),
        columns,
        data.shape[0] * page_size,
        page_size,
        token0,
        out_indices.shape[1],
        first_column,
        HAS_LENGTHS=lengths is not None,
        NATIVE=e4m3_is_native(pages.device),
        ROWS=ROWS,
        NOPE=NOPE,
        DIM=HEAD_DIM,
        VALUE_BYTES=VALUE_BYTES,
        EXPONENT_BYTES=EXPONENT_BYTES,
        num_warps=4,
    )


def decoded_chunks(
    q: Tensor,
    pages: Tensor,
    page_size: int,
    indices: Tensor,
    lengths: Tensor | None,
    extra_pages: Tensor | None,
    extra_indices: Tensor | None,
    extra_lengths: Tensor | None,
    extra_page_size: int,
):
    """Yield (first token, tokens, rows [N, 512] in q's dtype, indices [tokens, W]) for q [T, H, 512]."""
    total = q.shape[0]
    extra_columns = 0 if extra_indices is None else extra_indices.shape[1]
    width = indices.shape[1] + extra_columns
    chunk = max(1, min(total, WORKSPACE_BYTES // max(width * HEAD_DIM * q.element_size(), 1)))
    rows = torch.empty(chunk * width, HEAD_DIM, dtype=q.dtype, device=q.device)
    lists = torch.empty(chunk, width, dtype=torch.int32, device=q.device)
    for token0 in range(0, total, chunk):
        tokens = min(chunk, total - token0)
        decode_rows(pages, page_size, indices, lengths, rows, lists, 0, token0, tokens)
        if extra_pages is not None and extra_indices is not None:
            decode_rows(
                extra_pages,
                extra_page_size,
                extra_indices,
                extra_lengths,
                rows,
                lists,
                indices.shape[1],
                token0,
                tokens,
            )
        yield token0, tokens, rows, lists[:tokens]
