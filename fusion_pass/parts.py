"""Which part of a model a node belongs to: what lies outside of the fused chains is told apart by it.

The part is read from where the node came from: the stack of modules that Dynamo and ``torch.export`` write into
``nn_module_stack``, else the source lines of ``stack_trace``; the innermost module or call with a telling name decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import fx

PARTS = ("indexer", "compressor", "experts", "other")
"""``indexer`` (chooses the rows that attention reads), ``compressor`` (makes the compressed rows), ``experts`` (router
and shared experts included), ``other`` (projections, norms, residual streams, head, and whatever is unknown)."""

_NAMES = (
    ("indexer", re.compile(r"indexer", re.I)),
    ("compressor", re.compile(r"compressor|compress_kv|kv_compress", re.I)),
    ("experts", re.compile(r"[Ee]xpert|(?:^|_)moe(?:_|$)|MoE|Moe(?![a-z])")),
)
_FRAME = re.compile(r'File "[^"]*", line \d+, in (\S+)\n\s*(.*)')
_CALLED = re.compile(r"([A-Za-z_][\w.]*)\s*\(")


def part_of(node: fx.Node) -> str:
    """One of :data:`PARTS`."""
    for name in _origins(node):
        for part, pattern in _NAMES:
            if pattern.search(name):
                return part
    return "other"


def _origins(node: fx.Node) -> Iterator[str]:
    """Names of modules, their classes and of functions, from the inside out."""
    stack = node.meta.get("nn_module_stack") or {}
    for entry in reversed(list(stack.values())):
        path, kind = entry[0], entry[1]
        # The last step only: what stands before it are the modules around, which have entries of their own.
        yield str(path).rstrip("]'\"").rpartition(".")[2]
        yield kind.rpartition(".")[2] if isinstance(kind, str) else getattr(kind, "__name__", "")
    if stack:
        return
    for function, line in reversed(_FRAME.findall(node.meta.get("stack_trace") or "")):
        yield function
        # The outermost call of the line; what is computed for its arguments is not told apart from it.
        yield next(iter(_CALLED.findall(line)), "")
