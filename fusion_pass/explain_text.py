"""A report as text for a terminal: what ``str(report)`` says, with what can be done, estimates and sub-graphs."""

from __future__ import annotations

from .advice import advice
from .details import ChainDetail, Cost, GraphDetail
from .explain_html import _bytes, _flops, _range
from .explain_shares import words
from .report import Report

_ESTIMATED = ("estimates from shapes alone: launches with and without merging of pointwise operators; traffic with it; "
              "other: projections, norms, residual streams, and what is unknown")


def text(report: Report, *, graphs: bool = False) -> str:
    """The report with advice for near misses and gated chains, and with estimates where it has details; ``graphs``
    adds every chain's sub-graph before and after."""
    lines = [str(report)]
    for miss in report.near_misses:
        lines.append(f"  to fix     {miss.role}: {advice(miss)}")
    for chain in report.gated:
        if advice(chain):
            lines.append(f"  to change  {chain.roles[0]}: {advice(chain)}")
    for number, graph in enumerate(report.details):
        lines += _graph(number, graph)
        for detail in graph.chains:
            lines += _chain(detail, graphs)
    if report.details:
        lines.append(f"  ({_ESTIMATED})")
    return "\n".join(lines)


def _graph(number: int, graph: GraphDetail) -> list[str]:
    lines = [f"  graph {number}    {graph.nodes_before} nodes before, {graph.nodes_after} after; outside of the chains "
             f"{graph.share_of_flops_outside:.0%} of {_flops(graph.total.flops)} and "
             f"{graph.share_of_bytes_outside:.0%} of {_bytes(graph.total.bytes)} of traffic"]
    for column, what in enumerate(("FLOPs", "traffic")):
        if parts := words(graph, column):
            lines.append(f"             {what} outside: {parts}")
    return lines


def _chain(detail: ChainDetail, graphs: bool) -> list[str]:
    before, after = detail.cost_before, detail.cost_after
    lines = [f"    chain {detail.index}  launches {_launches(before)} before, {_launches(after)} after; memory traffic "
             f"{_bytes(before.bytes)} before, {_bytes(after.bytes)} after"]
    if graphs:
        for title, nodes in (("before", detail.before), ("after", detail.after)):
            lines += [f"      {title}: {len(nodes)} nodes", *(f"        {node}" for node in nodes)]
    return lines


def _launches(cost: Cost) -> str:
    return _range(cost.least, cost.most)
