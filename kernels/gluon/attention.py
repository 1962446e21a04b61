# SPDX-License-Identifier: Apache-2.0
"""Launcher of the Hopper attention: gathered keys from one or two pools of bf16 rows or FP8 pages, or dense keys with
causality, window and mask.

The kernel (attention_kernel.py) is imported at the first launch, after :func:`.gate.attention_reason` has accepted.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..launching import at
from ..tuning import attention as tuning_data
from .attention_lists import Lists, two_lists
from .gate import HEAD_DIM

TILE = 64
LOG2E = 1.4426950408889634
KINDS = {"plain": 0, "rope": 1, "quant": 2, "partial": 3}
WAIT_FIRST, WAIT_LAST = 1, 2  # see attention_shared.py
_LIST_WAVES = 8  # tokens of a list chunk in units of the GPU's multiprocessors, if mask_lists.WORKSPACE_BYTES allows

# Launch parameters, measured on H200: matrix products left in flight when the other warpgroup's turn is signalled (1
# and 3 do not differ), registers of the two worker partitions (the default one, consumer_right, gets 504 - both).
TUNING = {
    "OUTSTANDING": 1,
    "CONSUMER_REGISTERS": 224,
    "PRODUCER_REGISTERS": 72,
}
# FP8 pages: three worker partitions, two of them producers.
PAGED_TUNING = {"CONSUMER_REGISTERS": 216, "PRODUCER_REGISTERS": 48}


@dataclass(frozen=True)
class Epilogue:
    """What is written, for T tokens in all.

    kind "plain": out [T, H, 512].
    "rope": inverse RoPE, out [G, T, K].
    "quant": inverse RoPE, out = E4M3 codes [G, T, K] with scales fp32 [G, K/block, M] or, packed, int32
    [G, K/(4*block), M]; M = T rounded up to 4, padding written as 0.
    "partial": out [P, T, H, 512] (bf16 or fp32, normalised, no sink) with natural-log lse fp32 [P, T, H]; or [P, t, ..]
    of the last t tokens.
    cos, sin: [rows, half], contiguous; token t uses row t % rows.
    """

    kind: str
    out: Tensor
    scales: Tensor | None = None
    lse: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    groups: int = 1
    block: int = 128
    scale_rule: str = "fp32"
    floor: float = 1e-12
    packed: bool = False


def _row_stride(rows: Tensor) -> int:
    """Elements between rows; a pool of one row may carry any stride."""
    return rows.stride(-2) if rows.shape[-2] > 1 else HEAD_DIM


def _aligned_q(q: Tensor) -> Tensor:
    good = q.stride(-1) == 1 and all(s % 8 == 0 for s in q.stride()[:-1]) and q.data_ptr() % 16 == 0
    # a copy even of contiguous rows, which may start anywhere
    return q if good else q.clone(memory_format=torch.contiguous_format)


def plan(
    tokens: int, heads: int, keys: int, sm_count: int, *, cut: bool = True, pages: bool = False
) -> tuning_data.Plan:
    """How a call's keys are shared out, from capacities only. cut: whether tokens of a last wave alone may be split;
    pages: the keys are rows of FP8 pages."""
    return tuning_data.hopper_plan(max(tokens, 1), heads, max(1, math.ceil(keys / TILE)), sm_count, cut, pages)


def _meeting(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for what the shares of `rows` rows of 64 heads exchange: bf16 values, fp32 log-sum-exps."""
    values = torch.empty(rows, 2, 2, TILE * HEAD_DIM // 4, dtype=torch.bfloat16, device=device)
    return values, torch.empty(rows, 2, 2, TILE, dtype=torch.float32, device=device)


def _launch(
    q: Tensor,
    kv: Tensor,
    sink: Tensor | None,
    scale: float,
    epilogue: Epilogue,
    *,
    lists: Lists | None,
    extra_kv: Tensor | None = None,
    token0: int = 0,
    tokens: int,
    splits: int = 1,
    paired: bool = False,
    tail: Epilogue | None = None,
    causal: bool = False,
    window: int = 0,
    page_sizes: tuple[int, int] | None = None,
    pdl: bool = False,
    tuning: dict[str, int] | None = None,
) -> None:
    """Tokens token0 .. token0 + tokens - 1 of q [B, S, H, 512] over kv [B or 1, N, 512].

    One kernel launch, or with `tail` [P, t, H, 512] (partials) two: the last t tokens' keys are cut into P shares, by a
    launch that takes multiprocessors as soon as the first has no more work for them. Nothing that it writes may be
    memory which was freed after the first launch. Whoever waits for the last launch has waited for both.

    paired: the two shares of every row finish it themselves (attention_pairs.py): no CTA may have two jobs then.
    """
    from .attention_kernel import attention_kernel

    batches, queries, heads, _ = q.shape
    q = _aligned_q(q)
    paged = page_sizes is not None
    if page_sizes is not None:  # pools are bytes [P, page bytes]
        rows = kv.shape[0] * page_sizes[0]
        extra_rows = 0 if extra_kv is None else extra_kv.shape[0] * page_sizes[1]
    else:
        rows = kv.shape[0] * kv.shape[1] if kv.dim() == 3 else kv.shape[0]
        extra_rows = 0 if extra_kv is None else extra_kv.shape[0]
    if kv.numel() == 0:
        kv = q  # no row of it is ever addressed
    if extra_kv is not None and extra_kv.numel() == 0:
        extra_kv = q
    kv_keys = rows if lists is not None else rows // (kv.shape[0] if kv.dim() == 3 else 1)
    sms = torch.cuda.get_device_properties(q.device).multi_processor_count
    blocks = math.ceil(heads / TILE)
    total = batches * queries
    sink = None if sink is None else sink.contiguous()
    whole = tokens - (0 if tail is None else tail.out.shape[1])
    if paired and (splits != 2 or epilogue.kind == "partial"):
        raise ValueError(f"pairs are of two shares that finish their rows: got {splits} and {epilogue.kind!r}")
    values, sums = _meeting(tokens * blocks, q.device) if paired else (q, q)
    assert not paired or 2 * tokens * blocks <= sms, "a share that waits for another has no other job"
    release = tuning_data.RELEASE_FIRST
    if epilogue.kind == "partial":
        release = tuning_data.hopper_merging(tokens * heads, splits, pages=paged).release
    parts = [(epilogue, 0, whole, splits, WAIT_FIRST if pdl else 0, release)]
    if tail is not None:
        shares, count = tail.out.shape[:2]
        merging = tuning_data.hopper_merging(count * heads, shares, tail=True)
        parts.append((tail, whole, count, shares, WAIT_LAST, merging.release))
    for to, first, count, shares, wait, release in parts:
        partial, rope, packed, out, scales = to.kind == "partial", to.cos is not None, to.packed, to.out, to.scales
        cos = to.cos if to.cos is not None else out
        if scales is not None and packed:
            scales = scales.view(torch.int8)
        programs = min(sms, count * blocks * shares)
        at(attention_kernel, (programs // 2 if paired else programs,), cluster=2 if paired else 1)(
            q,
            kv,
            kv if extra_kv is None else extra_kv,
            q if lists is None else lists.index,
            q if lists is None or lists.index2 is None else lists.index2,
            q if lists is None or lists.length is None else lists.length,
            q if lists is None or lists.length2 is None else lists.length2,
            q if lists is None or lists.bias is None else lists.bias,
            q if sink is None or partial else sink,
            to.cos if rope else q,
            to.sin if rope else q,
            out,
            out if scales is None else scales,
            out if to.lse is None else to.lse,
            values,
            sums,
            scale * LOG2E,
            to.floor,
            count * blocks * shares,
            count,
            first,
            token0,
            shares,
            rows,
            extra_rows,
            0 if lists is None else lists.index.stride(0) // 2,
            0 if lists is None or lists.index2 is None else lists.index2.stride(0) // 2,
            kv_keys if lists is None else lists.width,
            0 if lists is None else lists.width2,
            kv.stride(0) // 16 if paged else 0,
            extra_kv.stride(0) // 16 if paged and extra_kv is not None else 0,
            queries,
            window,
            int(causal),
            q.stride(0) // 8,
            q.stride(1) // 8,
            q.stride(2) // 8,
            cos.shape[0] if rope else 1,
            out.shape[1] if partial else total,
            token0 + first if to is tail else 0,
            scales.shape[-1] // (4 if packed else 1) if scales is not None else 0,
            wait,
            release,
            HEADS=heads,
            PER_GROUP=heads // to.groups,
            HALF=cos.shape[1] if rope else 32,
            FORM=1 if lists is None else 0,
            POOLS=1 if extra_kv is None else 2,
            HAS_LENGTH0=lists is not None and lists.length is not None,
            HAS_LENGTH1=lists is not None and lists.length2 is not None,
            HAS_BIAS=lists is not None and lists.bias is not None,
            HAS_SINK=sink is not None and not partial,
            BATCHED_KV=lists is None and batches > 1 and kv.dim() == 3 and kv.shape[0] > 1,
            STRIDE0=_row_stride(kv) if page_sizes is None else page_sizes[0],
            STRIDE1=_row_stride(kv if extra_kv is None else extra_kv) if page_sizes is None else page_sizes[1],
            EPILOGUE=KINDS[to.kind],
            BLOCK=to.block,
            POWER_OF_TWO=to.scale_rule == "ue8m0",
            PACKED=packed,
            BATCHED=batches > 1,
            ROPE_SHARED=rope and cos.shape[0] != total,
            PAGED=paged,
            PAIRED=paired,
            # the space that it needs is free where codes are written, which take half of that of other outputs
            AHEAD=paged and to.kind == "quant",
            num_warps=4,
            **({"launch_pdl": True} if wait else {}),
            **(TUNING | (PAGED_TUNING if paged else {}) | (tuning or {})),
        )


def launch_gathered(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sink: Tensor | None,
    scale: float,
    epilogue: Epilogue,
    *,
    lengths: Tensor | None = None,
    extra_kv: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_lengths: Tensor | None = None,
    splits: int = 1,
    paired: bool = False,
    tail: Epilogue | None = None,
    token0: int = 0,
    pdl: bool = False,
    tuning: dict[str, int] | None = None,
) -> None:
    """Attention of q [T, H, 512] over rows of kv [N, 512] (and extra_kv [N2, 512]) given by index lists.

    indices [T, Kk] int32 or int64, negative or past the pool = invalid; lengths [T]: only the first lengths[t] columns
    count. One softmax over both pools. Writes `epilogue`; with kind "partial" its out has `splits` as leading size.
    T must be positive. With fewer than T lists these belong to the tokens from token0 on, and only those are done.
    tail: partials [P, t, H, 512] of the last t tokens, whose keys are cut into P shares by a launch behind that of the
    others; its memory must have been allocated before. pdl: start while the kernel before, which must be the one that
    writes `kv`, finishes.
    """
    lists, extra_kv = two_lists(q, kv, indices, lengths, extra_kv, extra_indices, extra_lengths)
    _launch(
        q.unsqueeze(0),
        kv,
        sink,
        scale,
        epilogue,
        lists=lists,
        extra_kv=extra_kv,
        token0=token0,
        tokens=indices.shape[0],
        splits=splits,
        paired=paired,
        tail=tail,
        pdl=pdl,
        tuning=tuning,
    )


def pages_aligned(data: Tensor) -> bool:
    """Whether the kernel can read pages [P, page bytes] where they are: 16 bytes at a time."""
    return data.data_ptr() % 16 == 0 and (data.stride(0) % 16 == 0 or data.shape[0] <= 1)


def launch_paged(
    q: Tensor,
    pages: Tensor,
    page_size: int,
    indices: Tensor,
    sink: Tensor | None,
    scale: float,
    epilogue: Epilogue,
    *,
    lengths: Tensor | None = None,
    extra_pages: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_lengths: Tensor | None = None,
    extra_page_size: int = 1,
    splits: int = 1,
    paired: bool = False,
    tail: Epilogue | None = None,
    tuning: dict[str, int] | None = None,
) -> None:
    """:func:`launch_gathered` over rows of paged FP8 caches, given as bytes [P, page_size * 584] (`pages_aligned`).

    An index is page * page_size + offset.
    """
    lists, extra_pages = two_lists(q, pages, indices, lengths, extra_pages, extra_indices, extra_lengths)
    _launch(
        q.unsqueeze(0),
        pages,
        sink,
        scale,
        epilogue,
        lists=lists,
        extra_kv=extra_pages,
        tokens=indices.shape[0],
        splits=splits,
        paired=paired,
        tail=tail,
        page_sizes=(page_size, extra_page_size if extra_pages is not None else page_size),
        tuning=tuning,
    )


def launch_dense(
    q: Tensor,
    kv: Tensor,
    mask: Tensor | None,
    sink: Tensor | None,
    scale: float,
    epilogue: Epilogue,
    *,
    causal: bool = False,
    window: int = 0,
    splits: int = 1,
    paired: bool = False,
    tail: Epilogue | None = None,
    tuning: dict[str, int] | None = None,
) -> None:
    """Attention of q [B, S, H, 512] over kv [B or 1, N, 512] with causality, sliding window and mask [B or 1, S, N].

    A mask is turned into lists of the visible keys, a chunk of queries at a time, so that the work is proportional to
    what is attended and the temporary lists stay within mask_lists.WORKSPACE_BYTES. B * S must be positive.
    """
    batches, queries, heads, _ = q.shape
    total = batches * queries
    keys = kv.shape[1]
    if mask is None or keys == 0:
        _launch(
            q,
            kv,
            sink,
            scale,
            epilogue,
            lists=None,
            tokens=total,
            splits=splits,
            paired=paired,
            tail=tail,
            causal=causal,
            window=window,
            tuning=tuning,
        )
        return
    from ..triton.mask_lists import rows_per_pass, visible_key_lists

    additive = mask.dtype != torch.bool
    width = keys + keys % 2
    sms = torch.cuda.get_device_properties(q.device).multi_processor_count
    per_key = 4 + (mask.element_size() if additive else 0)
    chunk = min(total, _LIST_WAVES * sms, max(1, rows_per_pass(width, per_key) // sms) * sms)
    index = torch.empty(chunk, width, dtype=torch.int32, device=q.device)
    bias = torch.empty(chunk, width, dtype=mask.dtype, device=q.device) if additive else None
    length = torch.empty(chunk, dtype=torch.int32, device=q.device)
    for token0 in range(0, total, chunk):
        tokens = min(chunk, total - token0)
        visible_key_lists(
            mask,
            token0,
            tokens,
            causal=causal,
            window=window,
            index=index,
            bias=bias,
            length=length,
            key_stride_batch=keys if kv.shape[0] > 1 else 0,
        )
        lists = Lists(index, keys, length, bias)
        _launch(
            q,
            kv,
            sink,
            scale,
            epilogue,
            lists=lists,
            token0=token0,
            tokens=tokens,
            splits=splits,
            paired=paired,
            tail=tail,
            tuning=tuning,
        )
