# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs
"""Registers the Hopper kernels with the ops, ahead of the portable ones. Imported at the first call on a GPU.

Each ``_refuses_*`` and ``_launch_*`` takes the arguments of its op, completed and validated (launches after ``outs``).
Few tokens do not fill the GPU: their keys are split, and the merge kernel runs the epilogue on bf16 partials.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..modes import current
from ..ops.dispatch import Launcher, register_launcher
from ..reference.paged import page_bytes
from ..tuning import attention as tuning_data
from . import attention, bgemm, deepgemm, gate
from .attention import Epilogue

PRIORITY = 10


def _register(op, refuses, launch) -> None:
    register_launcher(op, Launcher("gluon-sm90", refuses, launch, PRIORITY, replayable=True))


def _table(table: Tensor) -> Tensor:
    """A rope table [B or 1, S, half] or [T, half] as contiguous rows, in its own dtype."""
    return table.reshape(-1, table.shape[-1]).contiguous()


def _rope(outs, cos, sin, groups) -> Epilogue:
    return Epilogue("rope", outs[0], cos=_table(cos), sin=_table(sin), groups=groups)


def _quant(outs, cos, sin, groups, block, scale_rule, floor, pack_scales) -> Epilogue:
    return Epilogue(
        "quant", outs[0], outs[1], None, _table(cos), _table(sin), groups, block, scale_rule, floor, pack_scales
    )


def _merge(epilogue: Epilogue, partials: Tensor, lse: Tensor, sink: Tensor | None, token0: int) -> None:
    """Merge the partials of all splits, which are lost then, of the tokens from `token0` on, and run `epilogue` there.

    What it reads besides was there before the attention started, and is loaded before it waits for that.
    """
    from ..triton import merge as merging
    from ..triton import merge_rows
    from ..triton.epilogue import quant_mode

    splits, tokens, heads, dim = partials.shape
    how = tuning_data.hopper_merging(tokens * heads, splits, tail=token0 > 0)
    more: dict[str, Any] = {"token0": token0, "ready": True, "last_use": True}
    if epilogue.kind == "plain":
        out, decision = epilogue.out.view(-1, heads, dim), merging.decide(partials, None)
        merging.merge_into(out, None, None, partials, lse, None, sink, 1.0, decision, **more)
        return
    cos, sin = epilogue.cos, epilogue.sin
    assert cos is not None and sin is not None
    quant = quant_mode(epilogue.scale_rule, epilogue.packed) if epilogue.kind == "quant" else 0
    after = merging.Epilogue(cos, sin, epilogue.groups, quant, epilogue.block, epilogue.floor)
    out = epilogue.out.view(torch.uint8) if quant else epilogue.out
    if how.tiling is not None:
        rows, num_warps = how.tiling
        merge_rows.merge_rows_into(
            out, epilogue.scales, partials, lse, sink, after, rows=rows, num_warps=num_warps, pdl=True, **more
        )
        return
    decision = replace(merging.decide(partials, None, epilogue=True), pdl=True)
    merging.merge_into(out, epilogue.scales, None, partials, lse, None, sink, 1.0, decision, after, **more)


def _sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _attend(epilogue: Epilogue, tokens: int, heads: int, keys: int, sink, launch, device, **forms: bool) -> None:
    """Run `launch(epilogue, sink, splits=, paired=, tail=)` (by default one share of every token), its keys shared out
    as the plan says. forms: see attention.plan; cut: `launch` is one over all tokens, which can compute its last tokens
    apart.
    """
    # A batch-invariant call is not split: the number of splits depends on the number of tokens.
    chosen = None if current().batch_invariant else attention.plan(tokens, heads, keys, _sm_count(device), **forms)
    if chosen is None or not chosen.cut:
        launch(epilogue, sink)
        return
    if chosen.paired:
        launch(epilogue, sink, splits=chosen.splits, paired=True)
        return
    sink = None if sink is None else sink.contiguous()
    # Allocated before anything is launched: the launch that writes it does not wait for the one before.
    partials = torch.empty(chosen.splits, chosen.cut, heads, gate.HEAD_DIM, dtype=torch.bfloat16, device=device)
    lse = torch.empty(chosen.splits, chosen.cut, heads, dtype=torch.float32, device=device)
    shares = Epilogue("partial", partials, lse=lse)
    if chosen.cut == tokens:
        launch(shares, None, splits=chosen.splits)
    else:
        launch(epilogue, sink, tail=shares)
    _merge(epilogue, partials, lse, sink, tokens - chosen.cut)


# Gathered attention: q [T, H, D], kv [N, D].
def _gathered(epilogue, q, kv, indices, sink, scale, lengths, extra_kv, extra_indices, extra_lengths) -> None:
    keys = indices.shape[1] + (0 if extra_indices is None else extra_indices.shape[1])

    def launch(to: Epilogue, sink: Tensor | None, **how) -> None:
        attention.launch_gathered(
            q,
            kv,
            indices,
            sink,
            scale,
            to,
            lengths=lengths,
            extra_kv=extra_kv,
            extra_indices=extra_indices,
            extra_lengths=extra_lengths,
            **how,
        )

    _attend(epilogue, q.shape[0], q.shape[1], keys, sink, launch, q.device)


def _refuses_gathered(q, kv, indices, sink, scale, lengths, extra_kv, *rest):
    return gate.attention_reason(q, kv, scale=scale, extra_kv=extra_kv)


def _launch_gathered(outs, q, kv, indices, sink, scale, *pools):
    _gathered(Epilogue("plain", outs[0]), q, kv, indices, sink, scale, *pools)


def _refuses_gathered_rope(q, kv, indices, sink, cos, sin, scale, groups, lengths, extra_kv, *rest):
    return gate.attention_reason(q, kv, scale=scale, extra_kv=extra_kv, half=cos.shape[-1])


def _launch_gathered_rope(outs, q, kv, indices, sink, cos, sin, scale, groups, *pools):
    _gathered(_rope(outs, cos, sin, groups), q, kv, indices, sink, scale, *pools)


def _refuses_gathered_quant(
    q, kv, indices, sink, cos, sin, scale, groups, block, scale_rule, floor, pack_scales, lengths, extra_kv, *rest
):
    return gate.attention_reason(q, kv, scale=scale, extra_kv=extra_kv, block=block, half=cos.shape[-1])


def _launch_gathered_quant(
    outs, q, kv, indices, sink, cos, sin, scale, groups, block, scale_rule, floor, pack_scales, *pools
):
    epilogue = _quant(outs, cos, sin, groups, block, scale_rule, floor, pack_scales)
    _gathered(epilogue, q, kv, indices, sink, scale, *pools)


def _refuses_partials(q, kv, indices, scale, num_splits, lengths, extra_kv, *rest):
    return gate.attention_reason(q, kv, scale=scale, extra_kv=extra_kv)


def _launch_partials(outs, q, kv, indices, scale, num_splits, lengths, extra_kv, extra_indices, extra_lengths):
    attention.launch_gathered(
        q,
        kv,
        indices,
        None,
        scale,
        Epilogue("partial", outs[0], lse=outs[1]),
        lengths=lengths,
        extra_kv=extra_kv,
        extra_indices=extra_indices,
        extra_lengths=extra_lengths,
        splits=num_splits,
    )


# Attention over FP8 pages: decoded inside the attention, whatever the number of tokens. Pages that 16-byte loads cannot
# read: the attended rows are decoded to bf16 in front of it, a chunk of tokens at a time.
def _paged(epilogue, q, pages, indices, sink, scale, page_size, *pools) -> None:
    lengths, extra_pages, extra_indices, extra_lengths, extra_page_size = pools
    keys = indices.shape[1] + (0 if extra_indices is None else extra_indices.shape[1])
    data = page_bytes(pages, page_size)
    extra = None if extra_pages is None else page_bytes(extra_pages, extra_page_size)

    aligned = attention.pages_aligned(data) and (extra is None or attention.pages_aligned(extra))

    def launch(to: Epilogue, sink: Tensor | None, **how) -> None:
        if aligned:
            attention.launch_paged(
                q,
                data,
                page_size,
                indices,
                sink,
                scale,
                to,
                lengths=lengths,
                extra_pages=extra,
                extra_indices=extra_indices,
                extra_lengths=extra_lengths,
                extra_page_size=extra_page_size,
                **how,
            )
            return
        from ..triton.paged import decoded_chunks

        chunks = decoded_chunks(
            q, pages, page_size, indices, lengths, extra_pages, extra_indices, extra_lengths, extra_page_size
        )
        for token0, _, rows, lists in chunks:
            attention.launch_gathered(q, rows, lists, sink, scale, to, token0=token0, pdl=True, **how)

    _attend(epilogue, q.shape[0], q.shape[1], keys, sink, launch, q.device, cut=aligned, pages=aligned)


def _refuses_paged(q, pages, indices, sink, scale, page_size, *pools):
    return gate.attention_reason(q, None, scale=scale)


def _launch_paged(outs, q, pages, indices, sink, scale, page_size, *pools):
    _paged(Epilogue("plain", outs[0]), q, pages, indices, sink, scale, page_size, *pools)


def _refuses_paged_rope(q, pages, indices, sink, cos, sin, scale, groups, page_size, *pools):
    return gate.attention_reason(q, None, scale=scale, half=cos.shape[-1])


def _launch_paged_rope(outs, q, pages, indices, sink, cos, sin, scale, groups, page_size, *pools):
    _paged(_rope(outs, cos, sin, groups), q, pages, indices, sink, scale, page_size, *pools)


def _refuses_paged_quant(q, pages, indices, sink, cos, sin, scale, groups, page_size, block, *rest):
    return gate.attention_reason(q, None, scale=scale, block=block, half=cos.shape[-1])


def _launch_paged_quant(
    outs, q, pages, indices, sink, cos, sin, scale, groups, page_size, block, scale_rule, floor, pack_scales, *pools
):
    epilogue = _quant(outs, cos, sin, groups, block, scale_rule, floor, pack_scales)
    _paged(epilogue, q, pages, indices, sink, scale, page_size, *pools)


# Dense attention: q [B, S, H, D], kv [B or 1, N, D].
def _dense(epilogue, q, kv, mask, sink, scale, causal, window) -> None:
    batch, queries, heads, _ = q.shape
    keys = kv.shape[1]
    if mask is None and causal and window > 0:
        keys = min(keys, window)

    def launch(to: Epilogue, sink: Tensor | None, **how) -> None:
        attention.launch_dense(q, kv, mask, sink, scale, to, causal=causal, window=window, **how)

    _attend(epilogue, batch * queries, heads, keys, sink, launch, q.device, cut=mask is None)


def _minimum_rows(mask, sink) -> str | None:
    """Without a sink, a row whose mask holds nothing but the dtype's minimum attends all its keys alike."""
    if mask is not None and mask.is_floating_point() and sink is None:
        return "a floating mask without a sink: rows of nothing but dtype-minimum values need the portable kernel"
    return None


