# SPDX-License-Identifier: Apache-2.0
"""Time of the split-KV merge: serial forms, every KvSplit in its best measured layout, and the default policy.

Batch 1 to 64 (128 heads of 512 channels), and the numbers of partials that contexts of 2K, 8K, 32K and 128K give:
compressed attention (HCA: one key per 128 tokens, and a window of 128) in splits of 64 keys, the sparse form (CSA:
window 128 + top 1024), and dense latent attention in splits of 256 keys, at most 128 of them.

Merges run back to back on one buffer, as behind the attention that wrote it: below the L2's size the partials come from
the cache. Variants of a row are replayed in turn.
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from fusion_pass.kernels import reduction
from fusion_pass.kernels.reduction import KvSplitDecision
from fusion_pass.kernels.triton import merge

from benchmarks import harness
from benchmarks.merge_inputs import HEAD_DIM, READ_TILES, Problem, make_problem, read_only, serial_whole_row

BATCHES = (1, 2, 4, 8, 16, 64)
CONTEXTS = {"2K": 2048, "8K": 8192, "32K": 32768, "128K": 131072}
HEADS = 128
CALLS = 60
SAMPLE_US = 600.0  # per sample: an event pair costs microseconds
# Reading the partials once and nothing else, in the fastest of some grids: measured where KvSplit is in question.
FLOOR, FLOOR_BATCH = "read only", 2


def scenarios() -> dict[int, list[str]]:
    """{number of partials: the contexts it stands for}."""
    found: dict[int, list[str]] = {}
    for name, length in CONTEXTS.items():
        found.setdefault(-(-(128 + length // 128) // 64), []).append(f"HCA {name}")
        found.setdefault(min(-(-length // 256), 128), []).append(f"dense {name}")
    found.setdefault((128 + 1024) // 64, []).append("CSA")
    found.setdefault(64, []).append("64 partials")
    return dict(sorted(found.items()))


def variants(problem: Problem, quantise: bool) -> dict[str, KvSplitDecision]:
    """The serial forms, each KvSplit in the layout that the tuning table holds for it, and the policy's own choice."""
    count, tokens, heads, _ = problem.partials.shape
    element_size = problem.partials.element_size()
    properties = torch.cuda.get_device_properties(problem.partials.device)
    found = {"serial, whole row": serial_whole_row(1), "serial, whole row, 4 loads": serial_whole_row(4)}
    table = reduction.measured_table(
        properties.multi_processor_count, (properties.major, properties.minor)
    )
    by_rows = table.measured(element_size, quantise) if table else {}
    layouts = reduction.measured_layouts(by_rows, count, tokens * heads) if by_rows else {}
    for kv_split in reduction.KV_SPLITS:
        if kv_split <= count:
            name = f"KvSplit {kv_split}" if kv_split > 1 else "serial, best"
            found[name] = layouts.get(kv_split) or reduction.default_layout(
                kv_split, head_dim=HEAD_DIM, element_size=element_size, reason="not measured"
            )
    policy = merge.decide(problem.partials, None, epilogue=quantise)
    found["policy"] = replace(policy, pdl=False)
    if policy.pdl:
        found["policy, dependent launch"] = policy
    return found


def measure(problem: Problem, quantise: bool, replays: int) -> dict[str, harness.Timing]:
    decisions = variants(problem, quantise)
    bytes_read = problem.partials.numel() * problem.partials.element_size()
    calls = max(3, min(CALLS, int(2e9 / bytes_read)))
    work = {name: [partial(problem.call, decision, quantise)] * calls for name, decision in decisions.items()}
    count, tokens = problem.partials.shape[:2]
    if tokens <= FLOOR_BATCH:
        floors = [tile for tile in READ_TILES if count >= 32 and count % tile[0] == 0]
        work |= {f"{FLOOR}, {tile}": [partial(read_only, problem, tile)] * calls for tile in floors}
    timings = harness.time_interleaved(work, replays=replays, min_us=SAMPLE_US)
    tiles = [name for name in timings if name.startswith(FLOOR)]
    if tiles:
        fastest = min(tiles, key=lambda name: timings[name].us)
        timings = {name: t for name, t in timings.items() if name not in tiles} | {FLOOR: timings[fastest]}
    return timings


def summarise(timings: dict[str, harness.Timing]) -> dict[str, Any]:
    """Ratios of one row: what KvSplit wins over both serial forms, and how far the policy is from the best."""
    plain = {name: timing for name, timing in timings.items() if "dependent" not in name and name != FLOOR}
    candidates = {name: timing for name, timing in plain.items() if name != "policy"}
    best = min(candidates, key=lambda name: candidates[name].us)
    return {
        "best": best,
        "whole_row_over_policy": round(harness.ratio(timings["serial, whole row"], timings["policy"]), 3),
        "best_serial_over_policy": round(harness.ratio(timings["serial, best"], timings["policy"]), 3),
        "policy_over_best": round(harness.ratio(timings["policy"], timings[best]), 3),
    }


def run(args: argparse.Namespace) -> list[dict]:
    """Rows: one per (partials dtype, epilogue, batch, partials, variant), with the row's ratios on the policy's
    line."""
    gc.freeze()  # torch.cuda.graph collects garbage at every capture, and there are hundreds
    batches = args.tokens or BATCHES
    counts = scenarios()
    pool = torch.randn(max(counts) * max(batches) * HEADS * HEAD_DIM, device="cuda")
    rows: list[dict] = []
    for quantise in (False, True):
        for tokens in batches:
            for count, contexts in counts.items():
                problem = make_problem(count, tokens * HEADS, torch.float32, pool)
                timings = measure(problem, quantise, args.replays)
                decision = merge.decide(problem.partials, None, epilogue=quantise)
                for name, timing in timings.items():
                    row = {
                        "shape": f"{count} partials" + (", RoPE + FP8" if quantise else ""),
                        "contexts": ", ".join(contexts),
                        "partials": count,
                        "epilogue": quantise,
                        "T": tokens,
                        "variant": name,
                        **timing.row(),
                    }
                    if name == "policy":
                        row |= summarise(timings)
                        row |= {
                            "kv_split": decision.kv_split,
                            "width": decision.width,
                            "warps": decision.num_warps,
                            "reason": decision.reason,
                        }
                    rows.append(row)
            harness.free()
    return rows
