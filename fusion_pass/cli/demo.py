"""``demo``: a whole DeepSeek-V4 with random weights, eager and compiled, in its bf16 and its FP8 form.

On a CPU the model is tiny and the fused ops run their reference implementation: what the demo shows there is that
every attention layer is found and that the numbers agree, not speed. On a GPU it takes a slice of V4-Flash.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .. import store
from ..models import random_deepseek_v4, replace_grouped_linear
from ..report import Report
from .console import step

BF16_ROLES = ("fmha", "inverse_rope", "bgemm")
FP8_ROLES = ("fmha", "inverse_rope", "fp8_quant", "bgemm")

_DOING = {
    "float32": "float32 reference",
    "eager": "eager",
    "inductor": "compiling with plain Inductor",
    "compiled": "compiling with fusion_pass",
}

# The compiled model's error against float32 may exceed eager's own bf16 error by this factor: the two round in other
# places.
ERROR_FACTOR = 1.5


@dataclasses.dataclass
class Phase:
    """Prefill or one decode step of one form of the model: what was fused, and per run the error, time and memory.

    Runs: ``"eager"``, ``"compiled"`` (this package) and, on a GPU, ``"inductor"`` (``torch.compile`` without it).
    Errors are of the logits, relative to a float32 run. seconds: of one call that compiles nothing. peak_gib: on a GPU,
    the largest memory in use during that call.
    """

    name: str
    report: Report
    error: dict[str, float]
    seconds: dict[str, float]
    peak_gib: dict[str, float]
    same_tokens: float
    compile_seconds: float

    def complaints(self, layers: int, roles: tuple[str, ...]) -> list[str]:
        """What is wrong with this phase, in words; empty when nothing is."""
        found = []
        whole = [chain for chain in self.report.fused if chain.roles == roles]
        graphs = max(self.report.graphs, 1)
        if len(whole) != layers * graphs:
            found.append(
                f"{self.name}: {len(whole)} of {layers * graphs} attention layers fused as {' -> '.join(roles)}"
            )
        compiled, eager = self.error["compiled"], self.error["eager"]
        if not compiled <= ERROR_FACTOR * eager + 1e-6:
            found.append(f"{self.name}: error against float32 is {compiled:.2e}, eager's own {eager:.2e}")
        return found


def run(arguments: Namespace) -> int:
    """Exit code 0: every attention layer was fused in every graph and the numbers agree; 1: not so; 2: cannot run."""
    try:
        import transformers  # noqa: F401
    except ImportError:
        print('demo: needs transformers >= 5.8: pip install "fusion-pass[hf]"', file=sys.stderr)
        return 2
    device = arguments.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        print("demo: this torch sees no CUDA device", file=sys.stderr)
        return 2
    inner = arguments.inner if arguments.inner != "auto" else ("inductor" if device == "cuda" else "aot_eager")
    tokens = arguments.tokens or (2048 if device == "cuda" else 64)

    forms = ("bf16", "fp8") if arguments.form == "both" else (arguments.form,)
    results: dict[str, list[Phase]] = {}
    complaints: list[str] = []
    layers = 0
    for form in forms:
        model, reference = _models(form, device)
        layers = len(model.model.layers)  # type: ignore[union-attr, arg-type]
        results[form] = list(_phases(form, model, reference, device, inner, tokens, arguments.steps))
        roles = FP8_ROLES if form == "fp8" else BF16_ROLES
        complaints += [f"{form} {text}" for phase in results[form] for text in phase.complaints(layers, roles)]
        del model, reference
    if arguments.json:
        print(json.dumps(_as_dict(results, complaints, device, inner, tokens), indent=2))
    else:
        _print(results, complaints, device, inner, tokens, layers)
    return 1 if complaints else 0


def _models(form: str, device: str) -> tuple[nn.Module, nn.Module]:
    size, experts = ("flash", "grouped_mm") if device == "cuda" else ("tiny", "batched_mm")
    layer_types = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    if size == "flash":
        layer_types.append("compressed_sparse_attention")
    settings: dict[str, Any] = dict(layer_types=layer_types, device=device, experts=experts)
    if size == "tiny":
        # The indexer keeps every compressed row of a short prompt: rounding cannot make two runs choose other rows, and
        # their errors stay comparable.
        settings["index_topk"] = 64
    with step(f"{form}: building the model"):
        model = random_deepseek_v4(size, **settings)
        # The yardstick holds the same weights: bf16 values (and E4M3 codes) are exact in float32.
        reference = random_deepseek_v4(size, dtype=torch.float32, **settings)
        if form == "fp8":
            replace_grouped_linear(model, "ue8m0")
            replace_grouped_linear(reference, "ue8m0")
        reference.load_state_dict(model.state_dict())
    return model, reference


def _phases(
    form: str, model: nn.Module, reference: nn.Module, device: str, inner: str, tokens: int, steps: int
) -> Iterator[Phase]:
    from transformers import DynamicCache

    torch._dynamo.reset()
    runs: dict[str, Callable[..., Any]] = {"float32": reference, "eager": model}
    if device == "cuda":
        runs["inductor"] = torch.compile(model, fullgraph=True)
    runs["compiled"] = torch.compile(model, backend="fusion_pass", fullgraph=True, options={"inner": inner})
    config: Any = model.config
    caches = {name: DynamicCache(config=config) for name in runs}
    ids = torch.randint(0, config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(1)).to(device)
    for index in range(steps + 1):
        name = "prefill" if index == 0 else f"decode {index}"
        known = len(store.reports())
        measured = {}
        for run_name, call in runs.items():
            with step(f"{form} {name}: {_DOING[run_name]}"), torch.no_grad():
                measured[run_name], caches[run_name] = _measure(call, ids, caches[run_name], device)
        reference_logits = measured["float32"].logits
        own = {run_name: result for run_name, result in measured.items() if run_name != "float32"}
        same = own["eager"].logits.argmax(-1) == own["compiled"].logits.argmax(-1)
        yield Phase(
            name=name,
            report=Report.merge(store.reports()[known:]),
            error={run_name: _error(result.logits, reference_logits) for run_name, result in own.items()},
            seconds={run_name: result.seconds for run_name, result in own.items()},
            peak_gib={run_name: result.peak_gib for run_name, result in own.items()} if device == "cuda" else {},
            same_tokens=same.float().mean().item(),
            compile_seconds=own["compiled"].first_seconds - own["compiled"].seconds,
        )
        # All runs go on with the same token, so that their caches stay comparable.
        ids = reference_logits[:, -1:].argmax(-1)


@dataclasses.dataclass
class _Measured:
    logits: torch.Tensor
    first_seconds: float
    seconds: float
    peak_gib: float


def _measure(call: Callable[..., Any], ids: torch.Tensor, before: Any, device: str) -> tuple[_Measured, Any]:
    """Run once, compiling, and then again for the time; returns what was measured and the cache after the call."""
    # Every call gets a copy of the cache: Dynamo guards on more than a tensor's metadata (on the base of a view), and a
    # copy is a new graph to it where the original is not.
    after = copy.deepcopy(before)
    logits, first = _timed(call, ids, after, device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = [_timed(call, ids, copy.deepcopy(before), device)[1] for _ in range(5 if device == "cuda" else 2)]
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    return _Measured(logits, first, statistics.median(times), peak), after


def _timed(call: Callable[..., Any], ids: torch.Tensor, cache: Any, device: str) -> tuple[torch.Tensor, float]:
    _synchronize(device)
    start = time.perf_counter()
    logits = call(ids, past_key_values=cache, use_cache=True).logits
    _synchronize(device)
    return logits, time.perf_counter() - start


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _error(logits: torch.Tensor, reference: torch.Tensor) -> float:
    error = (logits.double() - reference.double()).norm() / reference.double().norm()
    return float(error)


def _as_dict(
    results: dict[str, list[Phase]], complaints: list[str], device: str, inner: str, tokens: int
) -> dict[str, Any]:
    forms = {}
    for form, phases in results.items():
        forms[form] = [{**dataclasses.asdict(phase), "report": phase.report.to_dict()} for phase in phases]
    return {
        "success": not complaints,
        "complaints": complaints,
        "device": device,
        "inner": inner,
        "tokens": tokens,
        "forms": forms,
    }


def _print(
    results: dict[str, list[Phase]], complaints: list[str], device: str, inner: str, tokens: int, layers: int
) -> None:
    from .console import out

    what = "slice of V4-Flash" if device == "cuda" else "small DeepSeek-V4"
    out.print(f"\n{what}, {layers} attention layers, prompt of {tokens} tokens, {device}, inner compiler: {inner}")
    for form, phases in results.items():
        out.print(f"\n{form} form, prefill:", markup=False)
        out.print(str(phases[0].report), markup=False)
        for phase in phases[1:]:
            out.print(f"{phase.name}: {phase.report.summary()}", markup=False)
            for note in phase.report.notes:
                out.print(f"  note       {note}", markup=False)
        out.print(_table(form, phases, layers))
    out.print("Errors are of the logits, relative to a float32 run of the same weights.", markup=False)
    if device == "cpu":
        out.print("On a CPU the fused ops run their reference implementation: times mean nothing here.", markup=False)
    for text in complaints:
        out.print(f"PROBLEM: {text}", markup=False)
    verdict = "SUCCESS: every attention layer is fused in every graph, and the numbers agree."
    out.print("FAILURE" if complaints else verdict, markup=False)


def _table(form: str, phases: list[Phase], layers: int) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title=f"{form} form", title_justify="left", box=box.SIMPLE)
    headings = ["phase", "run", "fused", "error", "same token", "time", "compiling"]
    if phases[0].peak_gib:
        headings.append("peak memory")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("phase", "run") else "right", no_wrap=True)
    for phase in phases:
        for run_name in phase.seconds:
            ours = run_name == "compiled"
            row = [
                phase.name if run_name == "eager" else "",
                "fusion_pass" if ours else run_name,
                f"{len(phase.report.fused)} of {layers * max(phase.report.graphs, 1)}" if ours else "",
                f"{phase.error[run_name]:.1e}",
                f"{phase.same_tokens:.1%}" if ours else "",
                f"{phase.seconds[run_name] * 1e3:.1f} ms",
                f"{phase.compile_seconds:.1f} s" if ours else "",
            ]
            if phase.peak_gib:
                row.append(f"{phase.peak_gib[run_name]:.1f} GiB")
            table.add_row(*row)
    return table
