# SPDX-License-Identifier: Apache-2.0
"""Role ``inverse_rope``: the rotation of the attention output back by its query's own position."""

from __future__ import annotations

import torch
from torch import Tensor


def inverse_rope(o: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last ``2 * half`` channels of every head by the conjugate phase.

    o: [..., H, D] attention output, bf16, fp16, fp32 or fp64. cos, sin: [..., half], the *forward* tables at the
    query's position, any float dtype; leading dimensions broadcast against those of ``o`` without its head dimension.
    Returns [..., H, D] in ``o.dtype``, rounded once.

    With ``e`` and ``o`` the even and odd channel of an interleaved pair of the tail::

        e' = e * cos + o * sin          o' = o * cos - e * sin

    Formula: DeepSeek-V4's ``apply_rotary_emb(o[..., -rope_dim:], freqs_cis, inverse=True)`` (official inference code),
    a multiplication of the pairs, read as complex numbers, by the conjugate of ``freqs_cis``.
    """
    wide = o if o.dtype == torch.float64 else o.float()
    start = o.shape[-1] - 2 * cos.shape[-1]
    cos, sin = cos.to(wide.dtype).unsqueeze(-2), sin.to(wide.dtype).unsqueeze(-2)
    even, odd = wide[..., start::2], wide[..., start + 1 :: 2]
    pairs = torch.stack((even * cos + odd * sin, odd * cos - even * sin), dim=-1)
    return torch.cat((wide[..., :start], pairs.flatten(-2)), dim=-1).to(o.dtype)
