# SPDX-License-Identifier: Apache-2.0
"""Synthetic partials and the candidate layouts of the split-KV merge, shared by its table and its tuning sweep."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from fusion_pass.kernels.reduction import KV_SPLITS, KvSplitDecision
from fusion_pass.kernels.triton import merge
from fusion_pass.kernels.triton.epilogue import quant_mode
from fusion_pass.kernels.triton.rope_quant import empty_quantized

HEAD_DIM, ROPE_HALF, BLOCK, HEADS_PER_GROUP = 512, 32, 128, 8


@dataclass
class Problem:
    """One merge: `partials` [P, T, H, 512] random, its statistics, and preallocated outputs of both forms."""

    partials: torch.Tensor
    lse: torch.Tensor
    sink: torch.Tensor
    out: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor
    epilogue: merge.Epilogue

    def call(self, decision: KvSplitDecision, quantise: bool) -> None:
        if quantise:
            out, scales, epilogue = self.codes, self.scales, self.epilogue
        else:
            out, scales, epilogue = self.out, None, None
        merge.merge_into(out, scales, None, self.partials, self.lse, None, self.sink, 1.0, decision, epilogue)

    def expected(self) -> torch.Tensor:
        """The merge in float64, [T, H, 512]."""
        sink = self.sink.double().expand(1, *self.lse.shape[1:])
        weights = torch.softmax(torch.cat([self.lse.double(), sink]), 0)[:-1]
        return torch.einsum("pth,pthd->thd", weights, self.partials.double())


def make_problem(num_partials: int, rows: int, dtype: torch.dtype, pool: torch.Tensor) -> Problem:
    """A merge of `num_partials` partials of `rows` rows (128 heads, or 64 for 64 rows); partials are a view of `pool`,
    a flat fp32 buffer of random numbers that is large enough."""
    heads = min(rows, 128)
    tokens = rows // heads
    count = num_partials * rows * HEAD_DIM
    flat = pool.view(torch.float32) if dtype == torch.float32 else pool.view(torch.bfloat16)
    if dtype != torch.float32:
        flat[:count].normal_()  # the fp32 pool's bits are no sensible 16-bit numbers
    device = pool.device
    groups = heads // HEADS_PER_GROUP
    mode = quant_mode("fp32")
    codes, scales = empty_quantized(tokens, heads, HEAD_DIM, groups, BLOCK, mode, device)
    angle = torch.rand(tokens, ROPE_HALF, device=device) * 6
    return Problem(
        flat[:count].view(num_partials, tokens, heads, HEAD_DIM),
        torch.randn(num_partials, tokens, heads, device=device) * 3,
        torch.randn(heads, device=device),
        torch.empty(tokens, heads, HEAD_DIM, dtype=torch.bfloat16, device=device),
        codes.view(torch.uint8),
        scales,
        merge.Epilogue(angle.cos(), angle.sin(), groups, mode, BLOCK),
    )


def _tiles(kv_split: int, rows: int, element_size: int) -> list[tuple[int, int]]:
    """(width, warps) worth measuring. A warp takes 128 fp32 or 256 16-bit columns (16 bytes a lane) or two of these;
    few rows want narrow tiles (more programs), many rows wide ones."""
    lane = 128 if element_size == 4 else 256
    if kv_split == 1:
        narrow, wide = [(128, 1), (256, 1)], [(256, 1), (512, 512 // lane), (512, 1)]
        return narrow if rows <= 128 else wide if rows >= 1024 else [(128, 1), *wide]
    if kv_split == 16:
        found = [(512, 512 // lane), (512, 1024 // lane)]
        return [*found, (256, 512 // lane)] if rows <= 256 else found
    found = [(lane, 1), (512, 512 // lane)]
    return found if kv_split == 2 or element_size == 2 else [*found, (256, 2)]


# Most partials per group that a kernel without a loop is compiled for: longer ones take half a minute to compile.
MOST_UNROLLED = 16
# Partials per group in one batch of loads of such a kernel, by KvSplit.
BATCHES = {4: (2, 4), 8: (1, 2, 4), 16: (1, 2)}


def candidates(num_partials: int, rows: int, element_size: int) -> list[KvSplitDecision]:
    """Layouts to measure: each tile with all partials in one batch of loads where registers allow it, in batches
    unrolled at compile time (few rows only: there it pays), and as a loop."""
    found = []
    for kv_split in (k for k in KV_SPLITS if k <= num_partials):
        one_batch = 18 if kv_split == 1 else 32 // kv_split
        steps = merge.unrolled_steps(num_partials, kv_split, MOST_UNROLLED)
        single = merge.unrolled_steps(num_partials, kv_split, one_batch)
        loops = {1: (8,), 2: (4, 8), 4: (2, 4), 8: (1, 2), 16: (1,)}[kv_split]
        for width, warps in _tiles(kv_split, rows, element_size):
            if single:
                found.append(KvSplitDecision(kv_split, "one batch", width, warps, loops[0], one_batch))
            if steps and rows <= 256 and num_partials >= 32:
                for batch in BATCHES.get(kv_split, ()):
                    if batch < steps or not single:
                        decision = KvSplitDecision(kv_split, "unrolled", width, warps, loops[0], MOST_UNROLLED)
                        found.append(replace(decision, batch=batch))
            if not single or (num_partials > 12 and kv_split > 1):
                for unroll in loops if not single else loops[:1]:
                    found.append(KvSplitDecision(kv_split, "loop", width, warps, unroll, 0))
    return found


@triton.jit(do_not_specialize=["rows"])
def _read_only(partials, out, rows, STEPS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    row = tl.program_id(0)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros([GROUPS, WIDTH], tl.float32)
    for step in tl.static_range(STEPS):
        slot = step * GROUPS + tl.arange(0, GROUPS)
        total += tl.load(partials + (slot * rows + row).to(tl.int64)[:, None] * D + channel[None, :])
    tl.store(out + row.to(tl.int64) * D + channel, tl.sum(total, 0))


READ_TILES = ((16, 512, 8), (16, 256, 4), (8, 512, 4))  # (partials side by side, channels, warps)


def read_only(problem: Problem, tile: tuple[int, int, int]) -> None:
    """The least a merge can do: read every partial once (and add it up), with the grid of ``tile``. The number of
    partials must be a multiple of the tile's."""
    count, tokens, heads, dim = problem.partials.shape
    groups, width, warps = tile
    _read_only[(tokens * heads, dim // width)](
        problem.partials, problem.out, tokens * heads, STEPS=count // groups, GROUPS=groups, WIDTH=width, D=dim,
        num_warps=warps,
    )  # fmt: skip


def serial_whole_row(unroll: int) -> KvSplitDecision:
    """The serial form of the upstream reducer: one CTA merges a whole row slice, `unroll` loads per iteration."""
    return KvSplitDecision(1, "whole row per CTA", HEAD_DIM, 4, unroll, 0)
