# SPDX-License-Identifier: Apache-2.0
"""Synthetic partials and the candidate layouts of the split-KV merge, shared by its table and its tuning sweep."""

from __future__ import annotations

from dataclasses import dataclass

import torch
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


# (width, warps) worth measuring for fp32 partials, by KvSplit; 16-bit partials take half the warps (16 bytes a lane).
_TILES = {
    1: [(128, 1), (256, 1), (512, 1), (512, 2), (512, 4)],
    2: [(128, 1), (256, 1), (256, 2), (512, 4)],
    4: [(128, 1), (256, 2), (512, 2), (512, 4)],
    8: [(128, 1), (256, 2), (512, 2), (512, 4)],
    16: [(256, 2), (512, 4), (512, 8)],
}
_HALF_TILES = {
    1: [(128, 1), (256, 1), (512, 1), (512, 2)],
    2: [(256, 1), (512, 1), (512, 2)],
    4: [(256, 1), (512, 2)],
    8: [(256, 1), (512, 2)],
    16: [(512, 2), (512, 4)],
}
# 16-byte loads per lane in flight at most when a loop is unrolled whole: beyond, registers spill.
_MAX_IN_FLIGHT = {1: 18, 2: 32, 4: 40, 8: 64, 16: 64}


def candidates(num_partials: int, element_size: int) -> list[KvSplitDecision]:
    """Layouts to measure for `num_partials`: each tile with the loop unrolled whole where that is sensible, and as a
    run-time loop of a fixed number of partials per iteration."""
    found = []
    for kv_split in (k for k in KV_SPLITS if k <= num_partials):
        for width, warps in (_TILES if element_size == 4 else _HALF_TILES)[kv_split]:
            steps = merge.unrolled_steps(num_partials, kv_split, 32)
            if steps and steps * kv_split <= _MAX_IN_FLIGHT[kv_split]:
                found.append(KvSplitDecision(kv_split, "whole", width, warps, 1, steps + steps // 2 + 1))
            for unroll in {1: (8,), 2: (4, 8), 4: (2, 4), 8: (1, 2, 4), 16: (1, 2)}[kv_split]:
                if unroll * kv_split < num_partials and num_partials > 8:
                    found.append(KvSplitDecision(kv_split, "loop", width, warps, unroll, 0))
    return found


def serial_whole_row(unroll: int) -> KvSplitDecision:
    """The serial form of the upstream reducer: one CTA merges a whole row slice, `unroll` loads per iteration."""
    return KvSplitDecision(1, "whole row per CTA", HEAD_DIM, 4, unroll, 0)
