# SPDX-License-Identifier: Apache-2.0
"""transformers' DeepSeek-V4, a 4-layer slice of V4-Flash with random weights: prefill without a cache and one cached
decode step, plain Inductor against Inductor with the pass (and eager for orientation). Time and peak memory.

Peak memory is the largest amount allocated during a call, above nothing: weights are part of it for every variant.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks import harness

PREFILL = (2048, 8192)
DECODE_CONTEXT = 2048
DECODE_BATCH = (1, 8)
FORMS = ("bf16", "fp8")
LAYERS = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
          "compressed_sparse_attention")


def _timed(call: Callable[[], torch.Tensor], repeats: int) -> tuple[torch.Tensor, float, float]:
    """(result, median milliseconds, peak GiB) of a call that was compiled before."""
    result = call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return result, statistics.median(times), torch.cuda.max_memory_allocated() / 2**30


def _error(result: torch.Tensor, reference: torch.Tensor) -> float:
    return harness.norm_error(result.double(), reference.double())


def _variants(model: torch.nn.Module) -> dict[str, Callable]:
    return {
        "eager": model,
        "inductor": torch.compile(model, fullgraph=True),
        "fusion_pass": torch.compile(model, backend="fusion_pass", fullgraph=True, options={"strict": True}),
    }


def run(args: argparse.Namespace) -> list[dict]:
    """Rows: phase, tokens, batch, variant, ms, peak_gib, error against the eager result, chains fused."""
    rows: list[dict] = []
    torch._dynamo.config.recompile_limit = 64
    for form in FORMS:
        model = build(form)
        for tokens in args.tokens or PREFILL:
            rows += prefill(model, form, tokens)
        if form == "bf16" and not args.tokens:
            for batch in DECODE_BATCH:
                rows += decode(model, batch)
        del model
        harness.free()
    return rows


def build(form: str) -> torch.nn.Module:
    """The slice in its ``"bf16"`` or ``"fp8"`` form."""
    from fusion_pass.models import random_deepseek_v4, replace_grouped_linear

    model = random_deepseek_v4("flash", layer_types=LAYERS, device="cuda", experts="grouped_mm")
    if form == "fp8":
        replace_grouped_linear(model, "ue8m0")
    return model


def _row(phase: str, form: str, tokens: int, batch: int, variant: str, ms: float, peak: float, error: float,
         known: int) -> dict:
    import fusion_pass

    fused = [c for r in fusion_pass.reports()[known:] for c in r.fused]
    return {"phase": phase, "form": form, "shape": f"{form} {phase}", "T": tokens, "batch": batch, "variant": variant,
            "us": ms * 1e3, "ms": round(ms, 3), "peak_gib": round(peak, 2), "difference_from_eager": error,
            "fused": ["+".join(c.roles) for c in fused]}


def prefill(model: torch.nn.Module, form: str, tokens: int) -> list[dict]:
    """One prompt without a cache."""
    import fusion_pass

    rows = []
    torch._dynamo.reset()
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), device="cuda")
    reference = None
    for name, call in _variants(model).items():
        known = len(fusion_pass.reports())
        with torch.no_grad():
            logits, ms, peak = _timed(lambda call=call, ids=ids: call(ids, use_cache=False).logits, 5)
        reference = logits if reference is None else reference
        rows.append(_row("prefill", form, tokens, 1, name, ms, peak, _error(logits, reference), known))
        del logits
        harness.free()
    return rows


def decode(model: torch.nn.Module, batch: int) -> list[dict]:
    """One step after a prompt of ``DECODE_CONTEXT`` tokens in transformers' own cache."""
    from transformers import DynamicCache

    import fusion_pass

    rows = []
    torch._dynamo.reset()
    ids = torch.randint(0, model.config.vocab_size, (batch, DECODE_CONTEXT), device="cuda")
    with torch.no_grad():
        filled = DynamicCache(config=model.config)
        model(ids, past_key_values=filled, use_cache=True)
        reference = None
        for name, call in _variants(model).items():
            known = len(fusion_pass.reports())
            caches = iter([copy.deepcopy(filled) for _ in range(8)])

            def step(call=call, caches=caches, token=ids[:, :1]) -> torch.Tensor:
                return call(token, past_key_values=next(caches), use_cache=True).logits

            logits, ms, peak = _timed(step, 5)
            reference = logits if reference is None else reference
            rows.append(_row("decode", "bf16", batch, batch, name, ms, peak, _error(logits, reference), known))
    return rows
