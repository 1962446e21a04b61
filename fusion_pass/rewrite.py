"""The pass itself: from a functional ATen graph to its rewritten form and a report."""

from __future__ import annotations

from torch import fx

from .config import Config
from .report import Report


def run_on_graph(gm: fx.GraphModule, config: Config) -> Report:
    """Rewrite ``gm`` in place and report. ``config`` is resolved (see :meth:`Config.resolve`)."""
    return Report(nodes=len(gm.graph.nodes))
