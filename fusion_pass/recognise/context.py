"""What every recogniser needs to know about the graph it looks at."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
import torch.fx as fx

from ..elements.contractions import Contraction
from ..elements.sizes import Sizes


@dataclass
class Context:
    """One graph under recognition.

    ``sizes`` are the assignments of the size symbols that a finding must hold for, the user's example first (a graph
    without symbols has one). ``counters`` counts node visits by recogniser: tests bound the pass's cost by them.
    ``fixed`` nodes belong to an op that stays as it is: they are looked through, and nothing is replaced among them.
    ``scratch`` are nodes that recognition put into the graph (joined operands of products that the source writes as a
    sum); what nobody reads in the end goes away again by ``discard_scratch``.
    """

    module: fx.GraphModule
    sizes: list[Sizes]
    counters: Counter[str] = field(default_factory=Counter)
    fixed: frozenset[fx.Node] = frozenset()
    scratch: list[fx.Node] = field(default_factory=list)
    sums: dict[tuple[fx.Node, Sizes], Contraction | None] = field(default_factory=dict)
    joined: dict[object, fx.Node] = field(default_factory=dict)
    _order: dict[fx.Node, int] = field(default_factory=dict)

    def discard_scratch(self) -> None:
        """Erase the nodes of ``scratch`` that nobody reads."""
        for node in reversed(self.scratch):
            if not node.users:
                node.graph.erase_node(node)
        self.scratch.clear()

    @staticmethod
    def of(module: fx.GraphModule) -> Context:
        """The context of a graph: hints, and for symbolic sizes one assignment in which no two symbols agree."""
        candidates = Sizes.candidates(module.graph)
        return Context(module, [sizes for _, sizes in zip(range(2), candidates)])

    def constant(self, node: fx.Node) -> object:
        """The value of a get_attr node, or of a graph input that an exported program always gives the same constant
        (``meta["lifted_constant"]``, see programs.py); None when there is none."""
        if node.op == "placeholder":
            return node.meta.get("lifted_constant")
        value: object = self.module
        for name in str(node.target).split("."):
            value = getattr(value, name, None)
        return value

    def tensor_constant(self, node: fx.Node) -> torch.Tensor | None:
        value = self.constant(node) if node.op in ("get_attr", "placeholder") else None
        return value if isinstance(value, torch.Tensor) else None

    def order(self, node: fx.Node) -> int:
        """Position in the graph: a node can only depend on nodes of a lower position."""
        if node not in self._order:
            self._order = {n: i for i, n in enumerate(self.module.graph.nodes)}
        return self._order[node]
