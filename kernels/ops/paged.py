# SPDX-License-Identifier: Apache-2.0
"""Ops of attention over a paged FP8 cache of 584-byte rows (448 E4M3 + 64 bf16 values, 7 UE8M0 exponents, padding).

Shapes: q [T, H, 512], pages [P, page_size, 1, 584] or [P, bytes >= page_size * 584] of a 1-byte dtype (layout:
:mod:`fusion_pass.kernels.reference.paged`), indices [T, K] int32 or int64, each page * page_size + offset (negative or
past the cache = masked), lengths [T], and a second cache with its own page size under the same softmax. Everything else
as in :mod:`.gathered`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..reference.paged import HEAD_DIM, ROW_BYTES
from . import checks, layout, values
from .attention import QUANT_ARGUMENTS
from .gathered import MODES
from .registry import OpSpec, register

_TENSORS = "Tensor q, Tensor pages, Tensor indices, Tensor? sink"
_POOLS = (
    "Tensor? lengths=None, Tensor? extra_pages=None, Tensor? extra_indices=None, Tensor? extra_lengths=None, "
    "int extra_page_size=0"
)
BYTES = (torch.uint8, torch.int8, torch.float8_e4m3fn)


def _check_pool(
    op: str, prefix: str, q: Tensor, pages: Tensor, indices: Tensor, lengths: Tensor | None, page_size: int
) -> None:
    checks.check_dtype(op, f"{prefix}pages", pages, BYTES, "The cache is read as bytes.")
    if page_size < 1:
        checks.fail(op, f"{prefix}page_size >= 1", str(page_size))
    if pages.dim() == 4:
        checks.check_shape(op, f"{prefix}pages", pages, (None, page_size, 1, ROW_BYTES), "[P, page_size, 1, 584]")
    else:
        checks.check_shape(op, f"{prefix}pages", pages, (None, None), "[P, bytes]")
        width = pages.shape[1]
        if checks.known(width) and width < page_size * ROW_BYTES:
            checks.fail(op, f"{prefix}pages of at least {page_size * ROW_BYTES} bytes per page", str(width))
    checks.check_dtype(op, f"{prefix}indices", indices, checks.INDICES)
    checks.check_shape(op, f"{prefix}indices", indices, (q.shape[0], None), "[T, K]")
    if lengths is not None:
        checks.check_dtype(op, f"{prefix}lengths", lengths, checks.INDICES)
        checks.check_shape(op, f"{prefix}lengths", lengths, (q.shape[0],), "[T]")


def _check(
    op: str,
    q: Tensor,
    pages: Tensor,
    indices: Tensor,
    sink: Tensor | None,
    scale: float,
    page_size: int,
    pools: Sequence[Any],
    **more: Tensor | None,
) -> None:
    lengths, extra_pages, extra_indices, extra_lengths, extra_page_size = pools
    checks.check_same_device(
        op,
        q,
        pages=pages,
        indices=indices,
        sink=sink,
        lengths=lengths,
        extra_pages=extra_pages,
        extra_indices=extra_indices,
        extra_lengths=extra_lengths,
        **more,
    )
    checks.check_dtype(op, "q", q, checks.ACTIVATIONS)
    checks.check_shape(op, "q", q, (None, None, HEAD_DIM), "[T, H, 512]", "The cache rows have 512 channels.")
    _check_pool(op, "", q, pages, indices, lengths, page_size)
    if (extra_pages is None) != (extra_indices is None) or (extra_lengths is not None and extra_pages is None):
        given = [n for n, t in (("extra_pages", extra_pages), ("extra_indices", extra_indices)) if t is not None]
        checks.fail(op, "extra_pages and extra_indices together", ", ".join(given) or "only extra_lengths")
    if extra_pages is not None:
        _check_pool(op, "extra_", q, extra_pages, extra_indices, extra_lengths, extra_page_size)
    checks.check_sink(op, sink, q.shape[1])
    checks.check_scale(op, scale)


def check_paged(
    q: Tensor, pages: Tensor, indices: Tensor, sink: Tensor | None, scale: float, page_size: int, *pools: Any
) -> None:
    _check("attention_paged_fp8", q, pages, indices, sink, scale, page_size, pools)


def empty_paged(q: Tensor, *rest: Any) -> tuple[Tensor]:
    return (q.new_empty(q.shape),)


def check_paged_rope(
    q: Tensor,
    pages: Tensor,
    indices: Tensor,
    sink: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    groups: int,
    page_size: int,
    *pools: Any,
) -> None:
    op = "attention_paged_fp8_rope"
    _check(op, q, pages, indices, sink, scale, page_size, pools, cos=cos, sin=sin)
    checks.check_token_rope(op, cos, sin, q.shape[0])
    checks.check_groups(op, q.shape[1], q.shape[2], groups, cos)


def empty_paged_rope(
    q: Tensor,
    pages: Tensor,
    indices: Tensor,
    sink: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    groups: int,
    *rest: Any,
) -> tuple[Tensor]:
    return layout.grouped(q, q.shape, groups)


def check_paged_rope_quant(
    q: Tensor,
    pages: Tensor,
    indices: Tensor,
    sink: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    groups: int,
    page_size: int,
    block: int,
    scale_rule: str,
    floor: float,
    pack_scales: bool,
    *pools: Any,
) -> None:
    op = "attention_paged_fp8_rope_quant"
    _check(op, q, pages, indices, sink, scale, page_size, pools, cos=cos, sin=sin)
    checks.check_token_rope(op, cos, sin, q.shape[0])
    checks.check_groups(op, q.shape[1], q.shape[2], groups, cos)
    _, heads, dim = q.shape
    checks.check_quant(op, dim, block, scale_rule, floor, pack_scales, heads // groups * dim)


def empty_paged_rope_quant(
    q: Tensor,
    pages: Tensor,
    indices: Tensor,
    sink: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    groups: int,
    page_size: int,
    block: int,
    scale_rule: str,
    floor: float,
    pack_scales: bool,
    *pools: Any,
) -> tuple[Tensor, Tensor]:
    tokens, heads, dim = q.shape
    return layout.quantised(q, tokens, heads // groups * dim, groups, block, pack_scales)


def _values(op: str, page_size_at: int) -> Callable[..., None]:
    """``check_values`` of ``op``, whose argument ``page_size_at`` is the page size; its last five are the pools."""

    def check(*args: Any) -> None:
        values.paged(op, args[1], args[page_size_at], args[2], *args[-5:])

    return check


_ROPE = "Tensor cos, Tensor sin, float scale, int groups, int page_size"
register(
    OpSpec(
        "attention_paged_fp8",
        f"{_TENSORS}, float scale, int page_size, {_POOLS}",
        ("out",),
        check_paged,
        empty_paged,
        reference.attention_paged_fp8,
        MODES,
        _values("attention_paged_fp8", 5),
    )
)
register(
    OpSpec(
        "attention_paged_fp8_rope",
        f"{_TENSORS}, {_ROPE}, {_POOLS}",
        ("out",),
        check_paged_rope,
        empty_paged_rope,
        reference.attention_paged_fp8_rope,
        MODES,
        _values("attention_paged_fp8_rope", 8),
    )
)
register(
    OpSpec(
        "attention_paged_fp8_rope_quant",
        f"{_TENSORS}, {_ROPE}, {QUANT_ARGUMENTS}, {_POOLS}",
        ("codes", "scales"),
        check_paged_rope_quant,
        empty_paged_rope_quant,
        reference.attention_paged_fp8_rope_quant,
        MODES,
        _values("attention_paged_fp8_rope_quant", 8),
    )
)
