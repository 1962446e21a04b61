"""The pass itself: from a functional ATen graph to its rewritten form and a report."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.traceback import NodeSource, NodeSourceAction
from torch.utils._python_dispatch import _disable_current_modes

from . import validation
from .config import Config
from .elements.fakes import unify_fake_modes
from .elements.sizes import Sizes
from .gate import compile_time_gate
from .guarded import restore, snapshot
from .legality import GraphFacts
from .recognise.chain import find_chains
from .recognise.chain_types import Chain, Findings
from .recognise.context import Context
from .recognise.declared import PRODUCT, DeclaredOps, Plan
from .recognise.refusal import Refused, source_line
from .replace import kept_alive, replace_chain
from .report import FusedChain, GatedChain, NearMiss, Report
from .size_nodes import read_sizes_from_inputs

log = logging.getLogger(__name__)


def run_on_graph(gm: fx.GraphModule, config: Config, before_change: Callable[[], None] | None = None) -> Report:
    """Rewrite ``gm`` in place and report. ``config`` is resolved (see :meth:`Config.resolve`). ``before_change`` is
    called before anything is changed (to keep a copy); it is not called for a graph without chains.

    The graph is in functional ATen form (AOT, post-grad, export or make_fx). Nothing is changed when nothing is found.
    What was replaced is left as dead code, for the caller to take away once nothing can fail any more (``guarded``).
    """
    started = time.perf_counter()
    plan = Plan()
    before = None
    if DeclaredOps.present(gm.graph):
        before = snapshot(gm)
        if before_change is not None:
            before_change()
    while True:
        try:
            report, settled = _run(gm, config, plan, before_change)
        except Exception:
            if before is not None:
                restore(gm, before)
            raise
        if settled or before is None:
            break
        restore(gm, before)         # with another plan for the declared ops
    report.seconds = time.perf_counter() - started
    return report


def _run(gm: fx.GraphModule, config: Config, plan: Plan,
         before_change: Callable[[], None] | None) -> tuple[Report, bool]:
    report = Report(nodes=len(gm.graph.nodes))
    # A compiler calls this under its fake-tensor mode; element evaluation needs real (small) tensors.
    with _disable_current_modes(), torch.no_grad(), _no_guards(gm):
        unify_fake_modes(gm.graph)
        declared = DeclaredOps.write_out(gm, config, plan)
        context = Context.of(gm)
        context.fixed = declared.fixed
        try:
            findings = find_chains(context)
            changed = _replace_all(findings, gm, context, declared, config, report, before_change)
        finally:
            context.discard_scratch()
        for refused in findings.refused:
            if not refused.silent:
                report.near_misses.append(_near_miss(refused))
        settled = declared.settle(changed, plan)
        report.notes += declared.notes()
    return report, settled


def _replace_all(findings: Findings, gm: fx.GraphModule, context: Context, declared: DeclaredOps, config: Config,
                 report: Report, before_change: Callable[[], None] | None) -> bool:
    """Replace the chains that were found; True when the graph changed."""
    report.visits = findings.visits + sum(context.counters.values())
    if not findings.chains:
        return False
    if before_change is not None:
        before_change()
    read_sizes_from_inputs(gm.graph)
    facts = GraphFacts(gm.graph)
    mutation = facts.mutation()
    changed = False
    for chain in findings.chains:
        if mutation is not None:
            refusal = Refused(
                "bgemm", f"{mutation.name} changes an intermediate value in place: functionalise the graph "
                "first (torch.func.functionalize, or make_fx under it)", mutation)
            report.near_misses.append(_near_miss(refusal, source_line(chain.anchors[0].node)))
            continue
        if _handle(chain, gm, context.sizes[0], facts, config, report):
            changed = True
            _note_numbers(chain, declared, config, report)
    return changed


def _note_numbers(chain: Chain, declared: DeclaredOps, config: Config, report: Report) -> None:
    """What became of ``Config(o_proj="fp8")`` at a chain that was just fused: it changes the numbers, and says so."""
    if config.o_proj != "fp8":
        return
    if declared.changes_numbers(chain.anchors[0].node):
        fused = report.fused[-1]
        report.fused[-1] = dataclasses.replace(
            fused, gate=f"{fused.gate}; o_proj='fp8': numbers changed, the source computes this projection with "
            "unquantised weights")
        note = "o_proj='fp8': numbers changed, projections with FP8 weights at hand are computed in FP8"
    elif chain.quantisation is None:
        note = ("o_proj='fp8': no FP8 weights at hand for a projection, which stays as written: attach them with "
                "fusion_pass.models.attach_fp8_weights(model)")
    else:
        return
    if note not in report.notes:
        report.notes.append(note)


def _handle(chain: Chain, gm: fx.GraphModule, sizes: Sizes, facts: GraphFacts, config: Config,
            report: Report) -> bool:
    """Gate and replace one chain; True when the graph changed."""
    where = source_line(chain.anchors[0].node)
    if chain.attention_refused is not None and not chain.attention_refused.silent:
        report.near_misses.append(_near_miss(chain.attention_refused, where))
    decision = compile_time_gate(chain, config)
    if not decision.fuse:
        report.gated.append(GatedChain(roles=chain.roles, gate=decision.reason, where=where))
        return False
    pending: list[int] = []

    def validate(old: fx.Node, new: fx.Node) -> fx.Node:
        return validation.insert(old, new, pending[0])

    if config.verify in ("first", "always"):
        pending.append(validation.reserve())
    twice = kept_alive(chain, facts)
    sources = _sources(chain)
    with _recording(gm.graph) as new:
        outcome = replace_chain(chain, gm.graph, sizes, facts, config, validate if pending else None)
    if isinstance(outcome, Refused):
        for node in reversed(new):
            if not node.users:
                gm.graph.erase_node(node)
        report.near_misses.append(_near_miss(outcome, where))
        return False
    stack = chain.anchors[0].node.meta.get("stack_trace")
    for node in new:
        node.meta.setdefault("stack_trace", stack)
        node.meta.setdefault("from_node", list(sources))
        node.meta.setdefault("fusion_pass", {"roles": chain.roles, "op": outcome.op, "chain": len(report.fused)})
    for anchor in chain.anchors:
        anchor.node.meta[PRODUCT] = True
    quantisation = chain.quantisation
    gate = decision.reason
    if twice is not None:
        gate += f"; {twice.name} is read by others too, so the source's part up to there stays and is computed as well"
    if config.batch_invariant:
        own = "fp8_bgemm" in outcome.op
        gate += "; batch invariant: keys not split, fixed tiles" + ("" if own else " (the projection is torch's own)")
    fused = FusedChain(
        roles=chain.roles, quant=None if quantisation is None else quantisation.rule,
        group=None if quantisation is None else quantisation.block, op=outcome.op, where=where, gate=gate)
    report.fused.append(fused)
    if pending:
        values = [n.meta["val"] for n in (chain.rotation.source, chain.rotation.node)]
        validation.record(pending[0], fused, report, validation.budget_of(values, quantisation is not None),
                          config.verify == "always")
        report.notes.append(f"validated at run time ({config.verify}): the source's computation stays in the graph")
    log.debug("fused %s at %s into %s", chain.roles, where, outcome.op)
    return True


def _sources(chain: Chain) -> list[NodeSource]:
    """What the nodes that replace ``chain`` stand for, in the form in which torch follows nodes through its passes
    (``meta["from_node"]``). Written down before the replacement, which erases some of them."""
    products = [anchor.node for anchor in chain.anchors] if chain.weight is not None else []
    nodes = dict.fromkeys([chain.rotation.source, chain.rotation.node, *products])
    return [NodeSource(node, "fusion_pass", NodeSourceAction.REPLACE) for node in nodes]


@contextlib.contextmanager
def _recording(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Collects the nodes that are created in ``graph``, in order of creation."""
    created: list[fx.Node] = []
    create = graph.create_node

    def recorded(*args: Any, **kwargs: Any) -> fx.Node:
        node = create(*args, **kwargs)
        created.append(node)
        return node

    graph.create_node = recorded  # type: ignore[method-assign]
    try:
        yield created
    finally:
        del graph.create_node


def _near_miss(refused: Refused, chain: str = "") -> NearMiss:
    """``chain``: the line of the chain's product, for a place in the graph that has none (its output, an input)."""
    return NearMiss(role=refused.role, reason=refused.reason, where=source_line(refused.node) or chain)


@contextlib.contextmanager
def _no_guards(gm: fx.GraphModule) -> Iterator[None]:
    """Metadata of new nodes is computed on fake tensors; no guard may come from that."""
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            mode = torch._guards.detect_fake_mode([value])
            shape_env = getattr(mode, "shape_env", None)
            if shape_env is not None:
                with shape_env.suppress_guards():
                    yield
                return
            break
    yield
