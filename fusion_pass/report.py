"""What the pass did to a graph: every anchor ends as fused, gated (with the reason) or near miss (with the reason)."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from .details import GraphDetail

SCHEMA_VERSION = 1

ROLES = ("fmha", "kv_merge", "inverse_rope", "fp8_quant", "bgemm")
"""All roles, in the order of the data's way."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusedChain:
    """One chain that was replaced.

    roles: the roles in dataflow order, out of :data:`ROLES`.
    quant: rule of the quantisation scale: None (no quantisation), ``"fp32"`` (raw) or ``"ue8m0"`` (a power of two,
        whatever it is stored in).
    group: width of a quantisation block along K (128 or 32); None without quantisation.
    op: the op that stands there now, e.g. ``"fusion_pass.attention_rope_quant"``.
    where: the user's source line, ``"file.py:123"``.
    gate: decision and reason.
    """

    roles: tuple[str, ...]
    quant: str | None = None
    group: int | None = None
    op: str = ""
    where: str = ""
    gate: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "roles", _roles(self.roles))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedChain:
    """A chain that was recognised and deliberately left alone: ``gate`` says why."""

    roles: tuple[str, ...]
    gate: str
    where: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "roles", _roles(self.roles))


@dataclasses.dataclass(frozen=True, kw_only=True)
class NearMiss:
    """An anchor of which at least one further role was recognised: ``role`` is where recognition ended, ``reason``
    why.
    """

    role: str
    reason: str
    where: str = ""


@dataclasses.dataclass(kw_only=True)
class Report:
    """What became of the anchors of one graph, or of several merged ones.

    fused, gated, near_misses: one entry per anchor; an ordinary model's report is empty in all three.
    notes: what concerns the graph as a whole: the kill switch, a training graph that was refused, how results were
    verified.
    details: sub-graphs and estimates, one entry per graph that has a fused chain; filled by ``explain`` only.
    graphs: number of graphs in this report. nodes: nodes of the graph before the pass.
    visits: nodes (and elements) the pass looked at. seconds: wall time the pass took.
    """

    fused: list[FusedChain] = dataclasses.field(default_factory=list)
    gated: list[GatedChain] = dataclasses.field(default_factory=list)
    near_misses: list[NearMiss] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    details: list[GraphDetail] = dataclasses.field(default_factory=list)
    graphs: int = 1
    nodes: int = 0
    visits: int = 0
    seconds: float = 0.0

    def __bool__(self) -> bool:
        """True when there is anything to tell about an anchor."""
        return bool(self.fused or self.gated or self.near_misses)

    @classmethod
    def merge(cls, reports: Iterable[Report]) -> Report:
        """One report for several graphs (of a model with graph breaks, or of a nested region). Notes are kept once
        each.
        """
        total = cls(graphs=0)
        for report in reports:
            total.details += [_shifted(detail, len(total.fused)) for detail in report.details]
            total.fused += report.fused
            total.gated += report.gated
            total.near_misses += report.near_misses
            total.notes += [note for note in report.notes if note not in total.notes]
            total.graphs += report.graphs
            total.nodes += report.nodes
            total.visits += report.visits
            total.seconds += report.seconds
        return total

    def to_dict(self) -> dict[str, Any]:
        """Plain values with ``schema_version``; :meth:`from_dict` is the inverse. Near misses and gated chains carry an
        ``advice`` as well: what to do about them."""
        values: dict[str, Any] = {"schema_version": SCHEMA_VERSION}
        values.update(dataclasses.asdict(self))
        for chain in (*values["fused"], *values["gated"]):
            chain["roles"] = list(chain["roles"])
        from .advice import advice  # late: it reads the classes of this module

        entries: list[NearMiss | GatedChain] = [*self.near_misses, *self.gated]
        for written, entry in zip((*values["near_misses"], *values["gated"]), entries):
            written["advice"] = advice(entry)
        return values

    def to_json(self, indent: int | None = None) -> str:
        """:meth:`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Report:
        """The report that :meth:`to_dict` described. Raises ValueError for another schema version."""
        rest = dict(values)
        version = rest.pop("schema_version", None)
        if version != SCHEMA_VERSION:
            raise ValueError(f"Report.from_dict: expected schema_version {SCHEMA_VERSION}, got {version!r}")
        return cls(
            fused=[FusedChain(**chain) for chain in rest.pop("fused")],
            gated=[GatedChain(**_without_advice(chain)) for chain in rest.pop("gated")],
            near_misses=[NearMiss(**_without_advice(miss)) for miss in rest.pop("near_misses")],
            details=[GraphDetail.from_dict(detail) for detail in rest.pop("details", [])],
            **rest,
        )

    def __str__(self) -> str:
        lines = [f"fusion_pass: {self.summary()}"]
        for chain in self.fused:
            lines.append(f"  fused      {' -> '.join(chain.roles)}{_quant(chain)}{_at(chain.where)}")
            lines.append(f"             now {chain.op}" + (f"; gate: {chain.gate}" if chain.gate else ""))
        for gated in self.gated:
            lines.append(f"  gated      {' -> '.join(gated.roles)}{_at(gated.where)}")
            lines.append(f"             left alone: {gated.gate}")
        for miss in self.near_misses:
            lines.append(f"  near miss  {miss.role}{_at(miss.where)}")
            lines.append(f"             {miss.reason}")
        lines += [f"  note       {note}" for note in self.notes]
        return "\n".join(lines)

    def summary(self) -> str:
        """One line: the counts, the size of what was looked at, the time."""
        near_misses = _plural(len(self.near_misses), "near miss", "near misses")
        graphs = _plural(self.graphs, "graph", "graphs")
        return (
            f"{len(self.fused)} fused, {len(self.gated)} gated, {near_misses} in {graphs} "
            f"({self.nodes} nodes, {self.visits} visits, {self.seconds:.3f} s)"
        )


def _shifted(detail: GraphDetail, by: int) -> GraphDetail:
    chains = [dataclasses.replace(chain, index=chain.index + by) for chain in detail.chains]
    return dataclasses.replace(detail, chains=chains)


def _roles(roles: Iterable[str]) -> tuple[str, ...]:
    roles = tuple(roles)
    unknown = [role for role in roles if role not in ROLES]
    if unknown:
        raise ValueError(f"unknown role {unknown[0]!r}: the roles are {', '.join(ROLES)}")
    if list(roles) != sorted(roles, key=ROLES.index):
        raise ValueError(f"roles {roles} are not in dataflow order {ROLES}")
    return roles


def _at(where: str) -> str:
    return f" at {_short(where)}" if where else ""


def _short(where: str) -> str:
    """A path as a reader wants it: from the package on, or from the current folder."""
    for folder in ("site-packages", "dist-packages"):
        _, found, rest = where.rpartition(f"/{folder}/")
        if found:
            return rest
    return where.removeprefix(f"{os.getcwd()}/")


def _quant(chain: FusedChain) -> str:
    if chain.quant is None:
        return ""
    return f" [{chain.quant} scales" + (f", 1x{chain.group}]" if chain.group else "]")


def _without_advice(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != "advice"}


def _plural(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"
