# SPDX-License-Identifier: Apache-2.0
"""Uninitialised outputs of the ops, with exact strides (all contiguous), for real and for symbolic sizes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .checks import E4M3


def grouped(like: Tensor, rows: Sequence[int], groups: int, dtype: torch.dtype | None = None) -> tuple[Tensor]:
    """[G, T, K] with K = heads / groups * dim, for ``rows`` = (T, heads, dim)."""
    tokens, heads, dim = rows
    return (like.new_empty((groups, tokens, heads // groups * dim), dtype=dtype or like.dtype),)


def quantised(like: Tensor, tokens: int, k: int, groups: int, block: int, pack_scales: bool) -> tuple[Tensor, Tensor]:
    """Codes [G, T, K] and the scale tensor of either form; columns = tokens rounded up to 4, without a guard."""
    codes = like.new_empty((groups, tokens, k), dtype=E4M3)
    columns = (tokens + 3) // 4 * 4
    if pack_scales:
        return codes, like.new_empty((groups, k // (4 * block), columns), dtype=torch.int32)
    return codes, like.new_empty((groups, k // block, columns), dtype=torch.float32)
