# SPDX-License-Identifier: Apache-2.0
"""One decode step of transformers' DeepSeek-V4 (a 4-layer slice of V4-Flash, random weights) as a CUDA graph: captured
by hand, and by ``mode="reduce-overhead"``; plain Inductor against Inductor with the pass.

Every case compiles in a process of its own, all at the same time; then they are timed one after the other, alone on the
GPU. A row holds the time of a step, the number of Inductor's graph partitions, and the distance from eager's logits.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks import harness, processes
from benchmarks import model as slices
from benchmarks.kernel_profile import kernel_profile

BATCHES = (1, 8)
CONTEXT = 2048
VARIANTS = ("inductor", "fusion_pass")
# How the graph comes about: by hand, by Inductor's mode, by the same mode among the options.
WAYS = ("captured", "reduce-overhead", "options")
STEPS = 20


Case = tuple[int, str, str]  # batch, variant, way


def run(args: argparse.Namespace) -> list[dict]:
    """Rows: batch, variant, way, ms (median), partitions, fused, difference_from_eager; ``tokens`` are the batches.

    With ``--profile``: of the graphs captured by hand, the number of kernels and the sums of their times by category.
    """
    cases = [
        case
        for case in itertools.product(args.tokens or BATCHES, VARIANTS, WAYS)
        if case[1:] != ("inductor", "options") and not (case[0] != BATCHES[0] and case[2] == "options")
    ]
    rows = []
    for case, found in zip(cases, processes.run_cases(partial(prepare, args.profile), cases, go=args.go), strict=True):
        rows += found if isinstance(found, list) else [{**_labels(case), "failed": found}]
    rows.sort(key=lambda row: (row["batch"], row["way"], row["variant"] == "fusion_pass"))
    plain = {(r["batch"], r["way"]): r["ms"] for r in rows if r["variant"] == "inductor" and "ms" in r}
    for row in rows:
        base = plain.get((row["batch"], "reduce-overhead" if row["way"] == "options" else row["way"]))
        if base and "ms" in row:
            row["relative_to_inductor"] = round(row["ms"] / base, 3)
    return rows


def _labels(case: Case) -> dict[str, Any]:
    batch, variant, way = case
    return {"batch": batch, "T": batch, "shape": f"flash decode, {way}", "variant": variant, "way": way}


def prepare(profile: bool, case: Case, alone: Any) -> processes.Timing:
    """Compile a case; see :func:`processes.run_cases`."""
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    inductor.fx_graph_cache = False  # a graph that comes from a cache counts no partitions
    functorch.enable_autograd_cache = False
    row = _labels(case)
    with torch.no_grad():
        with alone:  # weights are in float32 at first
            model = slices.build("bf16")
            harness.free()
        time_it = prepare_step(model, *case, row, alone=alone, profile=profile)

    def timing() -> list[dict[str, Any]]:
        with torch.no_grad():
            time_it()
        return [row]

    return timing


def prepare_step(
    model: torch.nn.Module,
    batch: int,
    variant: str,
    way: str,
    row: dict[str, Any],
    context: int = CONTEXT,
    alone: Any = None,
    profile: bool = False,
) -> Callable[[], None]:
    """Compile a step and run it; the function that is returned times it and completes ``row``. ``alone``: lock for what
    takes much of the GPU's memory."""
    import fusion_pass
    from fusion_pass.models import cache_argument, cache_tensors, filled_cache

    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (batch, context), generator=generator).to(device)
    with alone or contextlib.nullcontext():
        filled = filled_cache(model, ids)
        harness.free()
    token = ids[:, :1].contiguous()
    eager = model(token, use_cache=True, **cache_argument(model, copy.deepcopy(filled))).logits
    partitions = count_partitions()
    call = _compiled(model, variant, way)

    held: list[torch.Tensor] = []

    def step() -> Callable[[], torch.Tensor]:
        cache = copy.deepcopy(filled)  # a step changes its cache
        held[:] = cache_tensors(cache)  # a captured step goes on reading what it took out of the cache
        return lambda: call(token, use_cache=True, **cache_argument(model, cache)).logits

    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        logits = step()().clone()
    row["difference_from_eager"] = harness.norm_error(logits, eager)
    row["partitions"] = max(partitions, default=None)
    row["skipped_graphs"] = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    row["fused"] = sum(len(report.fused) for report in fusion_pass.reports())
    harness.free()

    def time_it() -> None:
        if way == "captured":
            once = step()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = once()
            times = _times([graph.replay] * STEPS)
            row["difference_of_graph"] = harness.norm_error(result, logits)
            if profile:
                row.update(kernel_profile(graph.replay))
        else:
            times = _times([step() for _ in range(STEPS)])
        row["ms"] = round(statistics.median(times), 4)
        row["us"] = row["ms"] * 1e3

    return time_it


def _compiled(model: torch.nn.Module, variant: str, way: str) -> Callable[..., Any]:
    mode = None if way in ("captured", "options") else way
    if variant == "inductor":
        return torch.compile(model, fullgraph=True, mode=mode)
    options = {"strict": True} if way != "options" else {"strict": True, "mode": "reduce-overhead"}
    if mode is None:
        return torch.compile(model, backend="fusion_pass", fullgraph=True, options=options)
    return torch.compile(model, backend="fusion_pass", fullgraph=True, mode=mode)


def count_partitions() -> list[int]:
    """A list that gets, for every graph that Inductor compiles from now on in this process, its number of partitions
    that become CUDA graphs."""
    from torch._inductor.scheduler import Scheduler

    counts: list[int] = []
    original = Scheduler.graph_partition

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        counts.append(sum(not signature.skip_cudagraph for signature in result[1]))
        return result

    Scheduler.graph_partition = counting  # type: ignore[method-assign]
    return counts


def _times(calls: list[Callable[[], Any]]) -> list[float]:
    times = []
    for call in calls:
        torch.compiler.cudagraph_mark_step_begin()
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return times[2:]
