"""``demo``: a whole DeepSeek-V4 with random weights, eager and compiled, in its bf16 and its FP8 form.

On a CPU the model is tiny and the fused ops run their reference implementation: what the demo shows there is that
every attention layer is found and that the numbers agree, not speed. On a GPU it takes a slice of V4-Flash in bf16, one
layer of each kind, and compares time and memory with plain Inductor.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from argparse import Namespace
from typing import Any

import torch

from ..models.random_deepseek_v4 import LAYER_TYPES
from ..report import Report
from .console import Progress
from .demo_runs import FormResults, Setting, run_here, run_in_processes

BF16_ROLES = ("fmha", "inverse_rope", "bgemm")
FP8_ROLES = ("fmha", "inverse_rope", "fp8_quant", "bgemm")

# The compiled model's error against float32 may exceed eager's own bf16 error by this factor: the two round in other
# places.
ERROR_FACTOR = 1.5


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run of the demo does. runs: see :data:`demo_runs.DOING`. processes: each run in a process of its own."""

    device: str
    forms: tuple[str, ...]
    inner: str
    tokens: int
    steps: int
    size: str
    experts: str
    runs: tuple[str, ...]
    processes: bool

    def settings(self) -> list[Setting]:
        return [
            Setting(form, self.device, self.inner, self.tokens, self.steps, self.size, LAYER_TYPES, self.experts)
            for form in self.forms
        ]


def plan(arguments: Namespace) -> Plan:
    """What these arguments ask for here. Raises ValueError when this torch sees no GPU and one is asked for."""
    device = arguments.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("this torch sees no CUDA device")
    gpu = device == "cuda"
    form = arguments.form or ("bf16" if gpu else "both")
    return Plan(
        device=device,
        forms=("bf16", "fp8") if form == "both" else (form,),
        inner=arguments.inner if arguments.inner != "auto" else ("inductor" if gpu else "aot_eager"),
        tokens=arguments.tokens or (2048 if gpu else 64),
        steps=arguments.steps or (1 if gpu else 2),  # Inductor takes most of a minute for each
        size="flash" if gpu else "tiny",
        experts="grouped_mm" if gpu else "batched_mm",
        runs=("float32", "eager", "inductor", "compiled") if gpu else ("float32", "eager", "compiled"),
        processes=gpu if arguments.processes is None else arguments.processes,
    )


@dataclasses.dataclass
class Phase:
    """Prefill or one decode step of one form of the model: what was fused, and per run the error, time and memory.

    Runs: ``"eager"``, ``"compiled"`` (this package) and, on a GPU, ``"inductor"`` (``torch.compile`` without it).
    Errors are of the logits, relative to a float32 run. seconds: of one call that compiles nothing. peak_gib: on a GPU,
    the largest memory in use during that call. compile_seconds: what the first call took longer.
    """

    name: str
    report: Report
    error: dict[str, float]
    seconds: dict[str, float]
    peak_gib: dict[str, float]
    same_tokens: float
    compile_seconds: dict[str, float]

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
    """Exit code 0: every attention layer was fused in every graph and the numbers agree; 1: not so, or a run failed; 2:
    cannot run here."""
    try:
        import transformers  # noqa: F401
    except ImportError:
        print('demo: needs transformers >= 5.8: pip install "fusion-pass[hf]"', file=sys.stderr)
        return 2
    try:
        chosen = plan(arguments)
    except ValueError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    begin = time.perf_counter()
    progress, settings = Progress(), chosen.settings()
    if chosen.processes:
        found = run_in_processes(settings, chosen.runs, progress)
    else:
        found = {setting.form: run_here(setting, chosen.runs, progress) for setting in settings}
    results: dict[str, list[Phase]] = {}
    complaints: list[str] = []
    for setting in settings:
        of_form = found[setting.form]
        complaints += _failures(setting.form, of_form)
        if not {"float32", "eager", "compiled"} <= set(of_form.runs):
            continue
        results[setting.form] = _phases(setting, of_form)
        roles = FP8_ROLES if setting.form == "fp8" else BF16_ROLES
        for phase in results[setting.form]:
            complaints += [f"{setting.form} {text}" for text in phase.complaints(len(setting.layer_types), roles)]
    seconds = time.perf_counter() - begin
    if arguments.json:
        print(json.dumps(_as_dict(results, complaints, chosen, seconds), indent=2))
    else:
        _print(results, complaints, chosen, seconds)
    return 1 if complaints else 0


