# SPDX-License-Identifier: Apache-2.0
"""Library ops in plain torch: transformers' grouped FP8 product, FlashInfer's merges, the official sparse attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .bgemm import bgemm, dequantise_weight
from .fmha import gathered
from .fp8_quant import dequantise, fp8_quant
from .kv_merge import kv_merge
from .written_out import NotExpanded, fp8_product


def matmul_grouped(
    x: Tensor, w: Tensor, scales: Tensor, offsets: Tensor, tokens_per_expert: Tensor,
    block_size: list[int] | None = None,
) -> tuple[Tensor]:
    """x [G*T, K] bf16, w [G, R, K] E4M3, scales [G, R/128, K/128] fp32 or E8M0, equal groups: [G*T, R] in x.dtype.

    The activation is quantised inside, 1 x block, with the raw fp32 scale ``max(amax, 1e-12) / 448``.
    """
    if block_size is None or len(block_size) != 2 or block_size[0] != block_size[1]:
        raise NotExpanded(f"block_size {block_size}: expected square blocks")
    groups, rows, width = w.shape
    block = block_size[1]
    codes, factors = fp8_quant(x.view(groups, x.shape[0] // groups, width), block, "fp32", 1e-12)
    values = dequantise(codes, factors, block)
    product = torch.bmm(values, dequantise_weight(w, scales, block).transpose(1, 2))
    return (product.to(x.dtype).view(x.shape[0], rows),)


def grouped_linear_as_written(
    x: Tensor, weight: Tensor, codes: Tensor, scales: Tensor, block: int = 128, scale_rule: str = "ue8m0",
    floor: float = 1e-12,
) -> tuple[Tensor]:
    """x [T, G, K], weight [G, R, K] of its dtype: [T, G, R]; the weight's FP8 form is not looked at."""
    return (bgemm(x, weight).contiguous(),)


def grouped_linear_in_fp8(
    x: Tensor, weight: Tensor, codes: Tensor, scales: Tensor, block: int = 128, scale_rule: str = "ue8m0",
    floor: float = 1e-12,
) -> tuple[Tensor]:
    """The same with the weight's FP8 form, codes [G, R, K] with scales [G, R/block, K/block], and ``x`` quantised."""
    activation, factors = fp8_quant(x, block, scale_rule, floor)
    return (fp8_product(activation, factors, codes, scales, block, block).to(x.dtype),)


def equal_groups(shapes: list[tuple[int, ...] | None], values: dict[int, Tensor]) -> str | None:
    """The grouped product runs over equal groups exactly if group g ends at row ``(g + 1) * T``."""
    (rows, _), (groups, _, _) = shapes[0], shapes[1]  # type: ignore[misc]
    if rows % groups:
        return f"{rows} rows in {groups} groups"
    tokens = rows // groups
    if values[3].tolist() != [tokens * (g + 1) for g in range(groups)]:
        return "the groups are not equally long"
    return None if values[4].tolist() == [tokens] * groups else "tokens_per_expert does not agree with offsets"


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """v [T, H, D] normalised results and s [T, H] fp32 log2-sum-exp2 of two parts: the merged pair."""
    return merge_states(torch.stack((v_a, v_b), 1), torch.stack((s_a, s_b), 1))


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """v [T, P, H, D], s [T, P, H] (base 2, as FlashInfer keeps it): v [T, H, D] in v.dtype and s [T, H]."""
    s = s.float().transpose(0, 1)
    top = s.amax(0)
    total = torch.exp2(s - top).sum(0)
    return kv_merge(v.transpose(0, 1), s * math.log(2.0)), torch.log2(total) + top


def sparse_attn(
    q: Tensor, kv: Tensor, attn_sink: Tensor, topk_idxs: Tensor, softmax_scale: float, **others: object
) -> tuple[Tensor]:
    """q [B, S, H, D], kv [B, N, D], attn_sink [H] fp32, topk_idxs [B, S, K] (-1 = none): [B, S, H, D] in q.dtype."""
    if others.get("out") is not None:
        raise NotExpanded("the form with a caller's out buffer")
    return (gathered(q, kv, topk_idxs, attn_sink, softmax_scale),)


def sparse_attn_with_compressor(
    q: Tensor, kv: Tensor, attn_sink: Tensor, topk_idxs: Tensor, compressor_kv: Tensor, compressor_gate: Tensor,
    compressor_ape: Tensor, compressor_norm_weight: Tensor, freqs_cis_table: Tensor, position_ids: Tensor,
    softmax_scale: float, compress_ratio: int = 0, **others: object,
) -> tuple[Tensor]:
    """AutoDeploy's second source op: :func:`sparse_attn` over rows that are all in ``kv``. In a compressed layer it
    makes further rows itself, and stays as it is.
    """
    if compress_ratio:
        raise NotExpanded(f"compress_ratio {compress_ratio}: it compresses keys inside")
    return sparse_attn(q, kv, attn_sink, topk_idxs, softmax_scale, out=others.get("out"))


def fused_rope_concat(
    nope: Tensor, pe: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False, rms_eps: float = 0.0
) -> tuple[Tensor]:
    """AutoDeploy's rotation: nope [..., H, Dn] and pe [..., H, Dr], cos and sin [..., Dr/2] without the heads:
    [..., H, Dn + Dr] in nope.dtype, ``pe`` rotated in interleaved pairs, in fp32.
    """
    if rms_eps:
        raise NotExpanded("rms_eps: the form with a norm inside")
    cos, sin = cos.unsqueeze(-2), (-sin if inverse else sin).unsqueeze(-2)
    even, odd = pe[..., 0::2].float(), pe[..., 1::2].float()
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return (torch.cat((nope, turned.to(nope.dtype)), -1),)


def shaped(x: Tensor, shape: list[int], **hints: object) -> tuple[Tensor]:
    """AutoDeploy's ``view``: a contiguous copy in another shape; its hints tell how it is to be sharded."""
    return (x.reshape(shape).clone(),)


def grouped_linear(input: Tensor, weight: Tensor, bias: Tensor | None, **hints: object) -> tuple[Tensor]:
    """AutoDeploy's grouped linear: input [..., G, K], weight [G, R, K]: [..., G * R]."""
    if bias is not None:
        raise NotExpanded("a bias")
    groups, rows, width = weight.shape
    out = bgemm(input.reshape(-1, groups, width), weight)
    return (out.reshape(*input.shape[:-2], groups * rows),)
