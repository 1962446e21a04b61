# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"
"""Launches the merge of split-KV partials (merge_kernel.py), with or without the epilogue of the whole chain.

How many groups merge a row side by side, and in which tiles, is the policy's decision
(:mod:`fusion_pass.kernels.reduction`): from shapes and the device only.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch

from ..launching import at
from ..modes import current
from ..reduction import KvSplitDecision, choose_kv_split, default_layout, for_blocks
from .calling import keep_shared_memory
from .discard import discarding
from .epilogue import QUANT_NONE, quant_mode
from .interpreter import device_of, e4m3_is_native, interpreted, supports_pdl
from .merge_kernel import merge_kernel
from .rope_quant import empty_quantized, scale_pointer

# Partials per group of the kernels without a run-time loop: rounded up to these, so that the number of compiled kernels
# stays bounded whatever counts occur.
_STEP_BUCKETS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 18, 20, 24, 28, 32, 48, 64, 96, 128)


@dataclass(frozen=True)
class Epilogue:
    """What follows the merge: inverse RoPE with ``cos``, ``sin`` [rows, half], regrouped into ``groups``; with
    ``quant`` (a QUANT constant) E4M3 codes per ``block`` channels instead of rows. ``floor``: lower bound of the
    absolute maximum. Token t of the outputs uses row t % rows of the tables."""

    cos: torch.Tensor
    sin: torch.Tensor
    groups: int
    quant: int = 0
    block: int = 128
    floor: float = 1e-12


def unrolled_steps(num_partials: int, kv_split: int, limit: int) -> int:
    """Partials of a group that a kernel without a run-time loop covers, or 0 if there are more than ``limit`` of them.

    Rounded up to a bucket, so that the number of compiled kernels stays bounded whatever counts occur; the slots past
    the last partial are predicated off.
    """
    steps = -(-num_partials // kv_split)
    bucket = next((b for b in _STEP_BUCKETS if b >= steps), limit + 1)
    return bucket if bucket <= limit else 0


def batches(num_partials: int, decision: KvSplitDecision) -> tuple[int, int]:
    """(partials per group in one batch of loads, batches) that ``decision`` means for a count; 0 batches = a loop."""
    steps = unrolled_steps(num_partials, decision.kv_split, decision.unroll_limit)
    if not steps:
        return decision.unroll, 0
    batch = min(decision.batch or steps, steps)
    return batch, -(-steps // batch)


# A dict lookup per call instead of the walk through the table.
_choose = functools.lru_cache(maxsize=4096)(choose_kv_split)


def decide(partials: torch.Tensor, kv_split: int | None, *, epilogue: bool = False) -> KvSplitDecision:
    """The policy's decision for ``partials`` [P, T, H, D]: from shapes and the device only, so it holds under capture.

    kv_split: upper bound or None; epilogue: whether inverse RoPE (and quantisation) follow in the same kernel. A
    batch-invariant call takes the decision for one token, whatever the number of tokens.
    """
    num_partials, tokens, heads, dim = partials.shape
    if interpreted():  # there is no grid to fill
        return default_layout(
            kv_split or 1, head_dim=dim, element_size=partials.element_size(), reason="interpreted: bound as given"
        )
    capability, sm_count = device_of(partials)
    invariant = current().batch_invariant
    decision = _choose(
        num_partials=num_partials,
        rows=heads if invariant else tokens * heads,
        head_dim=dim,
        sm_count=sm_count,
        bound=kv_split,
        element_size=partials.element_size(),
        epilogue=epilogue,
        capability=capability,
    )
    # What suits one token is faster with dependent launch than many tokens are.
    return replace(decision, pdl=False) if invariant and decision.pdl else decision


def merge_into(
    out: torch.Tensor,
    scales: torch.Tensor | None,
    stats: torch.Tensor | None,
    partials: torch.Tensor,
    lse_or_max: torch.Tensor,
    sum: torch.Tensor | None,
    sink: torch.Tensor | None,
    stat_scale: float,
    decision: KvSplitDecision,
    epilogue: Epilogue | None = None,
    *,
    token0: int = 0,
    ready: bool = False,
    last_use: bool = False,
) -> None:
    """Merge ``partials`` [P, T, H, D] into ``out``, contiguous: [T, H, D], or [G, T, K] with an epilogue (codes
    viewed as uint8 when it quantises, with their ``scales``). ``stats`` [T, H, 2] fp32 or None. Arguments are not
    checked here.

    token0: the partials' first token in ``out`` and ``scales``, which may have more tokens than the partials. ready:
    tables and sink were complete before the kernel that writes the partials started. last_use: nobody reads
    ``partials``, an allocation of its own, afterwards: they are left undefined; and a kernel that takes a whole
    multiprocessor's shared memory, like the grouped product, may start beside the merge."""
    num_partials, tokens, heads, dim = partials.shape
    if tokens == 0:
        return
    partials, lse_or_max = partials.contiguous(), lse_or_max.contiguous()
    sum = None if sum is None else sum.contiguous()
    sink = None if sink is None else sink.contiguous()
    half, quant, block, floor, groups, total, period = 0, int(QUANT_NONE.value), 1, 1.0, 1, tokens, 1
    cos = sin = lse_or_max  # not read without an epilogue
    strides: tuple[int, ...] = (0, 1, 0, 1)
    if epilogue is not None:
        half, groups = epilogue.cos.shape[-1], epilogue.groups
        quant, block, floor = epilogue.quant, epilogue.block, epilogue.floor
        cos, sin, total, period = epilogue.cos, epilogue.sin, out.shape[1], epilogue.cos.shape[0]
        strides = (*cos.stride(), *sin.stride())
    kv_split, width = decision.kv_split, decision.width
    if quant and width < block:
        raise ValueError(f"a tile of {width} channels cannot quantise blocks of {block}")
    unroll, count = batches(num_partials, decision)
    pdl = decision.pdl and supports_pdl(partials.device)
    launched = at(merge_kernel, (tokens * heads, dim // width))(
        partials,
        lse_or_max,
        lse_or_max if sum is None else sum,
        lse_or_max if sink is None else sink,
        out,
        out if scales is None else scale_pointer(scales, quant),
        out if stats is None else stats,
        cos,
        sin,
        num_partials,
        tokens,
        heads,
        token0,
        total,
        period,
        *strides,
        stat_scale * math.log2(math.e),
        1.0 / stat_scale,
        floor,
        KV_SPLIT=kv_split,
        WIDTH=width,
        UNROLL=unroll,
        BATCHES=count,
        HAS_SUM=sum is not None,
        HAS_SINK=sink is not None,
        STATS=stats is not None,
        DISCARD=discarding(partials, decision.num_warps) if last_use else 0,
        D=dim,
        HPG=heads // groups,
        HALF=half,
        BLOCK=block,
        QUANT=quant,
        NATIVE=e4m3_is_native(partials.device),
        READY=ready,
        PDL=pdl,
        num_warps=decision.num_warps,
        **({"launch_pdl": True} if pdl else {}),
    )
    if last_use:
        keep_shared_memory(launched)


def refuses(partials: torch.Tensor, *tensors: torch.Tensor | None, out_dtype: torch.dtype | None = None) -> str | None:
    """Why the kernel cannot run these arguments (None: it can)."""
    floats = (torch.float32, torch.bfloat16, torch.float16)
    for tensor in (partials, *tensors):
        if tensor is not None and tensor.dtype not in floats:
            return f"{tensor.dtype} (the kernel computes in fp32)"
    if out_dtype is not None and out_dtype not in floats:
        return f"out_dtype {out_dtype}"
    return None


def merge_partials(
    partials: torch.Tensor,
    lse_or_max: torch.Tensor,
    sum: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    stat_scale: float = 1.0,
    kv_split: int | None = None,
    return_stats: bool = False,
    out_dtype: torch.dtype | None = None,
    *,
    decision: KvSplitDecision | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merged rows [T, H, D] and stats [T, H, 2] (or an empty tensor); see the op of this name for the arguments."""
    _, tokens, heads, dim = partials.shape
    out = partials.new_empty((tokens, heads, dim), dtype=out_dtype or partials.dtype)
    stats = lse_or_max.new_empty((tokens, heads, 2) if return_stats else (0,), dtype=torch.float32)
    decision = decision or decide(partials, kv_split)
    merge_into(out, None, stats if return_stats else None, partials, lse_or_max, sum, sink, stat_scale, decision)
    return out, stats


def merge_partials_rope(
    partials: torch.Tensor,
    lse_or_max: torch.Tensor,
    sum: torch.Tensor | None,
    sink: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    groups: int,
    stat_scale: float = 1.0,
    kv_split: int | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    decision: KvSplitDecision | None = None,
) -> torch.Tensor:
    """Merge and inverse RoPE: [G, T, K], rounded once."""
    _, tokens, heads, dim = partials.shape
    out = partials.new_empty((groups, tokens, heads // groups * dim), dtype=out_dtype or partials.dtype)
    decision = decision or decide(partials, kv_split, epilogue=True)
    epilogue = Epilogue(cos, sin, groups)
    merge_into(out, None, None, partials, lse_or_max, sum, sink, stat_scale, decision, epilogue)
    return out


def merge_partials_rope_quant(
    partials: torch.Tensor,
    lse_or_max: torch.Tensor,
    sum: torch.Tensor | None,
    sink: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    groups: int,
    block: int = 128,
    scale_rule: str = "fp32",
    floor: float = 1e-12,
    pack_scales: bool = False,
    stat_scale: float = 1.0,
    kv_split: int | None = None,
    *,
    decision: KvSplitDecision | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge, inverse RoPE and quantisation: (codes [G, T, K], scales)."""
    _, tokens, heads, dim = partials.shape
    quant = quant_mode(scale_rule, pack_scales)
    codes, scales = empty_quantized(tokens, heads, dim, groups, block, quant, partials.device)
    if decision is None:
        decision = for_blocks(decide(partials, kv_split, epilogue=True), block, dim, partials.element_size())
    epilogue = Epilogue(cos, sin, groups, quant, block, floor)
    merge_into(codes.view(torch.uint8), scales, None, partials, lse_or_max, sum, sink, stat_scale, decision, epilogue)
    return codes, scales
