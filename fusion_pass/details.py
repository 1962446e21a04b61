"""What :func:`fusion_pass.explain` knows of a rewritten graph beyond the report: sub-graphs and estimates.

Estimates follow from shapes alone. ``launches``: ``most`` counts every computing operator as one kernel (eager
execution), ``least`` merges every connected run of pointwise and reducing operators (a perfect fusing compiler).
``bytes``: with that perfect fusion, each kernel reads its inputs and writes its results once, and nothing stays in a
cache. Both sides of a comparison are counted in the same way, so what is said to be saved is what fusion of pointwise
operators alone could not save.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from .elements.moves import is_float_cast, is_move
from .parts import PARTS, part_of

_OWN_KERNEL = frozenset({
    "bmm", "mm", "addmm", "baddbmm", "matmul", "einsum", "_scaled_mm", "_grouped_mm", "convolution", "topk", "sort",
    "index_put", "scatter", "scatter_add", "nonzero", "linear", "_scaled_grouped_mm", "cumsum",
})
_CONTRACTIONS = frozenset({"bmm", "mm", "addmm", "baddbmm", "matmul", "einsum", "_scaled_mm", "fp8_bgemm",
                           "convolution"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Estimated kernels (``least`` with perfect fusion, ``most`` without), bytes moved and floating-point operations
    of contractions."""

    least: int = 0
    most: int = 0
    bytes: int = 0
    flops: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainDetail:
    """One fused chain: ``index`` in ``Report.fused``, the sub-graph before and after as lines of text (the projection
    that reads the result included), and what either costs."""

    index: int
    before: list[str]
    after: list[str]
    cost_before: Cost
    cost_after: Cost


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphDetail:
    """One graph: its cost before the pass, the part of it that lies in fused chains, and the chains.

    outside: cost of what no chain contains, by part of the model (:data:`fusion_pass.parts.PARTS`).
    """

    nodes_before: int
    nodes_after: int
    total: Cost
    in_chains: Cost
    chains: list[ChainDetail]
    outside: dict[str, Cost] = dataclasses.field(default_factory=dict)

    @property
    def share_of_flops_outside(self) -> float:
        """Share of the graph's floating-point operations that no chain contains (0 to 1)."""
        return 1 - self.in_chains.flops / self.total.flops if self.total.flops else 1.0

    @property
    def share_of_bytes_outside(self) -> float:
        """Share of the graph's memory traffic that no chain contains (0 to 1)."""
        return 1 - min(self.in_chains.bytes / self.total.bytes, 1.0) if self.total.bytes else 1.0

    def shares_outside(self) -> dict[str, tuple[float, float]]:
        """By part, its share of the graph's floating-point operations and of its memory traffic; together they make
        :attr:`share_of_flops_outside` and :attr:`share_of_bytes_outside`.

        Traffic between two parts is written by one and read by the other, while a fused kernel may span both: what lies
        outside is divided in proportion to the traffic that each part would have alone.
        """
        flops, traffic = (sum(getattr(c, name) for c in self.outside.values()) for name in ("flops", "bytes"))
        return {part: (self.share_of_flops_outside * found.flops / flops if flops else 0.0,
                       self.share_of_bytes_outside * found.bytes / traffic if traffic else 0.0)
                for part, found in self.outside.items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> GraphDetail:
        """The inverse of ``dataclasses.asdict``."""
        chains = [ChainDetail(**{**chain, "cost_before": Cost(**chain["cost_before"]),
                                 "cost_after": Cost(**chain["cost_after"])}) for chain in values["chains"]]
        return cls(**{**values, "total": Cost(**values["total"]), "in_chains": Cost(**values["in_chains"]),
                      "chains": chains,
                      "outside": {part: Cost(**found) for part, found in values.get("outside", {}).items()}})


def describe(before: fx.Graph, after: fx.Graph) -> GraphDetail:
    """Compare a graph with its rewritten copy. New nodes carry ``meta["fusion_pass"]["chain"]``, the index of their
    chain in the report; all other nodes have the names that they had."""
    new: dict[int, list[fx.Node]] = {}
    for node in after.nodes:
        if "fusion_pass" in node.meta:
            new.setdefault(node.meta["fusion_pass"]["chain"], []).append(node)
    added = {node for nodes in new.values() for node in nodes}
    kept = {node.name for node in after.nodes if node not in added}
    old = {node.name: node for node in before.nodes}
    taken: set[fx.Node] = set()
    chains, inside = [], set()
    for index, nodes in sorted(new.items()):
        readers = [user for node in nodes for user in node.users if user not in added]
        removed = _removed([old[r.name] for r in readers if r.name in old], kept) - taken
        taken |= removed
        projections = _projections(removed) or {old[n.name] for n in _projections(set(nodes)) if n.name in old}
        after_projections = _projections(set(nodes))
        inside |= removed | projections
        chains.append(ChainDetail(
            index=index,
            before=_lines(before, removed | projections), after=_lines(after, set(nodes) | after_projections),
            cost_before=cost(removed | projections), cost_after=cost(set(nodes) | after_projections)))
    outside: dict[str, list[fx.Node]] = {part: [] for part in PARTS}
    for node in before.nodes:
        if node not in inside and node.op == "call_function":
            outside[part_of(node)].append(node)
    return GraphDetail(nodes_before=len(before.nodes), nodes_after=len(after.nodes), total=cost(before.nodes),
                       in_chains=cost(inside), chains=chains,
                       outside={part: cost(nodes) for part, nodes in outside.items()})


def _removed(readers: Iterable[fx.Node], kept: set[str]) -> set[fx.Node]:
    """Nodes behind ``readers`` that are gone after the pass."""
    found: set[fx.Node] = set()
    stack = [n for reader in readers for n in reader.all_input_nodes if n.name not in kept]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += [n for n in node.all_input_nodes if n.name not in kept]
    return found


def _projections(nodes: set[fx.Node]) -> set[fx.Node]:
    """Contractions outside of ``nodes`` that read a result of theirs, through operators that only move elements."""
    found, seen = set(), set()
    stack = [user for node in nodes for user in node.users if user not in nodes]
    while stack:
        node = stack.pop()
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        if _name(node) in _CONTRACTIONS:
            found.add(node)
        elif is_move(node) or is_float_cast(node):
            stack += node.users
    return found


# ---------------------------------------------------------------------------------------------------------- estimates


def cost(nodes: Iterable[fx.Node]) -> Cost:
    """The estimate for some nodes of one graph; see the module's text."""
    computing = [n for n in nodes if n.op == "call_function" and _tensors(n) and not _moves_nothing(n)]
    group = {node: node for node in computing}

    def root(node: fx.Node) -> fx.Node:
        while group[node] is not node:
            node = group[node]
        return node

    for node in computing:
        if not _has_own_kernel(node):
            for source in map(_base, node.all_input_nodes):
                if source in group and not _has_own_kernel(source):
                    group[root(source)] = root(node)
    reads: dict[tuple[fx.Node, fx.Node], set[fx.Node]] = {}
    written = 0
    for node in computing:
        here = root(node)
        for argument in node.all_input_nodes:
            source = _base(argument)
            if source not in group or root(source) is not here:
                reads.setdefault((here, source), set()).add(argument)
        if any(user not in group or root(user) is not here for user in _readers(node)):
            written += _bytes(node)
    # Views read what they show, but together no more than there is.
    read = sum(min(sum(map(_bytes, views)), _bytes(source)) for (_, source), views in reads.items())
    return Cost(least=len({root(node) for node in computing}), most=len(computing),
                bytes=read + written, flops=sum(map(_flops, computing)))


def _moves_nothing(node: fx.Node) -> bool:
    return node.target is operator.getitem or bool(getattr(node.target, "is_view", False)) or _name(node) in (
        "_unsafe_view", "alias", "detach", "lift_fresh_copy", "sym_size")


def _base(node: fx.Node) -> fx.Node:
    """The node whose memory this one shows."""
    while node.op == "call_function" and _moves_nothing(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _readers(node: fx.Node) -> list[fx.Node]:
    """Users, through views."""
    found, stack = [], list(node.users)
    while stack:
        user = stack.pop()
        if user.op == "call_function" and _moves_nothing(user):
            stack += user.users
        else:
            found.append(user)
    return found


def _has_own_kernel(node: fx.Node) -> bool:
    namespace = getattr(node.target, "namespace", "")
    return namespace not in ("aten", "prims") or _name(node) in _OWN_KERNEL or "attention" in _name(node)


def _flops(node: fx.Node) -> int:
    from torch.utils.flop_counter import flop_registry

    formula: Callable[..., int] | None = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: _sized(n.meta.get("val")))
    try:
        return int(formula(*args, **kwargs, out_val=_sized(node.meta["val"])))
    except Exception:       # an estimate: an operator whose formula wants other arguments counts nothing
        return 0


def _sized(value: Any) -> Any:
    """A tensor's metadata with example sizes in place of symbols."""
    if isinstance(value, torch.Tensor):
        return torch.empty([_int(s) for s in value.shape], dtype=value.dtype, device="meta")
    return value


def _int(size: Any) -> int:
    if isinstance(size, int):
        return size
    hint = getattr(size.node, "hint", None)
    return 1 if hint is None else int(hint)


def _bytes(node: fx.Node) -> int:
    total = 0
    for tensor in _tensors(node):
        count = tensor.element_size()
        for size in tensor.shape:
            count *= _int(size)
        total += count
    return total


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return [v for v in values if isinstance(v, torch.Tensor)]


# --------------------------------------------------------------------------------------------------------------- text

_SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64", "int64": "i64", "int32": "i32",
          "bool": "b8", "float8_e4m3fn": "e4m3", "float8_e8m0fnu": "e8m0", "uint8": "u8"}


def _lines(graph: fx.Graph, nodes: set[fx.Node]) -> list[str]:
    return [line(node) for node in graph.nodes if node in nodes]


def line(node: fx.Node) -> str:
    """One node as text: ``name: dtype[shape] = namespace.op(arguments)``."""
    types = ", ".join(_type(t) for t in _tensors(node))
    arguments = ", ".join([_argument(a) for a in node.args] + [f"{k}={_argument(v)}" for k, v in node.kwargs.items()])
    target = "getitem" if node.target is operator.getitem else f"{getattr(node.target, 'namespace', '')}.{_name(node)}"
    return f"{node.name}: {types} = {target.lstrip('.')}({arguments})"


def _type(tensor: torch.Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    return f"{_SHORT.get(name, name)}[{', '.join(map(str, tensor.shape))}]"


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_argument, value))}]"
    if isinstance(value, torch.dtype):
        return _SHORT.get(str(value).removeprefix("torch."), str(value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _name(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return str(getattr(packet, "__name__", None) or getattr(node.target, "__name__", node.target))
