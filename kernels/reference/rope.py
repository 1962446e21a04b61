# SPDX-License-Identifier: Apache-2.0
"""Reference of the inverse rotary embedding and of the head grouping."""

import torch
from torch import Tensor

from .quant import quantise
from .softmax import compute_dtype


def rotate_inverse(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Undo an interleaved-pair rotation of the last ``2 * half`` channels of ``x`` [T, H, D].

    ``cos``, ``sin`` [T, half] are the *forward* tables of each token's position; with e, o the even and odd channel
    of a pair: ``e' = e cos + o sin``, ``o' = o cos - e sin``. Computed in x.dtype. Returns a new tensor.
    """
    half = cos.shape[-1]
    rest = x.shape[-1] - 2 * half
    cos = cos.to(x.dtype).unsqueeze(-2)
    sin = sin.to(x.dtype).unsqueeze(-2)
    even, odd = x[..., rest::2], x[..., rest + 1 :: 2]
    pairs = torch.stack((even * cos + odd * sin, odd * cos - even * sin), dim=-1)
    return torch.cat((x[..., :rest], pairs.flatten(-2)), dim=-1)


def group_heads(x: Tensor, groups: int) -> Tensor:
    """[T, H, D] -> contiguous [G, T, H/G*D]: the operand layout of the grouped BGEMM."""
    tokens, heads, dim = x.shape
    return x.reshape(tokens, groups, heads // groups * dim).transpose(0, 1).contiguous()


def inverse_rope(o: Tensor, cos: Tensor, sin: Tensor, groups: int) -> Tensor:
    """Inverse RoPE of an attention output ``o`` [T, H, D], grouped: [G, T, K] in o.dtype."""
    return group_heads(rotate_inverse(o.to(compute_dtype(o.dtype)), cos, sin).to(o.dtype), groups)


def inverse_rope_quant(
    o: Tensor,
    cos: Tensor,
    sin: Tensor,
    groups: int,
    block: int = 128,
    scale_rule: str = "fp32",
    floor: float = 1e-12,
    pack_scales: bool = False,
) -> tuple[Tensor, Tensor]:
    """Inverse RoPE of ``o`` [T, H, D], then quantisation of the unrounded result: (codes, scales)."""
    rotated = rotate_inverse(o.to(compute_dtype(o.dtype)), cos, sin)
    return quantise(group_heads(rotated, groups), block, scale_rule, floor, pack_scales)
