# SPDX-License-Identifier: Apache-2.0
"""Split attention followed by its merge (with inverse RoPE and FP8) as one call: serial merges, and the policy's.

128 heads, bf16 keys: 1,152 gathered keys in 18 splits (16 at 4 tokens), and contexts of 4,096 and 8,192 keys in splits
of 64 keys. The attention is the split op `attention_partials`, the same in all variants.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial

import fusion_pass.kernels.ops  # noqa: F401  (registers the ops)
import torch
from fusion_pass.kernels.reduction import KvSplitDecision

from benchmarks import harness
from benchmarks.merge import HEADS, variants
from benchmarks.merge_inputs import HEAD_DIM, Problem, make_problem

DEPENDENT = "policy, dependent launch"


def _attend(q, kv, indices, splits, problem: Problem, decision: KvSplitDecision) -> None:
    partials, lse = torch.ops.fusion_pass.attention_partials(q, kv, indices, HEAD_DIM**-0.5, splits)
    replace(problem, partials=partials, lse=lse).call(decision, True)


def run(args: argparse.Namespace) -> list[dict]:
    """Rows: one per (tokens, keys, variant of the merge); `speedup` is the whole-row serial merge over this variant."""
    rows = []
    pool = torch.empty(128 * HEADS * HEAD_DIM, device="cuda")
    for tokens, keys, splits in ((1, 1152, 18), (2, 1152, 18), (4, 1152, 16), (1, 4096, 64), (1, 8192, 128)):
        calls: dict[str, list] = {"serial, whole row": [], "serial, best": [], "policy": [], DEPENDENT: []}
        for _ in range(8):
            q = torch.randn(tokens, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
            kv = torch.randn(2 * keys, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
            indices = torch.randint(0, 2 * keys, (tokens, keys), device="cuda", dtype=torch.int32)
            problem = make_problem(splits, tokens * HEADS, torch.float32, pool)
            choices = variants(problem, True)
            choices[DEPENDENT] = replace(choices["policy"], pdl=True)
            for name, works in calls.items():
                works.append(partial(_attend, q, kv, indices, splits, problem, choices[name]))
        timings = harness.time_interleaved(calls, replays=args.replays)
        for name, timing in timings.items():
            speedup = round(harness.ratio(timings["serial, whole row"], timing), 3)
            shape = f"attention, {keys} keys in {splits} splits, merge, RoPE + FP8"
            rows.append(
                {"shape": shape, "partials": splits, "T": tokens, "variant": name, **timing.row(), "speedup": speedup}
            )
    return rows
