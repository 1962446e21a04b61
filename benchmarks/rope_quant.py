# SPDX-License-Identifier: Apache-2.0
"""Standalone inverse RoPE + FP8 quantisation (and inverse RoPE alone): the launch tile chosen by default, every other
tile, and one row per warp, which is the usual form of this kernel.

Inputs rotate through more memory than the L2 holds, except that small token counts fit it whatever one does.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from fusion_pass.kernels.triton import rope_quant

from benchmarks import harness
from benchmarks.shapes import SHAPES, rotation

TOKENS = (1, 4, 16, 64, 128, 256, 1024, 4096)
# (tokens, warps, channels) per program
TILES = (
    *((1, 4, 512), (2, 1, 512), (4, 1, 512), (4, 2, 512)),
    *((4, 1, 128), (8, 1, 128), (16, 1, 128), (16, 2, 128), (4, 1, 256)),
)
CALLS = 12


def run(args: argparse.Namespace) -> list[dict]:
    """Rows: one per (shape, tokens, variant); `ratio` is one row per warp over this variant."""
    rows: list[dict] = []
    peaks = harness.ceilings()
    for shape in (SHAPES[name] for name in args.shapes):
        for tokens in args.tokens or TOKENS:
            elements = tokens * shape.heads * shape.head_dim
            sets = rotation(3 * elements, high=CALLS)
            half = shape.rope_dim // 2
            angle = torch.rand(tokens, half, device="cuda") * 6
            cos, sin = angle.cos(), angle.sin()
            inputs = [torch.randn(tokens, shape.heads, shape.head_dim, device="cuda").bfloat16() for _ in range(sets)]
            outs = [rope_quant.inverse_rope_quant(inputs[0], cos, sin, shape.groups) for _ in range(sets)]
            tile = rope_quant.layout(tokens, shape.heads, shape.head_dim)
            names = {"one row per warp": (1, 1, 512), "default": tile}
            names |= {f"{t} x {c}, {w} warps": (t, w, c) for t, w, c in TILES if t <= tokens}
            work = {
                name: [
                    partial(
                        rope_quant.inverse_rope_quant,
                        inputs[i % sets],
                        cos,
                        sin,
                        shape.groups,
                        out=outs[i % sets],
                        tile=t,
                    )
                    for i in range(max(CALLS, sets))
                ]
                for name, t in names.items()
            }
            timings = harness.time_interleaved(work, replays=args.replays)
            best = min(timings, key=lambda name: timings[name].us)
            for name, timing in timings.items():
                rows.append(
                    {
                        "shape": shape.name,
                        "T": tokens,
                        "variant": name,
                        **timing.row(),
                        "ratio": round(harness.ratio(timings["one row per warp"], timing), 3),
                        "over_best": round(harness.ratio(timing, timings[best]), 3),
                        "of_bandwidth": round(
                            harness.roofline(timing.us, nbytes=3 * elements, flops=0, peaks=peaks), 3
                        ),
                    }
                )
            del inputs, outs, work
            harness.free()
    return rows
