# SPDX-License-Identifier: Apache-2.0
"""Standalone inverse RoPE + FP8 quantisation: the launch layout chosen by default, with and without dependent launch,
some other layouts, vLLM's kernel where it is importable, and a stand-in for it (see benchmarks/peers.py).

Inputs rotate through more memory than the L2 holds, except that small token counts fit it whatever one does.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from fusion_pass.kernels.triton import rope_quant

from benchmarks import harness, peers
from benchmarks.shapes import SHAPES, rotation

TOKENS = (1, 4, 16, 64, 128, 256, 1024, 4096)
# (tokens, warps, channels) per program
TILES = ((1, 1, 512), (1, 4, 512), (2, 1, 512), (4, 2, 512), (4, 4, 512))
CALLS = 12
SAMPLE_US = 600.0  # per sample: an event pair costs microseconds
STAND_IN = "stand-in, one row per warp"
VLLM = "vLLM"


def dequantised(codes: torch.Tensor, scales: torch.Tensor, tokens: int) -> torch.Tensor:
    """[G, T, K] in float32 from codes [G, T, K] and scales [G, K/128, M]."""
    return codes.float() * scales[..., :tokens].transpose(1, 2).repeat_interleave(128, -1)


def run(args: argparse.Namespace) -> list[dict]:
    """Rows: one per (shape, tokens, variant); `ratio`: the stand-in over this variant, `vLLM / this`: vLLM over it."""
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
            outs = [
                rope_quant.inverse_rope_quant(inputs[0], cos, sin, shape.groups) for _ in range(sets)
            ]
            tile = rope_quant.layout(tokens, shape.heads, shape.head_dim)
            names = {"default": (tile, None), "default, plain launch": (tile, False)}
            names |= {f"{t} tokens, {w} warps": ((t, w, c), False) for t, w, c in TILES if t <= tokens}
            calls = [(inputs[i % sets], outs[i % sets]) for i in range(max(CALLS, sets))]
            work = {
                name: [
                    partial(rope_quant.inverse_rope_quant, o, cos, sin, shape.groups, out=out, tile=layout, pdl=pdl)
                    for o, out in calls
                ]
                for name, (layout, pdl) in names.items()
            }
            work[STAND_IN] = [
                partial(peers.row_per_warp_quant, o, cos, sin, shape.groups, *out) for o, out in calls
            ]
            vllm = peers.vllm_quantisation(cos, sin, shape.groups)
            if vllm is not None:
                codes, scales = vllm(inputs[0])
                expected, wanted = rope_quant.inverse_rope_quant(inputs[0], cos, sin, shape.groups, scale_rule="ue8m0")
                error = harness.norm_error(dequantised(codes, scales, tokens), dequantised(expected, wanted, tokens))
                if error > 2e-2:
                    raise AssertionError(f"vLLM's kernel, {tokens} tokens: differs by {error:.2e}")
                work[VLLM] = [partial(vllm, o) for o, _ in calls]
            timings = harness.time_interleaved(work, replays=args.replays, min_us=SAMPLE_US)
            best = min(timings, key=lambda name: timings[name].us)
            for name, timing in timings.items():
                rows.append(
                    {
                        "shape": shape.name,
                        "T": tokens,
                        "variant": name,
                        **timing.row(),
                        "ratio": round(harness.ratio(timings[STAND_IN], timing), 3),
                        **({"vLLM / this": round(harness.ratio(timings[VLLM], timing), 3)} if VLLM in timings else {}),
                        "over_best": round(harness.ratio(timing, timings[best]), 3),
                        "of_bandwidth": round(harness.roofline(timing.us, nbytes=3 * elements, flops=0, peaks=peaks),
                        3),
                    }
                )
            del inputs, outs, calls, work
            harness.free()
    return rows
