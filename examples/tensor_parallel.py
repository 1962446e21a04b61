"""Tensor parallelism: transformers' DeepSeek-V4 with heads and output groups split over ranks, each rank compiled.

Two CPU ranks over gloo, a small model in float32:

    torchrun --standalone --nproc-per-node 2 examples/tensor_parallel.py --inner aot_eager

Two GPUs over NCCL, a slice of V4-Flash, with timings and CUDA graphs:

    torchrun --standalone --nproc-per-node 2 examples/tensor_parallel.py --size flash --prefill 2048 8192 \
        --decode 1 32 --cuda-graph --json out.json

The model is split by ``fusion_pass.models.split_attention``: nothing else is special about it. Rank 0 prints what was
fused on every rank and how far the logits are from those of the whole model on one rank.
"""

import argparse
import contextlib
import copy
import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

import fusion_pass
from fusion_pass.models import (
    cache_argument,
    cache_tensors,
    filled_cache,
    random_deepseek_v4,
    replace_grouped_linear,
    split_attention,
)

KINDS = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
CHAIN = {"bf16": ("fmha", "inverse_rope", "bgemm"), "fp8": ("fmha", "inverse_rope", "fp8_quant", "bgemm")}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="tiny", choices=("tiny", "flash"))
    parser.add_argument("--form", default="bf16", choices=("bf16", "fp8"), help="of the grouped projection")
    parser.add_argument("--dtype", help="default: float32 on CPUs, bfloat16 on GPUs")
    parser.add_argument("--layers", nargs="+", default=list(KINDS), choices=KINDS, help="kinds of layer (default: all)")
    parser.add_argument("--heads", type=int, help="attention heads of the whole model")
    parser.add_argument("--o-groups", type=int, help="output groups of the whole model")
    parser.add_argument("--split-groups", action="store_true", help="split a group if need be: right, but not fused")
    parser.add_argument("--tokens", type=int, default=48, help="prompt of the comparison with the whole model; 0: none")
    parser.add_argument("--inner", default="inductor", choices=("inductor", "aot_eager", "eager"))
    parser.add_argument("--prefill", type=int, nargs="*", default=[], help="prompt lengths to time")
    parser.add_argument("--decode", type=int, nargs="*", default=[], help="batch sizes of decode steps to time")
    parser.add_argument("--context", type=int, default=2048, help="tokens in the cache of a decode step")
    parser.add_argument("--cuda-graph", action="store_true", help="time captured calls too, collectives inside")
    parser.add_argument("--json", help="write all figures to this file")
    return parser.parse_args()


