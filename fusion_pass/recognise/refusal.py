"""A recognition that ended: which role, why, and at which node."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.fx as fx

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
# Torch's own folder; traces of a program that was exported elsewhere name another one, in its site-packages.
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"


@dataclass(frozen=True)
class Refused:
    """``role`` was looked for and not found, because of ``reason``; ``node`` is the place in the graph.

    ``silent``: nothing of the chain was there at all, so nobody needs to hear of it.
    """

    role: str
    reason: str
    node: fx.Node | None = None
    silent: bool = False


def source_line(node: fx.Node | None) -> str:
    """The user's ``file.py:line`` for a node, from the stack trace that tracing recorded; "" when there is none. Lines
    of this package (its FP8 linear layer) count only where nothing else called them."""
    trace = node.meta.get("stack_trace") if node is not None else None
    if not trace:
        return ""
    lines = [line.strip() for line in trace.strip().splitlines() if line.strip().startswith('File "')]
    own = ""
    for line in reversed(lines):
        path, _, rest = line[len('File "'):].partition('", line ')
        place = f"{path}:{rest.split(',')[0]}"
        if path.startswith(_PACKAGE):
            own = own or place
        elif not (path.startswith(_TORCH) or "-packages/torch/" in path):
            return place
    return own
