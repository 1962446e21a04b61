"""FP8 grouped GEMM of the output projection: ours (on a weight that nobody writes, as the pass says of a model's),
DeepGEMM's fp8_einsum, a bf16 torch.bmm, and a pure weight read."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks import harness, inputs, peers
from benchmarks.shapes import SHAPES, Shape, rotation

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)


READ = "weight read"
STREAMING = 16  # tokens up to which the weight's stream is what there is to beat
READ_SHAPES = ((2048, 4), (4096, 4), (4096, 8), (8192, 8))  # (words, warps) per program; the fastest is the ceiling


@triton.jit
def _read(words, BLOCK: tl.constexpr):
    """Reads every word; the store, which keeps the compiler from dropping the loads, practically never happens."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(words + place)
    tl.store(words + place, value, mask=value == 0x7F7F7F7F)


def read_bytes(x: Tensor, block: int, warps: int) -> None:
    """Read a contiguous tensor once, nothing else: the ceiling of a kernel that streams it."""
    words = x.view(torch.int32).view(-1)
    _read[(words.numel() // block,)](words, BLOCK=block, num_warps=warps)


def variants(shape: Shape, tokens: int, use_peers: bool) -> dict[str, list[harness.Call]]:
    """Calls of every variant on rotating weights; all results are checked against float32 first."""
    import fusion_pass.kernels.ops  # noqa: F401  (registers the ops)

    groups, rank, width = shape.groups, shape.rank, shape.group_width
    count = rotation(groups * rank * width, target=420e6)
    weights = [inputs.projection(shape) for _ in range(count)]
    codes, scales = inputs.quantised_rows(groups, tokens, width)
    out = torch.empty(tokens, groups, rank, device="cuda", dtype=torch.bfloat16)
    op = torch.ops.fusion_pass.fp8_bgemm
    calls: dict[str, list[harness.Call]] = {
        "fusion_pass": [partial(op, codes, scales, w.weight, w.scales, weight_ready=True) for w in weights]
    }
    first = weights[0]
    module = peers.deep_gemm() if use_peers else None
    if module is not None:
        calls["DeepGEMM"] = [peers.deep_gemm_bgemm(module, codes, scales, w.weight, w.scales, out) for w in weights]
    for block, warps in READ_SHAPES if tokens <= STREAMING else ():
        calls[f"{READ} {block}, {warps}"] = [partial(read_bytes, w.weight, block, warps) for w in weights]
    x = torch.randn(groups, tokens, width, device="cuda", dtype=torch.bfloat16)
    wide = [torch.randn(groups, rank, width, device="cuda", dtype=torch.bfloat16).mT for _ in range(max(2, count // 2))]
    calls["torch.bmm, bf16"] = [partial(torch.bmm, x, w) for w in wide]
    reference = dequantised_product(codes, scales, first)
    for name, variant in calls.items():
        if name.startswith(("torch", READ)):
            continue
        result = variant[0]()
        error = harness.norm_error(out if result is None else result, reference)
        if error > 3e-3:
            raise AssertionError(f"{name}, {shape.name}, {tokens} tokens: error {error:.2e} against float32")
    return calls


def dequantised_product(codes: torch.Tensor, scales: torch.Tensor, weights: inputs.Projection) -> torch.Tensor:
    """[T, G, R] in float32 from dequantised operands."""
    groups, tokens, width = codes.shape
    x = codes.float().view(groups, tokens, -1, 128) * scales[..., :tokens].transpose(1, 2).unsqueeze(-1)
    w = weights.weight.float().view(groups, -1, 128, width // 128, 128) * weights.scales[:, :, None, :, None]
    return torch.einsum("gtk,grk->tgr", x.reshape(groups, tokens, width), w.reshape(groups, -1, width))


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per shape, token count and variant."""
    torch.backends.cuda.matmul.allow_tf32 = False
    peaks = harness.ceilings()
    rows = []
    for name in args.shapes:
        shape = SHAPES[name]
        weight_bytes = shape.groups * shape.rank * shape.group_width
        for tokens in args.tokens or TOKENS:
            timings = harness.time_interleaved(variants(shape, tokens, not args.no_peers), replays=args.replays)
            reads = [name for name in timings if name.startswith(READ)]
            read = min((timings.pop(name) for name in reads), key=lambda timing: timing.us, default=None)
            if read is not None:
                timings[READ] = read
            flops = 2.0 * tokens * weight_bytes
            for variant, timing in timings.items():
                if variant == READ:
                    rows.append({"shape": name, "T": tokens, "variant": variant, **timing.row(), "bytes": weight_bytes})
                    continue
                wide = variant.startswith("torch")
                moved = weight_bytes * (2 if wide else 1) + tokens * shape.groups * (
                    shape.group_width * (2 if wide else 1) + 2 * shape.rank
                )
                fraction = harness.roofline(
                    timing.us, nbytes=moved, flops=flops, peaks=peaks, flop_scale=1.0 if wide else 2.0
                )
                row = {"shape": name, "T": tokens, "variant": variant, **timing.row(), "roofline": round(fraction, 3)}
                row |= {"bytes": moved, "flops": flops}
                if read is not None:
                    row[f"{READ} / this"] = round(harness.ratio(read, timing), 3)
                if "DeepGEMM" in timings:
                    row["DeepGEMM / this"] = round(harness.ratio(timings["DeepGEMM"], timing), 3)
                rows.append(row)
            harness.free()
    return rows
