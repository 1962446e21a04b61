"""The demo's runs: a float32 reference, eager, plain Inductor and this package, each here or in a process of its own.

Compiling a slice of V4-Flash takes most of a minute per graph, nearly all of it on one thread. So on a GPU every run
has its own process: they compile at the same time, and are timed one after the other when all are done.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import multiprocessing
import multiprocessing.connection
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .. import store
from ..models import cache_argument, random_deepseek_v4, replace_grouped_linear
from ..report import Report
from .console import Progress

DOING = {
    "float32": "float32 reference",
    "eager": "eager",
    "inductor": "compiling with plain Inductor",
    "compiled": "compiling with fusion_pass",
}
_HEARTBEAT = 15.0  # seconds without news after which a line says what is still going on


@dataclasses.dataclass(frozen=True)
class Setting:
    """One form of the model and what it is run on.

    form: ``"bf16"`` or ``"fp8"``. size, layer_types, experts: of :func:`random_deepseek_v4`. tokens: length of the
    prompt. steps: cached decode steps after it.
    """

    form: str
    device: str
    inner: str
    tokens: int
    steps: int
    size: str
    layer_types: tuple[str, ...]
    experts: str

    @property
    def phases(self) -> list[str]:
        return ["prefill", *(f"decode {number}" for number in range(1, self.steps + 1))]


@dataclasses.dataclass
class PhaseResult:
    """What one run gave in one phase: logits [1, S, vocabulary] on the CPU, the seconds of the first call (it compiles)
    and of a later one, the largest memory in use during the later ones (GiB, 0 on a CPU), the pass's report."""

    logits: torch.Tensor
    first_seconds: float
    report: Report
    seconds: float = 0.0
    peak_gib: float = 0.0


@dataclasses.dataclass
class FormResults:
    """Results by run, one per phase; for a run that failed, the traceback instead."""

    runs: dict[str, list[PhaseResult]] = dataclasses.field(default_factory=dict)
    failures: dict[str, str] = dataclasses.field(default_factory=dict)


Say = Callable[[str], contextlib.AbstractContextManager[None]]


class Run:
    """One form of the model, called one way. :meth:`first_calls` compiles, :meth:`measure` takes the times.

    name: a key of :data:`DOING`. say: called with what is going on, gives a context manager around it.
    """

    def __init__(self, setting: Setting, name: str, model: nn.Module, say: Say) -> None:
        self.setting, self.name, self.model, self._say = setting, name, model, say
        self._calls: list[tuple[torch.Tensor, Any]] = []  # ids and cache before every phase

    def first_calls(self) -> list[PhaseResult]:
        """Every phase once, each going on with the cache of the one before; every run is given the same tokens."""
        from transformers import DynamicCache

        setting = self.setting
        if self.name in ("inductor", "compiled"):
            torch._dynamo.reset()
        self._call = self._callable()
        config: Any = self.model.config
        cache = DynamicCache(config=config)
        generator = torch.Generator().manual_seed(1)
        results = []
        for number, phase in enumerate(setting.phases):
            length = 1 if number else setting.tokens
            ids = torch.randint(0, config.vocab_size, (1, length), generator=generator).to(setting.device)
            # Every call gets a copy of the cache: Dynamo guards on more than a tensor's metadata (on the base of a
            # view), and a copy is a new graph to it where the original is not.
            self._calls.append((ids, cache))
            cache, known = copy.deepcopy(cache), len(store.reports())
            with self._say(f"{setting.form} {phase}: {DOING[self.name]}"):
                logits, seconds = self._timed(ids, cache)
            results.append(PhaseResult(logits.cpu(), seconds, Report.merge(store.reports()[known:])))
        return results

    def measure(self) -> list[tuple[float, float, Report]]:
        """Seconds (median) and peak memory (GiB) of every phase, and the report of what was compiled all the same."""
        on_gpu = self.setting.device == "cuda"
        measured = []
        for ids, cache in self._calls:
            known = len(store.reports())
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            times = [self._timed(ids, copy.deepcopy(cache))[1] for _ in range(5 if on_gpu else 2)]
            peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
            measured.append((statistics.median(times), peak, Report.merge(store.reports()[known:])))
        return measured

    def _callable(self) -> Callable[..., Any]:
        if self.name == "inductor":
            return torch.compile(self.model, fullgraph=True)
        if self.name == "compiled":
            return torch.compile(
                self.model, backend="fusion_pass", fullgraph=True, options={"inner": self.setting.inner}
            )
        return self.model

    def _timed(self, ids: torch.Tensor, cache: Any) -> tuple[torch.Tensor, float]:
        self._synchronize()
        start = time.perf_counter()
        with torch.no_grad():
            logits = self._call(ids, use_cache=True, **cache_argument(self.model, cache)).logits
        self._synchronize()
        return logits, time.perf_counter() - start

    def _synchronize(self) -> None:
        if self.setting.device == "cuda":
            torch.cuda.synchronize()