def _refuses_dense(q, kv, mask, sink, scale, causal, window):
    return _minimum_rows(mask, sink) or gate.attention_reason(q, kv, scale=scale)


def _launch_dense(outs, q, kv, mask, sink, scale, causal, window):
    _dense(Epilogue("plain", outs[0]), q, kv, mask, sink, scale, causal, window)


def _refuses_dense_rope(q, kv, mask, sink, cos, sin, scale, groups, causal, window):
    return _minimum_rows(mask, sink) or gate.attention_reason(q, kv, scale=scale, half=cos.shape[-1])


def _launch_dense_rope(outs, q, kv, mask, sink, cos, sin, scale, groups, causal, window):
    _dense(_rope(outs, cos, sin, groups), q, kv, mask, sink, scale, causal, window)


def _refuses_dense_quant(
    q, kv, mask, sink, cos, sin, scale, groups, block, scale_rule, floor, pack_scales, causal, window
):
    return _minimum_rows(mask, sink) or gate.attention_reason(q, kv, scale=scale, block=block, half=cos.shape[-1])


def _launch_dense_quant(
    outs, q, kv, mask, sink, cos, sin, scale, groups, block, scale_rule, floor, pack_scales, causal, window
):
    epilogue = _quant(outs, cos, sin, groups, block, scale_rule, floor, pack_scales)
    _dense(epilogue, q, kv, mask, sink, scale, causal, window)


