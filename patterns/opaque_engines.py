# SPDX-License-Identifier: Apache-2.0
"""Engine ops in plain torch: vLLM, TensorRT-LLM, SGLang."""

from __future__ import annotations

import torch
from torch import Tensor

from .fp8_quant import E4M3_MAX, fp8_quant, pack_exponents
from .inverse_rope import inverse_rope
from .written_out import NotExpanded, cos_sin, fp8_product, scale_values


def _grouped(o: Tensor, groups: int) -> Tensor:
    """[T, H, D] -> [G, T, H/G*D]."""
    tokens, heads, dim = o.shape
    return o.reshape(tokens, groups, heads // groups * dim).transpose(0, 1)


def vllm_fused_inv_rope_fp8_quant(
    o: Tensor, positions: Tensor, cos_sin_cache: Tensor, heads_per_group: int, quant_group_size: int,
    chunks_per_head: int, rope_start: int, half_rope: int, tma_aligned_scales: bool, fp8_max: float,
    tma_aligned_T: int, num_tokens: int, n_groups: int, d: int, scale_inner: int, quantize: bool = True,
    permuted_output: bool = False,
) -> tuple[Tensor, Tensor]:
    """o [T, H, D] -> codes [G, T, d] E4M3 and scales [G, T, scale_inner]: power-of-two scales, floor 1e-10, in fp32 or
    (tma_aligned_scales) as four exponents per int32 word; nothing is rounded between rotation and quantisation.

    0.22 passes the start of the rotated lanes inside their block (``rope_start``), later releases ``nope_dim``: either
    way the rotated channels are the last ``2 * half_rope``. ``quantize=False``: the rotated output, grouped.
    """
    head_dim = quant_group_size * chunks_per_head
    nope = head_dim - 2 * half_rope
    if permuted_output:
        raise NotExpanded("permuted_output: the columns are in FlashMLA's order")
    if rope_start not in (nope, nope % quant_group_size) or o.shape[-1] != head_dim or fp8_max != E4M3_MAX:
        raise NotExpanded("rotated channels other than the last of a head, or codes other than E4M3")
    if d != heads_per_group * head_dim or cos_sin_cache.shape[-1] != 2 * half_rope:
        raise NotExpanded("sizes that do not agree with each other")
    o = o[:, : n_groups * heads_per_group]
    cos, sin = cos_sin(cos_sin_cache, positions)
    if not quantize:
        rotated = _grouped(inverse_rope(o, cos, sin), n_groups)
        return rotated.contiguous(), torch.zeros(0, dtype=torch.int32 if tma_aligned_scales else torch.float32,
                                                 device=o.device)
    rotated = _grouped(inverse_rope(o.float(), cos, sin), n_groups)
    codes, scales = fp8_quant(rotated, quant_group_size, "ue8m0", 1e-10)
    return codes, pack_exponents(scales) if tma_aligned_scales else scales


def vllm_fp8_einsum(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, equation: str, recipe: list[int]
) -> tuple[Tensor]:
    """a [T, G, K] E4M3, a_scale [T, G, K/128] fp32 or [T, G, K/512] int32, b [G, R, K] (or [G*R, K]) E4M3 with 128x128
    scales fp32 or E8M0: the new ``out`` [T, G, R].
    """
    if equation.replace(" ", "") != "bhr,hdr->bhd":
        raise NotExpanded(f"equation {equation!r}")
    if list(recipe) != [1, 128, 128]:
        raise NotExpanded(f"recipe {tuple(recipe)}: weight scales in a layout of the GEMM's own")
    if b_scale.dtype not in (torch.float32, torch.float8_e8m0fnu):
        raise NotExpanded(f"weight scales of dtype {b_scale.dtype}")
    _, groups, width = a.shape
    weight = b if b.dim() == 3 else b.view(groups, b.shape[0] // groups, width)
    factors = b_scale if b_scale.dim() == 3 else b_scale.view(groups, b_scale.shape[0] // groups, b_scale.shape[1])
    scales = scale_values(a_scale, width // 128)
    return (fp8_product(a, scales, weight, factors, 128, 128).to(out.dtype),)


def trtllm_fused_inv_rope_fp8_quant(
    o: Tensor, positions: Tensor, cos_sin_cache: Tensor, n_groups: int, heads_per_group: int, nope_dim: int,
    rope_dim: int, quant_group_size: int, is_neox: bool,
) -> tuple[Tensor, Tensor]:
    """o [T, H, D] -> codes [G, T, K] E4M3 and fp32 scales [G, K/128, M], M = T rounded up to 4, padding columns 0; raw
    scale ``max(amax, 1e-12) / 448``, nothing rounded between rotation and quantisation.
    """
    if is_neox:
        raise NotExpanded("is_neox: rotated halves instead of interleaved pairs")
    if o.shape[-1] != nope_dim + rope_dim or o.shape[1] != n_groups * heads_per_group:
        raise NotExpanded("sizes that do not agree with each other")
    cos, sin = cos_sin(cos_sin_cache, positions)
    rotated = _grouped(inverse_rope(o.float(), cos, sin), n_groups)
    codes, scales = fp8_quant(rotated, quant_group_size, "fp32", 1e-12)
    tokens = o.shape[0]
    padding = (tokens + 3) // 4 * 4 - tokens
    return codes, torch.nn.functional.pad(scales.transpose(1, 2), (0, padding))


def trtllm_fp8_bmm(input: Tensor, weight: Tensor, input_scale: Tensor, weight_scale: Tensor, out: Tensor
                   ) -> tuple[Tensor]:
    """input [G, T, K] E4M3 with scales [G, K/128, M], weight [G, R, K] E4M3 with fp32 scales [G, R/128, K/128]: the new
    ``out`` [G, T, R].
    """
    scales = input_scale[..., : input.shape[1]].permute(2, 0, 1)
    product = fp8_product(input.transpose(0, 1), scales, weight, weight_scale, 128, 128)
    return (product.transpose(0, 1).to(out.dtype),)


def trtllm_mla_rope_inplace(
    data: Tensor, position_ids: Tensor, cos_sin_cache: Tensor, num_heads: int, nope_dim: int, rope_dim: int,
    inverse: bool, is_neox: bool,
) -> tuple[Tensor]:
    """data [T, H * D] or [T, H, D] bf16, changed in place: its new value, rotated forward or (``inverse``) backward."""
    if is_neox:
        raise NotExpanded("is_neox: rotated halves instead of interleaved pairs")
    heads = data.reshape(data.shape[0], num_heads, nope_dim + rope_dim)
    cos, sin = cos_sin(cos_sin_cache.view(-1, rope_dim), position_ids.view(-1))
    return (inverse_rope(heads, cos, sin if inverse else -sin).reshape(data.shape),)


def sglang_wo_a_quant(input: Tensor, output_q: Tensor, output_s: Tensor) -> tuple[Tensor, Tensor]:
    """input [T, G, D] bf16: the new ``output_q`` [T, G, D] E4M3 and ``output_s`` int32 [G, ceil(D/512), M], four UE8M0
    exponents per word, token innermost, M = T rounded up to 4; blocks of 128, floor 1e-10.
    """
    codes, scales = fp8_quant(input, 128, "ue8m0", 1e-10)
    words = pack_exponents(scales).permute(1, 2, 0)
    return codes, torch.nn.functional.pad(words, (0, output_s.shape[-1] - input.shape[0]))
