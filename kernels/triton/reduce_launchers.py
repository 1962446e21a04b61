# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs
"""Launchers of the merge and of the standalone inverse RoPE (+ FP8) kernels for the ops of the same names."""

from __future__ import annotations

import torch

from ..ops.dispatch import Launcher, register_launcher
from ..reduction import for_blocks
from . import merge, rope_quant
from .epilogue import quant_mode

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _tile_reason(dim: int, block: int | None = None) -> str | None:
    """Why no tile of whole channels (or quantisation blocks) covers ``dim``: tiles are powers of two."""
    tile = rope_quant.largest_tile(dim, 512)
    if tile < 16:
        return f"head_dim {dim} is not a multiple of 16"
    if block is not None and (block & (block - 1) or block > tile):
        return f"blocks of {block} channels do not divide a power-of-two tile of head_dim {dim}"
    return None


def _refuses_rope(o, cos, sin, groups) -> str | None:
    if any(t.dtype not in _FLOATS for t in (o, cos, sin)):
        return "a dtype other than fp32, fp16 and bf16 (the kernel computes in fp32)"
    return _tile_reason(o.shape[-1])


def _launch_rope(outs, o, cos, sin, groups) -> None:
    rope_quant.inverse_rope(o, cos, sin, groups, out=outs[0])


def _refuses_rope_quant(o, cos, sin, groups, block, scale_rule, floor, pack_scales) -> str | None:
    return _refuses_rope(o, cos, sin, groups) or _tile_reason(o.shape[-1], block)


def _launch_rope_quant(outs, o, cos, sin, groups, block, scale_rule, floor, pack_scales) -> None:
    rope_quant.inverse_rope_quant(o, cos, sin, groups, block, scale_rule, floor, pack_scales, out=outs)


def _refuses_merge(partials, lse_or_max, sum, sink, stat_scale, kv_split, return_stats, out_dtype) -> str | None:
    reason = merge.refuses(partials, lse_or_max, sum, sink, out_dtype=out_dtype)
    return reason or _tile_reason(partials.shape[-1])


def _launch_merge(outs, partials, lse_or_max, sum, sink, stat_scale, kv_split, return_stats, out_dtype) -> None:
    out, stats = outs
    decision = merge.decide(partials, kv_split)
    merge.merge_into(out, None, stats if return_stats else None, partials, lse_or_max, sum, sink, stat_scale, decision)


def _refuses_merge_rope(
    partials, lse_or_max, sum, sink, cos, sin, groups, stat_scale, kv_split, out_dtype
) -> str | None:
    reason = merge.refuses(partials, lse_or_max, sum, sink, cos, sin, out_dtype=out_dtype)
    return reason or _tile_reason(partials.shape[-1])


def _launch_merge_rope(
    outs, partials, lse_or_max, sum, sink, cos, sin, groups, stat_scale, kv_split, out_dtype
) -> None:
    decision = merge.decide(partials, kv_split, epilogue=True)
    epilogue = merge.Epilogue(cos, sin, groups)
    merge.merge_into(outs[0], None, None, partials, lse_or_max, sum, sink, stat_scale, decision, epilogue)


def _refuses_merge_rope_quant(
    partials, lse_or_max, sum, sink, cos, sin, groups, block, scale_rule, floor, pack_scales, stat_scale, kv_split
) -> str | None:
    reason = merge.refuses(partials, lse_or_max, sum, sink, cos, sin)
    return reason or _tile_reason(partials.shape[-1], block)


def _launch_merge_rope_quant(
    outs, partials, lse_or_max, sum, sink, cos, sin, groups, block, scale_rule, floor, pack_scales, stat_scale, kv_split
) -> None:
    codes, scales = outs
    dim, element_size = partials.shape[-1], partials.element_size()
    decision = for_blocks(merge.decide(partials, kv_split, epilogue=True), block, dim, element_size)
    epilogue = merge.Epilogue(cos, sin, groups, quant_mode(scale_rule, pack_scales), block, floor)
    merge.merge_into(
        codes.view(torch.uint8), scales, None, partials, lse_or_max, sum, sink, stat_scale, decision, epilogue
    )


for _op, _refuses, _launch in (
    ("inverse_rope", _refuses_rope, _launch_rope),
    ("inverse_rope_quant", _refuses_rope_quant, _launch_rope_quant),
    ("merge_partials", _refuses_merge, _launch_merge),
    ("merge_partials_rope", _refuses_merge_rope, _launch_merge_rope),
    ("merge_partials_rope_quant", _refuses_merge_rope_quant, _launch_merge_rope_quant),
):
    register_launcher(_op, Launcher("triton", _refuses, _launch, replayable=True))
