# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Registers the portable Triton kernels with the ops. Imported at the first call on a GPU.

Each ``_refuses_*`` and ``_launch_*`` takes the arguments of its op, completed and validated (launches after ``outs``).
"""

from __future__ import annotations

from ..ops.dispatch import Launcher, register_launcher
from . import attention_launch as attention
from . import bgemm
from .attention_launch import Keys, Rope, rope_quant


def _register(op, refuses, launch) -> None:
    register_launcher(op, Launcher("triton", refuses, launch, replayable=True))


# Dense attention: q [B, S, H, D], kv [B or 1, N, D].
def _refuses_dense(q, kv, mask, sink, scale, causal, window):
    return attention.refuses(q, mask if mask is not None and mask.is_floating_point() else None, sink)


def _launch_dense(outs, q, kv, mask, sink, scale, causal, window):
    attention.attend(outs, q, Keys(kv, causal=causal, window=window), mask, sink, scale)


def _refuses_dense_rope(q, kv, mask, sink, cos, sin, scale, groups, causal, window):
    return _refuses_dense(q, kv, mask, sink, scale, causal, window) or attention.refuses(q, cos, sin)


def _launch_dense_rope(outs, q, kv, mask, sink, cos, sin, scale, groups, causal, window):
    keys = Keys(kv, causal=causal, window=window)
    attention.attend(outs, q, keys, mask, sink, scale, Rope(cos, sin, groups))


def _refuses_dense_quant(
    q, kv, mask, sink, cos, sin, scale, groups, block, scale_rule, floor, pack_scales, causal, window
):
    dense = _refuses_dense(q, kv, mask, sink, scale, causal, window)
    return dense or attention.refuses(q, cos, sin, quant_block=block)


def _launch_dense_quant(
    outs, q, kv, mask, sink, cos, sin, scale, groups, block, scale_rule, floor, pack_scales, causal, window
):
    rope = rope_quant(cos, sin, groups, block, scale_rule, floor, pack_scales)
    attention.attend(outs, q, Keys(kv, causal=causal, window=window), mask, sink, scale, rope)


# Gathered attention: q [T, H, D], kv [N, D]; runs as one sequence of T queries.
def _pools(kv, indices, lengths, extra_kv, extra_indices, extra_lengths) -> Keys:
    return Keys(
        kv.unsqueeze(0),
        indices,
        lengths,
        extra_kv=extra_kv,
        extra_indices=extra_indices,
        extra_lengths=extra_lengths,
    )


def _refuses_gathered(q, kv, indices, sink, *rest):
    return attention.refuses(q, sink)


def _launch_gathered(outs, q, kv, indices, sink, scale, *pools):
    attention.attend(outs, q.unsqueeze(0), _pools(kv, indices, *pools), None, sink, scale)


def _refuses_gathered_rope(q, kv, indices, sink, cos, sin, *rest):
    return attention.refuses(q, sink, cos, sin)


def _launch_gathered_rope(outs, q, kv, indices, sink, cos, sin, scale, groups, *pools):
    rope = Rope(cos.unsqueeze(0), sin.unsqueeze(0), groups)
    attention.attend(outs, q.unsqueeze(0), _pools(kv, indices, *pools), None, sink, scale, rope)


def _refuses_gathered_quant(q, kv, indices, sink, cos, sin, scale, groups, block, *rest):
    return attention.refuses(q, sink, cos, sin, quant_block=block)


def _launch_gathered_quant(
    outs, q, kv, indices, sink, cos, sin, scale, groups, block, scale_rule, floor, pack_scales, *pools
):
    rope = rope_quant(cos.unsqueeze(0), sin.unsqueeze(0), groups, block, scale_rule, floor, pack_scales)
    attention.attend(outs, q.unsqueeze(0), _pools(kv, indices, *pools), None, sink, scale, rope)


# Attention over FP8 pages: the attended rows are decoded first, then gathered.
def _paged(q, pages, page_size, indices, pools, attend) -> None:
    """Call ``attend(keys, token slice)`` for chunks of tokens whose rows have been decoded."""
    from .paged import decoded_chunks

    lengths, extra_pages, extra_indices, extra_lengths, extra_page_size = pools
    chunks = decoded_chunks(
        q, pages, page_size, indices, lengths, extra_pages, extra_indices, extra_lengths, extra_page_size
    )
    for token0, tokens, rows, lists in chunks:
        attend(Keys(rows.unsqueeze(0), lists), token0, tokens)


def _launch_paged(outs, q, pages, indices, sink, scale, page_size, *pools):
    def attend(keys, token0, tokens):
        attention.attend_chunk(outs, q.unsqueeze(0), keys, sink, scale, None, token0, tokens)

    _paged(q, pages, page_size, indices, pools, attend)


def _launch_paged_rope(outs, q, pages, indices, sink, cos, sin, scale, groups, page_size, *pools):
    rope = Rope(cos.unsqueeze(0), sin.unsqueeze(0), groups)

    def attend(keys, token0, tokens):
        attention.attend_chunk(outs, q.unsqueeze(0), keys, sink, scale, rope, token0, tokens)

    _paged(q, pages, page_size, indices, pools, attend)


def _launch_paged_quant(
    outs, q, pages, indices, sink, cos, sin, scale, groups, page_size, block, scale_rule, floor, pack_scales, *pools
):
    rope = rope_quant(cos.unsqueeze(0), sin.unsqueeze(0), groups, block, scale_rule, floor, pack_scales)

    def attend(keys, token0, tokens):
        attention.attend_chunk(outs, q.unsqueeze(0), keys, sink, scale, rope, token0, tokens)

    _paged(q, pages, page_size, indices, pools, attend)


def _refuses_paged_quant(q, pages, indices, sink, cos, sin, scale, groups, page_size, block, *rest):
    return attention.refuses(q, sink, cos, sin, quant_block=block)


def _refuses_partials(q, *rest):
    return attention.refuses(q)


def _launch_partials(outs, q, kv, indices, scale, num_splits, *pools):
    attention.partial_results(outs[0], outs[1], q.unsqueeze(0), _pools(kv, indices, *pools), None, False, scale)


_register("attention", _refuses_dense, _launch_dense)
_register("attention_rope", _refuses_dense_rope, _launch_dense_rope)
_register("attention_rope_quant", _refuses_dense_quant, _launch_dense_quant)
_register("attention_gathered", _refuses_gathered, _launch_gathered)
_register("attention_gathered_rope", _refuses_gathered_rope, _launch_gathered_rope)
_register("attention_gathered_rope_quant", _refuses_gathered_quant, _launch_gathered_quant)
_register("attention_partials", _refuses_partials, _launch_partials)
_register("attention_paged_fp8", _refuses_gathered, _launch_paged)
_register("attention_paged_fp8_rope", _refuses_gathered_rope, _launch_paged_rope)
_register("attention_paged_fp8_rope_quant", _refuses_paged_quant, _launch_paged_quant)


# Grouped FP8 product.
def _launch_bgemm(outs, codes, scales, weight, weight_scales, block, weight_block, out_dtype):
    bgemm.fp8_bgemm(outs[0], codes, scales, weight, weight_scales, block, weight_block)


_register("fp8_bgemm", bgemm.refuses, _launch_bgemm)
