"""Attention alone: our kernel with each epilogue, FlashMLA over bf16 rows and over FP8 pages."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch

from benchmarks import harness, inputs, peers
from benchmarks.inputs import AttentionInputs
from benchmarks.shapes import SHAPES, Shape

TOKENS = {"pro": (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 2048, 4096), "flash": (1, 8, 64, 256, 2048)}


def op_calls(x: AttentionInputs, groups: int) -> dict[str, harness.Call]:
    """Our three ops on one input set."""
    ops = torch.ops.fusion_pass
    pools = {"extra_kv": x.extra_kv, "extra_indices": x.extra_indices}
    first = (x.q, x.kv, x.indices, x.sink)
    rope = (x.cos, x.sin, x.scale, groups)
    return {
        "fusion_pass, bf16 out": partial(ops.attention_gathered, *first, x.scale, **pools),
        "fusion_pass, inverse RoPE": partial(ops.attention_gathered_rope, *first, *rope, **pools),
        "fusion_pass, inverse RoPE + FP8": partial(
            ops.attention_gathered_rope_quant, *first, *rope, 128, "ue8m0", 1e-10, False, **pools
        ),
    }


def paged_call(x: AttentionInputs, pages: torch.Tensor, extra_pages: torch.Tensor, groups: int) -> harness.Call:
    """Our op over FP8 pages of both pools."""
    size = inputs.PAGE_ROWS
    return partial(
        torch.ops.fusion_pass.attention_paged_fp8_rope_quant,
        x.q, pages, x.indices, x.sink, x.cos, x.sin, x.scale, groups, size, 128, "ue8m0", 1e-10, False,
        extra_pages=extra_pages, extra_indices=x.extra_indices, extra_page_size=size,
    )  # fmt: skip


def variants(shape: Shape, tokens: int, use_peers: bool) -> dict[str, list[harness.Call]]:
    """Calls of every variant over rotating pools and queries."""
    import fusion_pass.kernels.ops  # noqa: F401  (registers the ops)

    count = 6 if tokens <= 256 else 3
    pools = [inputs.pools(2) for _ in range(3)]
    xs = [inputs.attention_inputs(shape, tokens, *pools[i % 3]) for i in range(count)]
    each = [op_calls(x, shape.groups) for x in xs]
    calls = {name: [one[name] for one in each] for name in each[0]}
    pages = [tuple(inputs.fp8_pages(kv) for kv in p) for p in pools] if tokens <= 256 else []
    if pages:
        calls["fusion_pass, FP8 KV, inverse RoPE + FP8"] = [
            paged_call(x, *pages[i % 3], shape.groups) for i, x in enumerate(xs)
        ]
    mla = peers.flash_mla() if use_peers else None
    if mla is not None:
        joined = [torch.cat(p) for p in pools]
        calls["FlashMLA, bf16 KV"] = [peers.flash_mla_bf16(mla, x, joined[i % 3]) for i, x in enumerate(xs)]
        if pages:
            calls["FlashMLA, FP8 KV"] = [peers.flash_mla_fp8(mla, x, *pages[i % 3]) for i, x in enumerate(xs)]
    return calls


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per shape, token count and variant; `epilogue cost` is relative to our kernel writing bf16."""
    peaks = harness.ceilings()
    rows = []
    for name in args.shapes:
        shape = SHAPES[name]
        for tokens in args.tokens or TOKENS[name]:
            timings = harness.time_interleaved(variants(shape, tokens, not args.no_peers), replays=args.replays)
            flops = 4.0 * tokens * shape.heads * shape.keys * shape.head_dim
            plain = timings["fusion_pass, bf16 out"]
            for variant, timing in timings.items():
                key_bytes = 584 if "FP8 KV" in variant else 1024
                out_bytes = 1 if variant.endswith("FP8") else 2
                moved = tokens * (shape.keys * key_bytes + shape.heads * shape.head_dim * (2 + out_bytes))
                row = {"shape": name, "T": tokens, "variant": variant, **timing.row()}
                row["TFLOP/s"] = round(flops / timing.us * 1e-6, 1)
                row["roofline"] = round(harness.roofline(timing.us, nbytes=moved, flops=flops, peaks=peaks), 3)
                if variant.startswith("fusion_pass") and "FP8 KV" not in variant:
                    row["epilogue cost"] = round(1 / harness.ratio(plain, timing) - 1, 4)
                rows.append(row)
            harness.free()
    return rows