def start() -> torch.device:
    """Join the process group: NCCL with a GPU per rank, else gloo."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        return device
    dist.init_process_group("gloo")
    return torch.device("cpu")


def build(args: argparse.Namespace, device: torch.device) -> torch.nn.Module:
    """The whole model, the same on every rank (weights from one seed)."""
    sizes = {"num_attention_heads": args.heads, "o_groups": args.o_groups}
    dtype = getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    model = random_deepseek_v4(
        args.size, layer_types=args.layers, dtype=dtype, device=device,
        experts="grouped_mm" if device.type == "cuda" else "batched_mm", **{k: v for k, v in sizes.items() if v})
    if args.form == "fp8":
        replace_grouped_linear(model)
    return model


def compiled(model: torch.nn.Module, variant: str, args: argparse.Namespace):
    """``variant``: "fusion_pass" or plain "inductor". Code that was compiled before is dropped."""
    torch._dynamo.reset()
    if variant == "inductor":
        return torch.compile(model, fullgraph=True)
    return torch.compile(model, backend="fusion_pass", fullgraph=True, options={"inner": args.inner})


def difference(logits: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((logits.double() - wanted.double()).norm() / wanted.double().norm()).item()


def compare(args, whole, split, device) -> dict:
    """Logits of the split model against the whole one on one rank, both compiled, and both against float64."""
    ids = torch.randint(0, whole.config.vocab_size, (1, args.tokens), generator=torch.Generator().manual_seed(1))
    ids = ids.to(device)
    known = len(fusion_pass.reports())
    ours = compiled(split, "fusion_pass", args)(ids, use_cache=False).logits
    reports = fusion_pass.reports()[known:]
    mine = {"fused": [c.roles for r in reports for c in r.fused], "gated": [c.gate for r in reports for c in r.gated],
            "near_misses": [m.reason for r in reports for m in r.near_misses]}
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    figures = {"tokens": args.tokens, "ranks": ranks}
    if dist.get_rank() == 0:
        one_rank = compiled(whole, "fusion_pass", args)(ids, use_cache=False).logits
        exact = copy.deepcopy(whole).double()
        exact.config._experts_implementation = "eager"      # the only one of transformers' that takes float64
        exact = exact(ids, use_cache=False).logits
        figures |= {"split_to_one_rank": difference(ours, one_rank), "split_to_float64": difference(ours, exact),
                    "one_rank_to_float64": difference(one_rank, exact)}
    dist.barrier()
    return figures


def timed(call, device, repeats: int = 7) -> float:
    """Median milliseconds of ``call``, after one call that is not counted."""
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize(device) if device.type == "cuda" else None
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize(device) if device.type == "cuda" else None
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times[1:])


def captured_ms(call, inputs, device) -> tuple[float, torch.Tensor]:
    """Milliseconds of a replay of ``call(**inputs)`` as one CUDA graph, and its logits. Other threads (NCCL's watchdog)
    may use CUDA meanwhile, hence the capture mode. What the graph reads has to stay, though a step takes it out of its
    cache.
    """
    cache = inputs.get("cache", inputs.get("past_key_values"))
    held = [] if cache is None else cache_tensors(cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = call(**inputs).logits
    milliseconds = timed(graph.replay, device)
    result = result.clone()
    graph.reset()
    held.clear()
    return milliseconds, result


def phases(args, model, device):
    """(name, T, batch, function that returns a call's arguments) of everything to time."""
    generator = torch.Generator().manual_seed(2)
    vocabulary = model.config.vocab_size
    for tokens in args.prefill:
        ids = torch.randint(0, vocabulary, (1, tokens), generator=generator).to(device)
        yield "prefill", tokens, 1, lambda ids=ids: {"input_ids": ids, "use_cache": False}
    for batch in args.decode:
        ids = torch.randint(0, vocabulary, (batch, args.context), generator=generator).to(device)
        cache = filled_cache(model, ids)
        yield "decode", 1, batch, lambda ids=ids, cache=cache: {
            "input_ids": ids[:, -1:], "use_cache": True, **cache_argument(model, copy.deepcopy(cache))}


def timings(args, model, device, variants, ranks: int) -> list[dict]:
    """A row per phase and variant: eager call of the compiled code, and replay of its CUDA graph."""
    rows = []
    for phase, tokens, batch, arguments in phases(args, model, device):
        results = {}
        for variant in variants:
            call = compiled(model, variant, args)
            inputs = [arguments() for _ in range(12)]       # a step changes its cache
            known = len(fusion_pass.reports())
            milliseconds = timed(lambda call=call, inputs=inputs: call(**inputs.pop()).logits, device)
            row = {"ranks": ranks, "variant": variant, "phase": phase, "T": tokens, "batch": batch,
                   "ms": round(milliseconds, 3), "rank": dist.get_rank(),
                   "fused": sum(len(r.fused) for r in fusion_pass.reports()[known:])}
            results[variant] = call(**inputs.pop()).logits
            if args.cuda_graph:
                try:
                    graph_ms, result = captured_ms(call, inputs.pop(), device)
                    row |= {"graph_ms": round(graph_ms, 3), "graph_to_plain": difference(result, results[variant])}
                except RuntimeError as error:           # the other figures are worth having all the same
                    row["graph_error"] = str(error)[:300]
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
        if len(results) == 2:
            rows[-1]["variants_differ"] = difference(*results.values())
    return rows


def main() -> int:
    args = parse()
    device = start()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    whole = build(args, device)
    split = copy.deepcopy(whole)
    try:
        split_attention(split, rank, world_size, split_groups=args.split_groups)
    except ValueError as error:
        if rank == 0:
            print(f"refused: {error}")
        dist.destroy_process_group()
        return 3
    with torch.no_grad():
        figures = compare(args, whole, split, device) if args.tokens else {"ranks": []}
        rows = timings(args, split, device, ("fusion_pass", "inductor"), world_size)
        if args.prefill or args.decode:
            # One GPU each, side by side: the first with the pass, the second without.
            alone = [v for number, v in enumerate(("fusion_pass", "inductor")) if number % world_size == rank]
            rows += timings(args, whole, device, alone, 1)
    everybody = [None] * world_size
    dist.all_gather_object(everybody, rows)
    wrong = 0
    if rank == 0:
        figures["environment"] = {"torch": torch.__version__, "ranks": world_size, "device": (
            torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu")}
        figures["timings"] = [row for rows in everybody for row in rows if row["ranks"] == 1 or row["rank"] == 0]
        for number, found in enumerate(figures["ranks"]):
            whole_chains = sum(tuple(roles) == CHAIN[args.form] for roles in found["fused"])
            print(f"rank {number}: {whole_chains} of {len(args.layers)} layers fused", *found["gated"],
                  *found["near_misses"], sep="\n  ")
            wrong += whole_chains < len(args.layers)
        if args.tokens:
            print(f"logits: split against one rank {figures['split_to_one_rank']:.2e}, "
                  f"against float64 {figures['split_to_float64']:.2e} (one rank: {figures['one_rank_to_float64']:.2e})")
        with contextlib.ExitStack() as stack:
            if args.json:
                json.dump(figures, stack.enter_context(open(args.json, "w")), indent=1)
    dist.destroy_process_group()
    return 1 if wrong and not args.split_groups else 0


if __name__ == "__main__":
    sys.exit(main())