def build_models(setting: Setting) -> tuple[nn.Module, nn.Module]:
    """The model and the yardstick, which has the same weights: bf16 values and E4M3 codes are exact in float32."""
    options: dict[str, Any] = dict(layer_types=setting.layer_types, device=setting.device, experts=setting.experts)
    if setting.size == "tiny":
        # The indexer keeps every compressed row of a short prompt: rounding cannot make two runs choose other rows, and
        # their errors stay comparable.
        options["index_topk"] = 64
    model = random_deepseek_v4(setting.size, **options)
    reference = random_deepseek_v4(setting.size, dtype=torch.float32, **options)
    if setting.form == "fp8":
        replace_grouped_linear(model, "ue8m0")
        replace_grouped_linear(reference, "ue8m0")
    reference.load_state_dict(model.state_dict())
    return model, reference


def run_here(setting: Setting, names: Sequence[str], progress: Progress) -> FormResults:
    """All runs of a form, one after the other in this process."""
    found = FormResults()
    with progress.step(f"{setting.form}: building the model"):
        model, reference = build_models(setting)
    for name in names:
        try:
            run = Run(setting, name, reference if name == "float32" else model, progress.step)
            first = run.first_calls()
            with progress.step(f"{setting.form}: timing {name}"):
                _note_times(first, run.measure())
            found.runs[name] = first
        except Exception:
            found.failures[name] = traceback.format_exc()
    return found


def run_in_processes(settings: Sequence[Setting], names: Sequence[str], progress: Progress) -> dict[str, FormResults]:
    """All runs of all forms, each in a process of its own; by form.

    They compile together. The times are taken one run after the other, when no process compiles any more.
    """
    compiling = max(1, len(settings) * sum(name in ("inductor", "compiled") for name in names))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    given = os.environ.get("TORCHINDUCTOR_COMPILE_THREADS")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = given or str(max(1, cores // compiling))
    try:
        workers = [_Worker(context, setting, name) for setting in settings for name in names]
    finally:
        if given is None:
            del os.environ["TORCHINDUCTOR_COMPILE_THREADS"]
    try:
        _wait_for(workers, progress)
        for worker in workers:
            if worker.failure is None:
                worker.connection.send("measure")
                worker.waiting = True
                _wait_for([worker], progress)
    finally:
        for worker in workers:
            worker.stop()
    found = {setting.form: FormResults() for setting in settings}
    for worker in workers:
        if worker.failure is None:
            found[worker.setting.form].runs[worker.name] = worker.results
        else:
            found[worker.setting.form].failures[worker.name] = worker.failure
    return found


class _Worker:
    """A process with one :class:`Run`, as its parent sees it."""

    def __init__(self, context: Any, setting: Setting, name: str) -> None:
        self.setting, self.name = setting, name
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, setting, name), daemon=True)
        self.process.start()
        other.close()
        self.results: list[PhaseResult] = []
        self.failure: str | None = None
        self.waiting = True
        self._going: set[str] = set()

    def hear(self, progress: Progress) -> None:
        """Take one message of the process."""
        try:
            kind, content = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(5)
            kind, content = "failed", f"its process ended with exit code {self.process.exitcode}"
        if kind == "begin":
            self._going.add(content)
            progress.begin(content)
        elif kind == "end":
            self._going.remove(content)
            progress.end(content)
        elif kind == "first calls":
            self.results, self.waiting = torch.load(io.BytesIO(content), weights_only=False), False
        elif kind == "measured":
            _note_times(self.results, content)
            self.waiting = False
        else:
            self.failure, self.waiting = content, False
            for text in self._going:
                progress.end(text)

    def stop(self) -> None:
        self.connection.close()
        self.process.join(5)
        if self.process.is_alive():
            self.process.terminate()


def _wait_for(workers: Sequence[_Worker], progress: Progress) -> None:
    while busy := {worker.connection: worker for worker in workers if worker.waiting}:
        heard = multiprocessing.connection.wait(list(busy), timeout=_HEARTBEAT)
        if not heard:
            progress.still_going()
        for connection in heard:
            busy[connection].hear(progress)


def _serve(connection: Any, setting: Setting, name: str) -> None:
    """The process of one run: compile, wait for ``"measure"``, measure, wait for the end of the pipe."""

    @contextlib.contextmanager
    def say(text: str) -> Iterator[None]:
        connection.send(("begin", text))
        yield
        connection.send(("end", text))

    try:
        with say(f"{setting.form}: building the model ({name})"):
            model, reference = build_models(setting)
        run = Run(setting, name, reference if name == "float32" else model, say)
        del model, reference  # only one of them counts as memory in use
        written = io.BytesIO()  # not the tensors themselves: sharing them needs this process to stay alive
        torch.save(run.first_calls(), written)
        connection.send(("first calls", written.getvalue()))
        while True:
            connection.recv()
            with say(f"{setting.form}: timing {name}"):
                measured = run.measure()
            connection.send(("measured", measured))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return
    except Exception:
        with contextlib.suppress(OSError):
            connection.send(("failed", traceback.format_exc()))


def _note_times(results: Sequence[PhaseResult], measured: Sequence[tuple[float, float, Report]]) -> None:
    for result, (seconds, peak, report) in zip(results, measured):
        result.seconds, result.peak_gib = seconds, peak
        result.report = Report.merge([result.report, report])
