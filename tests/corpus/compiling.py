"""How the corpus tests run a case: at every level of compilation, with the report of what was fused."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import oracle
import torch
from run_all import close, flat, fresh, load
from torch import fx

import fusion_pass
from fusion_pass import Config, Report

PATHS = {path.stem: path for path in sorted((pathlib.Path(__file__).parent / "cases").glob("*.py"))}
POSITIVES = [name for name in PATHS if name.startswith("pos")]
NEGATIVES = [name for name in PATHS if name.startswith("neg")]
FLEX = [name for name in PATHS if "flex_attention" in name]
TOLERANCE = 2e-2       # of the compiled value against eager: bf16 and FP8 round at different places


@dataclass
class Outcome:
    """What a compiled case returned, and the reports of its graphs."""

    values: list[torch.Tensor]
    reports: list[Report] = field(default_factory=list)

    @property
    def report(self) -> Report:
        return Report.merge(self.reports)


def case(name: str, **sizes: object) -> tuple[object, Callable, tuple]:
    """The module of a case, its function and arguments."""
    module = load(PATHS[name])
    fn, args = module.make(**sizes)
    return module, fn, args


def eager(fn: Callable, args: tuple) -> list[torch.Tensor]:
    with torch.no_grad():
        torch.manual_seed(1)
        return flat(fn(*fresh(args)))


@contextlib.contextmanager
def reports_of(outcome: Outcome) -> Iterator[None]:
    before = len(fusion_pass.reports())
    yield
    outcome.reports = fusion_pass.reports()[before:]


def compiled(fn: Callable, args: tuple, *, backend: object = "fusion_pass", options: dict | None = None) -> Outcome:
    """torch.compile with the traced graph run as it is (no code generation)."""
    torch._dynamo.reset()
    options = {"inner": "aot_eager", "strict": True} if options is None and backend == "fusion_pass" else options
    outcome = Outcome([])
    with torch.no_grad(), reports_of(outcome):
        torch.manual_seed(1)
        outcome.values = flat(torch.compile(fn, backend=backend, fullgraph=True, options=options)(*fresh(args)))
    return outcome


def through_inductor(fn: Callable, args: tuple, config: Config | None) -> Outcome:
    """Plain Inductor, code generation and all; with the pass in its post-grad hook unless ``config`` is None."""
    torch._dynamo.reset()
    outcome = Outcome([])
    hook = contextlib.nullcontext() if config is None else fusion_pass.enabled(config)
    with torch.no_grad(), reports_of(outcome), hook, torch._inductor.config.patch(force_disable_caches=True):
        torch.manual_seed(1)
        outcome.values = flat(torch.compile(fn, fullgraph=True)(*fresh(args)))
    return outcome


def post_grad_backend(gm: fx.GraphModule, inputs: list) -> Callable:
    """Inductor up to its post-grad passes; the graph that would go to code generation is run as it is."""
    from torch._inductor.compile_fx import _recursive_post_grad_passes, compile_fx, view_to_reshape

    def inner(graph: fx.GraphModule, _inputs: list, **_: object) -> Callable:
        view_to_reshape(graph)
        _recursive_post_grad_passes(graph, is_inference=True)

        def run(boxed: list) -> object:
            values = tuple(boxed)
            boxed.clear()
            return graph(*values)

        run._boxed_call = True
        return run

    return compile_fx(gm, inputs, inner_compile=inner)


def post_grad(fn: Callable, args: tuple, config: Config | None) -> Outcome:
    """The post-grad level without code generation."""
    torch._dynamo.reset()
    outcome = Outcome([])
    hook = contextlib.nullcontext() if config is None else fusion_pass.enabled(config)
    with torch.no_grad(), reports_of(outcome), hook, torch._inductor.config.patch(force_disable_caches=True):
        torch.manual_seed(1)
        outcome.values = flat(torch.compile(fn, backend=post_grad_backend, fullgraph=True)(*fresh(args)))
    return outcome


class Called(torch.nn.Module):
    """A function as a module, for torch.export."""

    def __init__(self, fn: Callable) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: object) -> object:
        return self.fn(*args)


def exported(fn: Callable, args: tuple, *, decompose: bool = False) -> Outcome:
    """torch.export and ``rewrite``, then the exported program's own module."""
    torch._dynamo.reset()
    with torch.no_grad():
        program = torch.export.export(Called(fn), fresh(args), strict=False)
        if decompose:
            program = program.run_decompositions()
        report = fusion_pass.rewrite(program, Config(strict=True))
        torch.manual_seed(1)
        return Outcome(flat(program.module()(*fresh(args))), [report])


def problems(name: str, expect: dict, report: Report) -> str:
    """What is wrong with the report of a case; empty when nothing is."""
    found = [list(chain.roles) for chain in report.fused]
    if expect["fused"]:
        for chain in report.fused:
            if list(chain.roles) == expect["roles"] and chain.quant == expect["quant"] and (
                    expect["quant"] is None or chain.group == expect["group"]):
                return ""
            if list(chain.roles) in expect.get("also_ok", []):
                return ""
        return f"{name}: expected {expect['roles']} {expect['quant']}, got\n{report}"
    may = [list(roles) for roles in expect.get("may", [])]
    wrong = [roles for roles in found if roles not in may]
    return f"{name}: {wrong} fused, but {expect['why']}\n{report}" if wrong else ""


def difference(values: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    assert len(values) == len(wanted)
    return max(close(a, b) for a, b in zip(values, wanted))


def oracle_errors(module: object, args: tuple, wanted: list[torch.Tensor],
                  values: list[torch.Tensor]) -> tuple[float, float] | None:
    """Relative errors of eager and of the compiled value against the float64 oracle, where the case has one."""
    if not hasattr(module, "canon"):
        return None
    reference = oracle.reference(module.canon(fresh(args)))
    return oracle.rel_err(wanted[0], reference), oracle.rel_err(values[0], reference)
