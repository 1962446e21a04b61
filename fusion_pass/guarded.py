"""Run the pass on one graph so that it can do no harm: time it, restore the graph when it fails, tell the log.

The pass fails open: an exception leaves the graph as it came, with one warning per kind of failure;
``Config(strict=True)`` raises instead.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from . import compat, triton_ops
from .config import Config
from .legality import Purity, drop_needless_checks
from .report import Report

log = logging.getLogger(__name__)
_warned: set[str] = set()

INSIDE_INDUCTOR = ("joint", "post_grad")       # levels at which nobody runs the graph's Python code
DISABLED = "disabled (Config(disable=True) or FUSION_PASS_DISABLE=1): the graph is as it came"
TRAINING = "training graph: left alone, as the fused ops have no backward; call the model under torch.no_grad()"


def foreign_reason(values: Iterable[Any]) -> str | None:
    """Why a graph over these inputs is left alone: one is a tensor subclass, whose operators may mean something else.

    Wrapper subclasses (``DTensor``, ``TwoTensor``) are none of these where AOTAutograd takes them apart: its graphs are
    over the tensors inside.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    ordinary = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor, FunctionalTensor)
    for value in values:
        if isinstance(value, torch.Tensor) and type(value) not in ordinary:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            return (f"an input is a {kind}: operators on a tensor subclass "
                    "may mean something else, the graph is as it came; pass plain tensors (Tensor.as_subclass)")
    return None


def run(gm: fx.GraphModule, config: Config, *, level: str) -> Report:
    """Rewrite ``gm`` in place under ``config`` (resolved here) and return the report.

    level: where the graph comes from, for logs and traces: ``"aot"``, ``"joint"``, ``"post_grad"``, ``"rewrite"``.
    Raises only with ``config.strict``.
    """
    config = config.resolve()
    if config.disable:
        return Report(nodes=len(gm.graph.nodes), notes=[DISABLED])
    foreign = foreign_reason(node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder"))
    if foreign is not None:
        return Report(nodes=len(gm.graph.nodes), notes=[foreign])
    from .rewrite import run_on_graph  # late: the pass and everything it needs load when the first graph comes

    start = time.perf_counter()
    nodes = len(gm.graph.nodes)
    journal: list[Journal] = []
    before: list[fx.Graph] = []

    def keep() -> None:
        # Most graphs are never changed: nothing is kept of them. A copy of the graph is made for traces only.
        if not journal:
            journal.append(Journal(gm))
        if not before and compat.tracing_artifacts():
            before.append(snapshot(gm))

    try:
        with _collection_paused():
            report = run_on_graph(gm, config, before_change=keep)
            if report.fused:
                drop_needless_checks(gm.graph)
                # The last step, as what it takes away cannot be brought back. It begins with a lint of the graph.
                gm.graph.eliminate_dead_code(Purity().is_impure)
    except Exception as error:
        if journal:
            journal[0].restore()
        if config.strict:
            raise
        from .elements.sizes import Unsized  # late, as the pass

        if isinstance(error, Unsized):
            report = Report(notes=[f"left as it came: {error}; trace the graph with fake tensors, or run "
                                   "torch.fx.passes.fake_tensor_prop.FakeTensorProp over it"])
        else:
            report = Report(notes=[f"the pass failed and the graph was left as it came: {first_line(error)}"])
            _warn_failure(error)
    if report.fused and level not in INSIDE_INDUCTOR:
        gm.recompile()
    if level == "joint":
        triton_ops.take_apart(gm)
    report.nodes = report.nodes or nodes
    report.seconds = time.perf_counter() - start
    _tell(gm, before[0] if before else None, report, level)
    return report


@contextlib.contextmanager
def _collection_paused() -> Iterator[None]:
    """No garbage collection meanwhile: a full one walks everything that tracing has left in memory (a large part of a
    second for a 60-layer model), and the pass makes next to no cycles for it to find."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Journal:
    """What a graph was, so that it can be again: every node with its operator, arguments and metadata.

    Cheaper than a copy by two orders of magnitude. Valid until one of those nodes is erased.
    """

    def __init__(self, gm: fx.GraphModule):
        self.gm = gm
        self.nodes = [(n, n.target, n.args, n.kwargs, dict(n.meta)) for n in gm.graph.nodes]

    def restore(self) -> None:
        """Give every node what it had and take away the nodes that came since. Nothing to do when the graph was rebuilt
        from a copy meanwhile."""
        if self.nodes and self.nodes[0][0].graph.find_nodes(op="output")[0] is not self.nodes[-1][0]:
            return
        for node, target, args, kwargs, meta in self.nodes:
            node.target, node.args, node.kwargs, node.meta = target, args, kwargs, meta
        known = {node for node, *_ in self.nodes}
        for node in reversed(list(self.gm.graph.nodes)):
            if node not in known:
                self.gm.graph.erase_node(node)
        self.gm.recompile()


def first_line(error: Exception) -> str:
    """Type and first line of an exception: torch's messages go on with pages of advice."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def snapshot(gm: fx.GraphModule) -> fx.Graph:
    """A copy of the graph, for :func:`restore`."""
    copy = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    result = copy.graph_copy(gm.graph, values)
    output = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
    copy.output(result).meta = dict(output.meta)
    return copy


def restore(gm: fx.GraphModule, before: fx.Graph) -> None:
    """Make ``gm`` what :func:`snapshot` saw, node names included."""
    # In place, as whoever called the pass holds this very graph; with a new namespace, so that nodes get their names
    # back (the signature of an exported program refers to them).
    nodes = list(gm.graph.nodes)
    for node in nodes:
        node.args, node.kwargs = (), {}
    for node in nodes:
        gm.graph.erase_node(node)
    gm.graph._graph_namespace = type(gm.graph._graph_namespace)()
    values: dict[fx.Node, fx.Node] = {}
    result = gm.graph.graph_copy(before, values)
    output = next(node for node in reversed(before.nodes) if node.op == "output")
    gm.graph.output(result).meta = dict(output.meta)
    gm.recompile()


def _warn_failure(error: Exception) -> None:
    kind = first_line(error)
    if kind in _warned:
        log.debug("the pass failed again", exc_info=True)
        return
    _warned.add(kind)
    log.warning(
        "fusion_pass failed and left the graph as it came (%s). Please report it; Config(strict=True) raises, "
        "FUSION_PASS_DISABLE=1 turns the pass off.",
        kind,
        exc_info=log.isEnabledFor(logging.DEBUG),
    )


def _tell(gm: fx.GraphModule, before: fx.Graph | None, report: Report, level: str) -> None:
    log.info("%s graph: %s", level, report.summary())
    if report:
        log.debug("%s", report)
    counts = compat.counters()["fusion_pass"]
    counts["graphs"] += 1
    counts["fused"] += len(report.fused)
    counts["gated"] += len(report.gated)
    counts["near_misses"] += len(report.near_misses)
    compat.trace_artifact("fusion_pass_report", "json", report.to_json)
    if report.fused and before is not None:
        compat.trace_artifact("fusion_pass_before", "string", lambda: _readable(fx.GraphModule(gm, before)))
        compat.trace_artifact("fusion_pass_after", "string", lambda: _readable(gm))


def _readable(gm: torch.fx.GraphModule) -> str:
    return str(gm.print_readable(print_output=False, include_stride=True, include_device=True))
