"""The whole chain, attention -> inverse RoPE -> FP8 quantisation -> grouped GEMM, in one CUDA graph per variant.

Ours: the two ops as the pass emits them, which says of a model's weight that nobody writes it, and for many tokens also
with DeepGEMM as the product's backend, which is used only where it is installed and asked for. The same chain in
torch's own operations, unfused and compiled by plain Inductor (unfused.py). Peers: FlashMLA (sparse decode over FP8
pages, and sparse forward over bf16 rows), vLLM's rotation + quantisation kernel (where it is not importable a stand-in,
see peers.py; each row says which), DeepGEMM's fp8_einsum. Every variant is checked against float64 before it is timed.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks import harness, inputs, peers, unfused
from benchmarks.inputs import AttentionInputs, Projection
from benchmarks.shapes import SHAPES, Shape

TOKENS = {"pro": (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 2048, 4096), "flash": (1, 8, 64, 256)}
CHECKED = 3  # tokens compared with float64
ERROR_LIMIT = 4.5e-2  # E4M3 activations; the unfused chain with bf16 in between has 2.7e-2


def ours(x: AttentionInputs, w: Projection, groups: int) -> Tensor:
    """[T, G, R]: the two ops that the pass puts in place of the chain."""
    codes, scales = torch.ops.fusion_pass.attention_gathered_rope_quant(
        x.q,
        x.kv,
        x.indices,
        x.sink,
        x.cos,
        x.sin,
        x.scale,
        groups,
        128,
        "ue8m0",
        1e-10,
        False,
        extra_kv=x.extra_kv,
        extra_indices=x.extra_indices,
    )
    return torch.ops.fusion_pass.fp8_bgemm(codes, scales, w.weight, w.scales, weight_ready=True)


def ours_with_deep_gemm(x: AttentionInputs, w: Projection, groups: int) -> Tensor:
    """The same ops with DeepGEMM as the product's backend, as a user asks for it."""
    from fusion_pass.kernels.gluon import deepgemm

    with mock.patch.dict(os.environ, {deepgemm.SWITCH: "deepgemm"}):
        return ours(x, w, groups)


def ours_fp8(x: AttentionInputs, pages: Tensor, extra_pages: Tensor, w: Projection, groups: int) -> Tensor:
    """[T, G, R] from FP8 pages of both pools."""
    codes, scales = torch.ops.fusion_pass.attention_paged_fp8_rope_quant(
        x.q,
        pages,
        x.indices,
        x.sink,
        x.cos,
        x.sin,
        x.scale,
        groups,
        inputs.PAGE_ROWS,
        128,
        "ue8m0",
        1e-10,
        False,
        extra_pages=extra_pages,
        extra_indices=x.extra_indices,
        extra_page_size=inputs.PAGE_ROWS,
    )
    return torch.ops.fusion_pass.fp8_bgemm(codes, scales, w.weight, w.scales, weight_ready=True)


def theirs(
    attention: harness.Call, quantise: peers.Quantisation, gemm: Any, x: AttentionInputs, w: Projection
) -> Tensor:
    """[T, G, R]: attention from FlashMLA, then the quantisation kernel, then DeepGEMM."""
    codes, scales = quantise(attention())
    groups, tokens, _ = codes.shape
    out = torch.empty(tokens, groups, w.weight.shape[1], device=codes.device, dtype=torch.bfloat16)
    peers.deep_gemm_bgemm(gemm, codes, scales, w.weight, w.scales, out)()
    return out