def _failures(form: str, found: FormResults) -> list[str]:
    """A complaint for every run that raised; its traceback goes to standard error."""
    complaints = []
    for name, text in found.failures.items():
        print(f"{form}, {name}:\n{text.rstrip()}", file=sys.stderr)
        complaints.append(f"{form}: the run {name!r} failed: {text.rstrip().splitlines()[-1]}")
    return complaints


def _phases(setting: Setting, found: FormResults) -> list[Phase]:
    """The runs of one form, phase by phase."""
    phases = []
    for number, name in enumerate(setting.phases):
        reference = found.runs["float32"][number].logits
        own = {run: results[number] for run, results in found.runs.items() if run != "float32"}
        same = own["eager"].logits.argmax(-1) == own["compiled"].logits.argmax(-1)
        on_gpu = setting.device == "cuda"
        phases.append(
            Phase(
                name=name,
                report=own["compiled"].report,
                error={run: _error(result.logits, reference) for run, result in own.items()},
                seconds={run: result.seconds for run, result in own.items()},
                peak_gib={run: result.peak_gib for run, result in own.items()} if on_gpu else {},
                same_tokens=same.float().mean().item(),
                compile_seconds={run: own[run].first_seconds - own[run].seconds for run in own if run != "eager"},
            )
        )
    return phases


def _error(logits: torch.Tensor, reference: torch.Tensor) -> float:
    error = (logits.double() - reference.double()).norm() / reference.double().norm()
    return float(error)


def _as_dict(results: dict[str, list[Phase]], complaints: list[str], chosen: Plan, seconds: float) -> dict[str, Any]:
    forms = {}
    for form, phases in results.items():
        forms[form] = [{**dataclasses.asdict(phase), "report": phase.report.to_dict()} for phase in phases]
    return {
        "success": not complaints,
        "complaints": complaints,
        **dataclasses.asdict(chosen),
        "seconds": seconds,
        "forms": forms,
    }


def _print(results: dict[str, list[Phase]], complaints: list[str], chosen: Plan, seconds: float) -> None:
    from .console import out

    gpu, layers = chosen.device == "cuda", len(chosen.settings()[0].layer_types)
    what = "slice of V4-Flash" if gpu else "small DeepSeek-V4"
    out.print(
        f"\n{what}, {layers} attention layers, prompt of {chosen.tokens} tokens, {chosen.device}, "
        f"inner compiler: {chosen.inner}"
    )
    for form, phases in results.items():
        out.print(f"\n{form} form, prefill:", markup=False)
        out.print(str(phases[0].report), markup=False)
        for phase in phases[1:]:
            out.print(f"{phase.name}: {phase.report.summary()}", markup=False)
            for note in phase.report.notes:
                out.print(f"  note       {note}", markup=False)
        out.print(_table(form, phases, layers))
        for phase in phases:
            if text := against_inductor(phase):
                out.print(text, markup=False)
    out.print("Errors are of the logits, relative to a float32 run of the same weights.", markup=False)
    if not gpu:
        out.print("On a CPU the fused ops run their reference implementation: times mean nothing here.", markup=False)
    for text in complaints:
        out.print(f"PROBLEM: {text}", markup=False)
    out.print(f"Took {seconds:.0f} s.", markup=False)
    verdict = "SUCCESS: every attention layer is fused in every graph, and the numbers agree."
    out.print("FAILURE" if complaints else verdict, markup=False)


def against_inductor(phase: Phase) -> str:
    """Time and memory beside plain Inductor's, in words; empty without such a run."""
    if "inductor" not in phase.seconds:
        return ""
    ours, plain = phase.seconds["compiled"], phase.seconds["inductor"]
    text = f"{phase.name}: {plain * 1e3:.1f} ms with plain Inductor, {ours * 1e3:.1f} ms with fusion_pass"
    text += f" ({plain / ours:.2f} times as fast)"
    if phase.peak_gib:
        text += f"; peak memory {phase.peak_gib['inductor']:.2f} and {phase.peak_gib['compiled']:.2f} GiB"
    return text


def _table(form: str, phases: list[Phase], layers: int) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title=f"{form} form", title_justify="left", box=box.SIMPLE)
    headings = ["phase", "run", "fused", "error", "same\ntoken", "time\n(ms)", "compiling\n(s)"]
    if phases[0].peak_gib:
        headings.append("peak\n(GiB)")
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
                f"{phase.seconds[run_name] * 1e3:.1f}",
                f"{phase.compile_seconds[run_name]:.1f}" if run_name in phase.compile_seconds else "",
            ]
            if phase.peak_gib:
                row.append(f"{phase.peak_gib[run_name]:.2f}")
            table.add_row(*row)
    return table
