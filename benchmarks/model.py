# SPDX-License-Identifier: Apache-2.0
"""transformers' DeepSeek-V4, a 4-layer slice of V4-Flash with random weights: prefill without a cache and one cached
decode step, plain Inductor against Inductor with the pass (and eager for orientation). Time and peak memory.

Peak memory is the largest amount allocated during a call, above nothing: weights are part of it for every variant.
Every case compiles in a process of its own, all at the same time; then they are timed one after the other.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks import harness, processes

PREFILL = {"bf16": (2048, 8192), "fp8": (2048,)}
DECODE_CONTEXT = 2048
DECODE_BATCH = (1, 8)
REPEATS = 5
DECODE_ROUNDS = 25  # of one step each, variants in turn: the host's noise comes in bursts longer than five steps
LAYERS = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "compressed_sparse_attention",
)
NOTES = {"decode": "without CUDA graphs the host bounds a decode step; the table of decode_graphs has it with them"}

Case = tuple[str, str, int]  # form, phase, tokens (of a prompt, or sequences of one token each)


def run(args: argparse.Namespace) -> list[dict]:
    """Rows: phase, tokens, batch, variant, ms, peak_gib, difference from the eager logits, chains fused. ``tokens`` are
    prompts' lengths; without them decode steps are timed as well."""
    cases = [(form, "prefill", tokens) for form in PREFILL for tokens in args.tokens or PREFILL[form]]
    cases += [] if args.tokens else [("bf16", "decode", batch) for batch in DECODE_BATCH]
    rows: list[dict] = []
    for case, found in zip(cases, processes.run_cases(prepare, cases, go=args.go), strict=True):
        labels = dict(zip(("form", "phase", "T"), case, strict=True))
        rows += found if isinstance(found, list) else [{**labels, "failed": found}]
    return rows


def build(form: str) -> torch.nn.Module:
    """The slice in its ``"bf16"`` or ``"fp8"`` form."""
    from fusion_pass.models import random_deepseek_v4, replace_grouped_linear

    model = random_deepseek_v4("flash", layer_types=LAYERS, device="cuda", experts="grouped_mm")
    if form == "fp8":
        replace_grouped_linear(model, "ue8m0")
    return model


def prepare(case: Case, alone: Any) -> processes.Timing:
    """Compile every variant of a case and compare its logits with eager's; the function that is returned times them."""
    import fusion_pass

    form, phase, tokens = case
    torch._dynamo.config.recompile_limit = 64
    rows: list[dict[str, Any]] = []
    reference = None
    with torch.no_grad():
        with alone:  # eager keeps all attention scores: at 8,192 tokens they are half of the GPU's memory
            model = build(form)  # in float32 at first
            inputs = prompts(model, tokens) if phase == "prefill" else caches(model, tokens)
            reference = model(**next(inputs)).logits
            harness.free()
        variants = _variants(model)
        for name, call in variants.items():
            known = len(fusion_pass.reports())
            logits = reference if name == "eager" else call(**next(inputs)).logits
            fused = [c for report in fusion_pass.reports()[known:] for c in report.fused]
            rows.append(
                {
                    "phase": phase,
                    "form": form,
                    "shape": f"{form} {phase}",
                    "T": tokens,
                    "batch": tokens if phase == "decode" else 1,
                    "variant": name,
                    "difference_from_eager": difference(logits, reference),
                    "fused": ["+".join(chain.roles) for chain in fused],
                }
            )
            if phase in NOTES:
                rows[-1]["note"] = NOTES[phase]
            del logits
    del reference
    harness.free()

    def time_it() -> list[dict[str, Any]]:
        for row in rows:
            with torch.no_grad():
                ms, peak = _timed(variants[row["variant"]], [next(inputs) for _ in range(REPEATS + 1)])
            row |= {"us": ms * 1e3, "ms": round(ms, 3), "peak_gib": round(peak, 2)}
            harness.free()
        if phase == "decode":
            for row, ms in zip(rows, _in_turn([variants[row["variant"]] for row in rows], inputs), strict=True):
                row |= {"us": ms * 1e3, "ms": round(ms, 3)}
        return rows

    return time_it


def prompts(model: torch.nn.Module, tokens: int) -> Iterator[dict[str, Any]]:
    """The arguments of every call: one prompt, without a cache."""
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    ids = ids.to(next(model.parameters()).device)
    while True:
        yield {"input_ids": ids, "use_cache": False}


def caches(model: torch.nn.Module, batch: int) -> Iterator[dict[str, Any]]:
    """The arguments of every call: one token per sequence after ``DECODE_CONTEXT`` tokens in transformers' own cache. A
    step changes its cache, so every call gets a copy."""
    from fusion_pass.models import cache_argument, filled_cache

    ids = torch.randint(0, model.config.vocab_size, (batch, DECODE_CONTEXT), generator=torch.Generator().manual_seed(0))
    ids = ids.to(next(model.parameters()).device)
    filled = filled_cache(model, ids)
    token = ids[:, :1].contiguous()
    while True:
        yield {"input_ids": token, "use_cache": True, **cache_argument(model, copy.deepcopy(filled))}


def difference(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative distance in float64, a part of the rows at a time: all logits of a long prompt would take 25 GB."""
    parts = zip(logits.flatten(0, -2).split(512), reference.flatten(0, -2).split(512), strict=True)
    apart, size = torch.zeros(2, dtype=torch.float64, device=logits.device)
    for ours, theirs in parts:
        apart += (ours.double() - theirs.double()).square().sum()
        size += theirs.double().square().sum()
    return float((apart / size).sqrt())


def _timed(call: Callable[..., Any], arguments: list[dict[str, Any]]) -> tuple[float, float]:
    """(median milliseconds, peak GiB) of calls with these arguments, after one with the first of them."""
    call(**arguments[0])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = [_milliseconds(call, each) for each in arguments[1:]]
    return statistics.median(times), torch.cuda.max_memory_allocated() / 2**30


def _in_turn(calls: list[Callable[..., Any]], inputs: Iterator[dict[str, Any]]) -> list[float]:
    """Median milliseconds of each call over ``DECODE_ROUNDS`` rounds, in each of which every call runs once."""
    times: list[list[float]] = [[] for _ in calls]
    with torch.no_grad():
        for _ in range(DECODE_ROUNDS):
            for call, samples in zip(calls, times, strict=True):
                arguments = next(inputs)
                torch.cuda.synchronize()
                samples.append(_milliseconds(call, arguments))
    return [statistics.median(samples) for samples in times]


def _milliseconds(call: Callable[..., Any], arguments: dict[str, Any]) -> float:
    """Of one call, from the host's start to the device's end."""
    start = time.perf_counter()
    call(**arguments)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def _variants(model: torch.nn.Module) -> dict[str, Callable]:
    return {
        "eager": model,
        "inductor": torch.compile(model, fullgraph=True),
        "fusion_pass": torch.compile(model, backend="fusion_pass", fullgraph=True, options={"strict": True}),
    }