def reference(x: AttentionInputs, w: Projection, groups: int, tokens: list[int]) -> Tensor:
    """[len(tokens), G, R] in float64."""
    rows = []
    for t in tokens:
        extra = x.extra_indices[t]
        kv = torch.cat([x.kv[x.indices[t].long()], x.extra_kv[extra[extra >= 0].long()]]).double()
        scores = torch.cat([x.q[t].double() @ kv.T * x.scale, x.sink.double()[:, None]], 1)
        o = scores.softmax(1)[:, :-1] @ kv
        even, odd = o[:, 448::2].clone(), o[:, 449::2].clone()
        cos, sin = x.cos[t].double(), x.sin[t].double()
        o[:, 448::2], o[:, 449::2] = even * cos + odd * sin, odd * cos - even * sin
        rows.append(o.view(groups, -1))
    rank, width = w.weight.shape[1:]
    blocks = w.weight.double().view(groups, rank // 128, 128, width // 128, 128)
    weight = (blocks * w.scales.double()[:, :, None, :, None]).view(groups, rank, width)
    return torch.einsum("tgk,grk->tgr", torch.stack(rows), weight)


def variants(shape: Shape, tokens: int, use_peers: bool, use_torch: bool = False) -> dict[str, list[harness.Call]]:
    """Calls of every variant over rotating pools, queries and weights."""
    import fusion_pass.kernels.ops  # noqa: F401  (registers the ops)
    from fusion_pass.kernels.tuning import bgemm as tuning

    count = 6 if tokens <= 256 else 3
    pools = [inputs.pools(2) for _ in range(3)]
    xs = [inputs.attention_inputs(shape, tokens, *pools[i % 3]) for i in range(count)]
    ws = [inputs.projection(shape) for _ in range(6 if shape.name == "pro" else 12)]
    groups = shape.groups
    cases = [(xs[i % count], ws[i % len(ws)], i % 3) for i in range(max(count, len(ws) if tokens <= 256 else 3))]
    calls: dict[str, list[harness.Call]] = {"fusion_pass, bf16 KV": [partial(ours, x, w, groups) for x, w, _ in cases]}
    pages = [tuple(inputs.fp8_pages(kv) for kv in p) for p in pools] if tokens <= 256 else []
    if pages:
        calls["fusion_pass, FP8 KV"] = [partial(ours_fp8, x, *pages[k], w, groups) for x, w, k in cases]
    mla, gemm = (peers.flash_mla(), peers.deep_gemm()) if use_peers else (None, None)
    if gemm is not None and tokens >= tuning.DEEPGEMM_TOKENS:
        calls["fusion_pass, bf16 KV, DeepGEMM product"] = [
            partial(ours_with_deep_gemm, x, w, groups) for x, w, _ in cases
        ]
    if mla is not None and gemm is not None:
        joined = [torch.cat(p) for p in pools]
        quantise = [peers.quantisation(x.cos, x.sin, groups) for x, _, _ in cases]
        calls["peers, bf16 KV"] = [
            partial(theirs, peers.flash_mla_bf16(mla, x, joined[k]), quant, gemm, x, w)
            for (x, w, k), quant in zip(cases, quantise, strict=True)
        ]
        if pages:
            calls["peers, FP8 KV"] = [
                partial(theirs, peers.flash_mla_fp8(mla, x, *pages[k]), quant, gemm, x, w)
                for (x, w, k), quant in zip(cases, quantise, strict=True)
            ]
    if use_torch:
        for name, function in (("torch, unfused", unfused.unfused), ("torch, Inductor", unfused.with_inductor())):
            calls[name] = [partial(unfused.call, function, x, w) for x, w, _ in cases]
    checked = sorted({0, tokens // 2, tokens - 1})[:CHECKED]
    expected = reference(*cases[0][:2], groups, checked)
    for name, variant in calls.items():
        error = harness.norm_error(variant[0]()[checked], expected)
        if error > ERROR_LIMIT:
            raise AssertionError(f"{name}, {shape.name}, {tokens} tokens: error {error:.2e} against float64")
    return calls


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per shape, token count and variant; `best peer / this` compares with the fastest peer of the row."""
    peaks = harness.ceilings()
    rows = []
    for name in args.shapes:
        shape = SHAPES[name]
        weight_bytes = shape.groups * shape.rank * shape.group_width
        for tokens in args.tokens or TOKENS[name]:
            calls = variants(shape, tokens, not args.no_peers, not args.no_torch)
            # Torch's own take ten times as long and leave the caches and the GPU's clock to what follows: apart.
            slow = {name: calls.pop(name) for name in [*calls] if name.startswith("torch")}
            timings = harness.time_interleaved(calls, replays=args.replays)
            timings |= harness.time_interleaved(slow, replays=args.replays)
            best = min((k for k in timings if k.startswith("peers")), key=lambda k: timings[k].us, default=None)
            attention_flops = 4.0 * tokens * shape.heads * shape.keys * shape.head_dim
            gemm_flops = 2.0 * tokens * weight_bytes
            for variant, timing in timings.items():
                key_bytes = 584 if "FP8" in variant else 1024
                moved = weight_bytes + tokens * (
                    shape.keys * key_bytes + shape.heads * shape.head_dim * 2 + shape.groups * shape.rank * 2
                )
                # FP8 tensor cores count double: express all FLOPs in bf16's rate
                fraction = harness.roofline(
                    timing.us, nbytes=moved, flops=attention_flops + gemm_flops / 2, peaks=peaks
                )
                row = {"shape": name, "T": tokens, "variant": variant, **timing.row(), "roofline": round(fraction, 3)}
                row |= {"bytes": moved, "flops": attention_flops + gemm_flops}
                if variant.startswith("peers"):
                    row["quantisation"] = "vLLM" if peers.vllm_quant() is not None else "stand-in"
                if best is not None:
                    row["best peer / this"] = round(harness.ratio(timings[best], timing), 3)
                if "peers, FP8 KV" in timings and variant == "fusion_pass, FP8 KV":
                    row["FP8 peer / this"] = round(harness.ratio(timings["peers, FP8 KV"], timing), 3)
                rows.append(row)
            print(*rows[-len(timings) :], sep="\n", flush=True)
            harness.free()
    return rows
