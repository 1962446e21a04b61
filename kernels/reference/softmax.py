# SPDX-License-Identifier: Apache-2.0
"""The softmax with sink that all attention forms share."""

import torch
from torch import Tensor

from ..modes import current

# Working set of one chunk of the references: keeps scores and gathered rows of long prefills out of swap.
CHUNK_BYTES = 64 << 20


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 stays fp64; everything else computes in fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rows_per_chunk(bytes_per_row: int) -> int:
    """How many rows (tokens) of ``bytes_per_row`` bytes fit the chunk budget (at least one). One in a batch-invariant
    call: a matrix product over several tokens may sum in another order than over one."""
    if current().batch_invariant:
        return 1
    return max(1, CHUNK_BYTES // max(1, bytes_per_row))


def softmax_numerator(scores: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Un-normalised softmax over the last dimension of ``scores`` [..., H, N], where -inf means "not attended".

    ``sink`` [H] (or None) enters the denominator as one more logit without a value row. Returns ``p`` [..., H, N],
    the denominator [..., H] and the maximum [..., H]; a row without any key and without sink has p = 0,
    denominator 0 and maximum -inf.
    """
    if scores.shape[-1]:
        top = scores.amax(-1)
    else:
        top = scores.new_full(scores.shape[:-1], float("-inf"))
    if sink is not None:
        sink = sink.to(scores.dtype)
        top = torch.maximum(top, sink)
    shift = torch.where(top == float("-inf"), torch.zeros_like(top), top)
    p = torch.exp(scores - shift.unsqueeze(-1))
    denominator = p.sum(-1)
    if sink is not None:
        denominator = denominator + torch.exp(sink - shift)
    return p, denominator, top


def divide_or_zero(numerator: Tensor, denominator: Tensor) -> Tensor:
    """``numerator`` [..., D] / ``denominator`` [...], and zeros where the denominator is 0 (no key attended)."""
    empty = denominator == 0
    safe = torch.where(empty, torch.ones_like(denominator), denominator)
    return (numerator / safe.unsqueeze(-1)).masked_fill_(empty.unsqueeze(-1), 0.0)
