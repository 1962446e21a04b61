# SPDX-License-Identifier: Apache-2.0
"""Values of index lists and lengths, checked where a call asks for it (``check_inputs``).

The kernels treat an index outside its pool as "no key" and a length beyond the list as the list's end: neither reads
foreign memory, but a wrong index then silently attends less. This check reads the lists on the device and waits for the
answer, so it is for debugging. It is left out while a CUDA graph is captured (nothing can be read then).
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from . import checks

log = logging.getLogger("fusion_pass.kernels")
_warned: set[str] = set()


def can_read(tensor: Tensor) -> bool:
    """Whether the values of ``tensor`` can be read now."""
    if tensor.device.type == "meta" or not tensor.numel():
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def check_list(op: str, prefix: str, indices: Tensor, lengths: Tensor | None, rows: int, what: str) -> None:
    """Raise ValueError for an index of the first ``lengths[t]`` columns that is neither -1 nor in 0 .. ``rows`` - 1,
    and for a length that is negative or longer than the list. ``what`` names the rows, for the message."""
    columns = indices.shape[1]
    if lengths is not None and can_read(lengths):
        bad = (lengths < 0) | (lengths > columns)
        if bool(bad.any()):
            token = int(bad.nonzero()[0, 0])
            got = f"{prefix}lengths[{token}] = {int(lengths[token])} ({int(bad.sum())} such tokens)"
            checks.fail(op, f"{prefix}lengths in 0 .. {columns} (columns of {prefix}indices)", got)
    if not can_read(indices):
        if indices.is_cuda and indices.numel() and op not in _warned:
            _warned.add(op)
            log.warning("fusion_pass::%s: check_inputs is left out while a CUDA graph is captured", op)
        return
    bad = (indices < -1) | (indices >= rows)
    if lengths is not None:
        bad &= torch.arange(columns, device=indices.device) < lengths.unsqueeze(-1)
    if bool(bad.any()):
        token, column = map(int, bad.nonzero()[0])
        got = f"{prefix}indices[{token}, {column}] = {int(indices[token, column])} ({int(bad.sum())} such entries)"
        checks.fail(
            op, f"{prefix}indices of -1 (no key) or 0 .. {rows - 1} ({what})", got, "Without check_inputs it is masked."
        )


def gathered(op: str, kv: Tensor, indices: Tensor, lengths: Tensor | None, extra_kv: Tensor | None,
             extra_indices: Any, extra_lengths: Tensor | None) -> None:  # fmt: skip
    """The lists of the gathered ops."""
    check_list(op, "", indices, lengths, kv.shape[0], f"rows of kv, {kv.shape[0]}")
    if extra_kv is not None:
        rows = extra_kv.shape[0]
        check_list(op, "extra_", extra_indices, extra_lengths, rows, f"rows of extra_kv, {rows}")


def paged(
    op: str, pages: Tensor, page_size: int, indices: Tensor, lengths: Tensor | None, extra_pages: Tensor | None,
    extra_indices: Any, extra_lengths: Tensor | None, extra_page_size: int,
) -> None:  # fmt: skip
    """The lists of the paged ops: an index is page * page_size + offset."""
    count = pages.shape[0]
    check_list(op, "", indices, lengths, count * page_size, f"{count} pages of {page_size} rows")
    if extra_pages is not None:
        count = extra_pages.shape[0]
        what = f"{count} pages of {extra_page_size} rows"
        check_list(op, "extra_", extra_indices, extra_lengths, count * extra_page_size, what)
