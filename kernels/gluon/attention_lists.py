# SPDX-License-Identifier: Apache-2.0
"""Key lists of the Hopper attention, as its kernel reads them."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Lists:
    """Key lists of one launch: row r belongs to token token0 + r."""

    index: Tensor
    width: int
    length: Tensor | None = None
    bias: Tensor | None = None
    index2: Tensor | None = None
    width2: int = 0
    length2: Tensor | None = None


def _even_rows(indices: Tensor) -> Tensor:
    """Index lists whose rows start at even columns, so that neighbouring indices load together."""
    if indices.stride(-1) == 1 and (indices.stride(0) % 2 == 0 or indices.shape[0] == 1):
        return indices
    width = indices.shape[1]
    padded = indices.new_empty(indices.shape[0], width + width % 2)[:, :width]
    return padded.copy_(indices)


def two_lists(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    lengths: Tensor | None,
    extra_kv: Tensor | None,
    extra_indices: Tensor | None,
    extra_lengths: Tensor | None,
) -> tuple[Lists, Tensor | None]:
    """Key lists of one or two pools as the kernel reads them, and the second pool if it is used."""
    tokens = indices.shape[0]
    # no column is read where there is none: any non-empty tensor of the right dtype stands in
    width = indices.shape[1] if kv.numel() else 0
    indices = _even_rows(indices) if indices.numel() else q.new_empty(tokens, 2, dtype=indices.dtype)
    lengths = None if lengths is None else lengths.contiguous()
    lists = Lists(indices, width, lengths)
    if extra_indices is not None and extra_kv is not None and extra_indices.numel():
        second = _even_rows(extra_indices)
        if second.dtype != indices.dtype:  # the kernel reads both lists through one pointer type
            second, indices = second.long(), indices.long()
        extra_lengths = None if extra_lengths is None else extra_lengths.contiguous()
        lists = Lists(indices, lists.width, lengths, None, second, second.shape[1], extra_lengths)
    else:
        extra_kv = None
    return lists, extra_kv
