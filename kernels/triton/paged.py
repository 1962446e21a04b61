# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"
"""Decodes the rows of a paged FP8 cache that a batch of tokens attends into bf16 rows of a workspace.

The portable form of attention over FP8 pages: this kernel, then gathered attention over the workspace, a chunk of
tokens at a time. Values are products of E4M3 codes and powers of two, so their bf16 form is exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launching import at
from ..reference.paged import HEAD_DIM, VALUE_BYTES, page_bytes
from .interpreter import cast_fp32, decode_e4m3, e4m3_is_native, load_fp32

WORKSPACE_BYTES = 160 << 20
ROWS = 8  # per program


@triton.jit
def _decode_rows(
    pages,
    indices,
    lengths,
    page_stride,
    index_stride,
    columns,
    row_count,
    page_size,
    token,
    first,
    out,
    out_indices,
    out_row,
    HAS_LENGTHS: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
    VALUE_BYTES: tl.constexpr,
):
    """Decode columns first .. first + ROWS - 1 of a token's list to rows out_row + column of `out`, and list those."""
    column = first + tl.arange(0, ROWS)
    limit = columns
    if HAS_LENGTHS:
        limit = tl.minimum(limit, tl.load(lengths + token).to(tl.int32))
    index = tl.load(indices + token.to(tl.int64) * index_stride + column, mask=column < limit, other=-1)
    valid = (index >= 0) & (index < row_count)
    index = tl.where(valid, index, 0).to(tl.int32)
    page, offset = index // page_size, index % page_size
    start = page.to(tl.int64) * page_stride
    values = pages + (start + offset * VALUE_BYTES)
    exponents = pages + (start + page_size * VALUE_BYTES + offset * 8)
    block = tl.arange(0, 8)
    lane = tl.arange(0, 64)
    is_nope = block < 7
    exponent = tl.load(exponents[:, None] + block[None, :], mask=valid[:, None] & is_nope[None, :], other=127).to(
        tl.int32
    )
    # 2 ** (e - 127); exponent 0 is a subnormal: half of 2 ** -126
    scale = (tl.maximum(exponent, 1) << 23).to(tl.float32, bitcast=True) * tl.where(exponent == 0, 0.5, 1.0)
    place = block[:, None] * 64 + lane[None, :]
    load = valid[:, None, None] & is_nope[None, :, None]
    code = tl.load(values[:, None, None] + place[None, :, :], mask=load, other=0)
    x = decode_e4m3(code, NATIVE) * scale[:, :, None]
    rope = tl.load(
        (values + 448).to(tl.pointer_type(tl.bfloat16), bitcast=True)[:, None] + lane[None, :],
        mask=valid[:, None],
        other=0.0,
    )
    row = out_row + column
    write = column < columns
    pointers = out + row[:, None, None] * 512 + place[None, :, :]
    tl.store(pointers, cast_fp32(x, out.dtype.element_ty), mask=write[:, None, None] & is_nope[None, :, None])
    tl.store(
        out + row[:, None] * 512 + 448 + lane[None, :],
        cast_fp32(load_fp32(rope), out.dtype.element_ty),
        mask=write[:, None],
    )
    tl.store(out_indices + row, tl.where(valid, row, -1).to(tl.int32), mask=write)


@triton.jit(
    do_not_specialize=[
        "columns0",
        "columns1",
        "row_count0",
        "row_count1",
        "page_size0",
        "page_size1",
        "token0",
        "blocks0",
    ]
)
def _decode_kernel(
    pages0,
    pages1,
    indices0,
    indices1,
    lengths0,
    lengths1,
    out,
    out_indices,
    page_stride0,
    page_stride1,
    index_stride0,
    index_stride1,
    columns0,
    columns1,
    row_count0,
    row_count1,
    page_size0,
    page_size1,
    token0,
    blocks0,
    HAS_LENGTHS0: tl.constexpr,
    HAS_LENGTHS1: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
    VALUE_BYTES: tl.constexpr,
):
    local = tl.program_id(0)
    token = token0 + local
    block = tl.program_id(1)
    out_row = local.to(tl.int64) * (columns0 + columns1)
    if block < blocks0:
        _decode_rows(pages0, indices0, lengths0, page_stride0, index_stride0, columns0, row_count0, page_size0, token,
                     block * ROWS, out, out_indices, out_row, HAS_LENGTHS0, NATIVE, ROWS, VALUE_BYTES)  # fmt: skip
    else:
        _decode_rows(pages1, indices1, lengths1, page_stride1, index_stride1, columns1, row_count1, page_size1, token,
                     (block - blocks0) * ROWS, out, out_indices, out_row + columns0, HAS_LENGTHS1, NATIVE, ROWS,
                     VALUE_BYTES)  # fmt: skip


def _even_bytes(pages: Tensor, page_size: int) -> Tensor:
    """The cache as bytes [P, page_size * 584], its pages at even addresses (the bf16 values are read as such)."""
    data = page_bytes(pages, page_size)
    return data if data.stride(0) % 2 == 0 and data.data_ptr() % 2 == 0 else data.contiguous()


def _unit_stride(indices: Tensor) -> Tensor:
    return indices if indices.stride(-1) == 1 else indices.contiguous()


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
    columns = indices.shape[1]
    extra_columns = 0 if extra_pages is None or extra_indices is None else extra_indices.shape[1]
    width = columns + extra_columns
    chunk = max(1, min(total, WORKSPACE_BYTES // max(width * HEAD_DIM * q.element_size(), 1)))
    rows = torch.empty(chunk * width, HEAD_DIM, dtype=q.dtype, device=q.device)
    lists = torch.empty(chunk, width, dtype=torch.int32, device=q.device)
    data, indices = _even_bytes(pages, page_size), _unit_stride(indices)
    data1, indices1, lengths1 = data, indices, lengths
    if extra_pages is not None and extra_indices is not None and extra_columns:
        data1, indices1 = _even_bytes(extra_pages, extra_page_size), _unit_stride(extra_indices)
        lengths1 = extra_lengths
    blocks0, blocks1 = triton.cdiv(columns, ROWS), triton.cdiv(extra_columns, ROWS)
    for token0 in range(0, total, chunk):
        tokens = min(chunk, total - token0)
        if width:
            at(_decode_kernel, (tokens, blocks0 + blocks1))(
                data,
                data1,
                indices,
                indices1,
                indices if lengths is None else lengths.contiguous(),
                indices1 if lengths1 is None else lengths1.contiguous(),
                rows,
                lists,
                data.stride(0),
                data1.stride(0),
                indices.stride(0),
                indices1.stride(0),
                columns,
                extra_columns,
                data.shape[0] * page_size,
                data1.shape[0] * extra_page_size,
                page_size,
                max(extra_page_size, 1),
                token0,
                blocks0,
                HAS_LENGTHS0=lengths is not None,
                HAS_LENGTHS1=extra_columns > 0 and lengths1 is not None,
                NATIVE=e4m3_is_native(pages.device),
                ROWS=ROWS,
                VALUE_BYTES=VALUE_BYTES,
                num_warps=4,
            )
        yield token0, tokens, rows, lists[:tokens]