_register("attention", _refuses_dense, _launch_dense)
_register("attention_rope", _refuses_dense_rope, _launch_dense_rope)
_register("attention_rope_quant", _refuses_dense_quant, _launch_dense_quant)
_register("attention_gathered", _refuses_gathered, _launch_gathered)
_register("attention_gathered_rope", _refuses_gathered_rope, _launch_gathered_rope)
_register("attention_gathered_rope_quant", _refuses_gathered_quant, _launch_gathered_quant)
_register("attention_partials", _refuses_partials, _launch_partials)
_register("attention_paged_fp8", _refuses_paged, _launch_paged)
_register("attention_paged_fp8_rope", _refuses_paged_rope, _launch_paged_rope)
_register("attention_paged_fp8_rope_quant", _refuses_paged_quant, _launch_paged_quant)


# Grouped FP8 product for many tokens.
def _refuses_bgemm(codes, scales, weight, weight_scales, block, weight_block, out_dtype):
    return bgemm.unsupported_reason(
        codes, scales, weight, weight_scales, block=block, weight_block=weight_block, out_dtype=out_dtype
    )


def _launch_bgemm(outs, codes, scales, weight, weight_scales, block, weight_block, out_dtype):
    bgemm.launch(codes, scales, weight, weight_scales, outs[0], weight_ready=current().weight_ready)


_register("fp8_bgemm", _refuses_bgemm, _launch_bgemm)
register_launcher("fp8_bgemm", Launcher("deepgemm", deepgemm.refuses, deepgemm.launch, 2 * PRIORITY))
