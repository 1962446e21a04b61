# SPDX-License-Identifier: Apache-2.0
"""Reference of attention over a paged FP8 cache: the rows are decoded, the rest is gathered attention.

A cache row is 584 bytes: 448 E4M3 values, 64 bf16 values (the rotated channels), and 7 UE8M0 exponents, one per 64 of
the 448, with one byte of padding. A page of ``page_size`` rows holds first the 576 value bytes of all its rows, then
the 8 exponent bytes of all its rows; what follows in a page is padding. The value of code c under exponent e is
``e4m3(c) * 2 ** (e - 127)``.
"""

import torch
from torch import Tensor

from .gathered import attention_gathered, attention_gathered_rope, attention_gathered_rope_quant

NOPE = 448
ROPE = 64
HEAD_DIM = NOPE + ROPE
BLOCK = 64
VALUE_BYTES = NOPE + 2 * ROPE
EXPONENT_BYTES = 8
ROW_BYTES = VALUE_BYTES + EXPONENT_BYTES


def page_bytes(pages: Tensor, page_size: int) -> Tensor:
    """The cache as uint8 [P, page_size * 584]; ``pages`` as the ops take it, copied if a page is in pieces."""
    packed = pages.stride(-1) == 1 and (pages.dim() == 2 or pages.stride(1) == ROW_BYTES or page_size == 1)
    flat = (pages if packed else pages.contiguous()).view(torch.uint8)
    return flat.as_strided((flat.shape[0], page_size * ROW_BYTES), (flat.stride(0), 1))


def decode_pages(pages: Tensor, page_size: int, dtype: torch.dtype) -> Tensor:
    """All rows of the cache, [P * page_size, 512] in ``dtype``; row ``page * page_size + offset``."""
    data = page_bytes(pages, page_size)
    count = data.shape[0]
    values = data[:, : page_size * VALUE_BYTES].reshape(count * page_size, VALUE_BYTES)
    exponents = data[:, page_size * VALUE_BYTES :].reshape(count * page_size, EXPONENT_BYTES)[:, : NOPE // BLOCK]
    codes = values[:, :NOPE].contiguous().view(torch.float8_e4m3fn).float().view(-1, NOPE // BLOCK, BLOCK)
    scale = torch.exp2(exponents.float() - 127.0)
    nope = (codes * scale.unsqueeze(-1)).view(-1, NOPE).to(dtype)
    rope = values[:, NOPE:].contiguous().view(torch.bfloat16).to(dtype)
    return torch.cat((nope, rope), 1)


def _pools(
    q: Tensor, pages: Tensor, page_size: int, extra_pages: Tensor | None, extra_page_size: int
) -> tuple[Tensor, Tensor | None]:
    kv = decode_pages(pages, page_size, q.dtype)
    return kv, None if extra_pages is None else decode_pages(extra_pages, extra_page_size, q.dtype)


def attention_paged_fp8(
    q: Tensor,
    pages: Tensor,
    indices: Tensor,
    sink: Tensor | None,
    scale: float,
    page_size: int,
    lengths: Tensor | None = None,
    extra_pages: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_lengths: Tensor | None = None,
    extra_page_size: int = 0,
) -> Tensor:
    """[T, H, 512]; see :mod:`fusion_pass.kernels.ops.paged` for shapes."""
    kv, extra_kv = _pools(q, pages, page_size, extra_pages, extra_page_size)
    return attention_gathered(q, kv, indices, sink, scale, lengths, extra_kv, extra_indices, extra_lengths)


def attention_paged_fp8_rope(
    q: Tensor,
    pages: Tensor,
    indices: Tensor,
    sink: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    groups: int,
    page_size: int,
    lengths: Tensor | None = None,
    extra_pages: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_lengths: Tensor | None = None,
    extra_page_size: int = 0,
) -> Tensor:
    """[G, T, K] in q.dtype, after inverse RoPE."""
    kv, extra_kv = _pools(q, pages, page_size, extra_pages, extra_page_size)
    pools = (lengths, extra_kv, extra_indices, extra_lengths)
    return attention_gathered_rope(q, kv, indices, sink, cos, sin, scale, groups, *pools)


def attention_paged_fp8_rope_quant(
    q: Tensor,
    pages: Tensor,
    indices: Tensor,
    sink: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    groups: int,
    page_size: int,
    block: int = 128,
    scale_rule: str = "fp32",
    floor: float = 1e-12,
    pack_scales: bool = False,
    lengths: Tensor | None = None,
    extra_pages: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_lengths: Tensor | None = None,
    extra_page_size: int = 0,
) -> tuple[Tensor, Tensor]:
    """(codes [G, T, K], scales), after inverse RoPE and quantisation."""
    kv, extra_kv = _pools(q, pages, page_size, extra_pages, extra_page_size)
    quant = (block, scale_rule, floor, pack_scales)
    pools = (lengths, extra_kv, extra_indices, extra_lengths)
    return attention_gathered_rope_quant(q, kv, indices, sink, cos, sin, scale, groups, *quant, *pools)
