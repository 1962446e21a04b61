"""The same computation written twice: nodes that apply the same operators to the same inputs.

A loop in the source makes what does not depend on its variable anew in every round; traced graphs keep all copies.
"""

from __future__ import annotations

import torch
import torch.fx as fx

LIMIT = 64          # nodes that are compared


def congruent(first: fx.Node, second: fx.Node) -> bool:
    """Whether two nodes always have the same value, by the same operators on the same nodes."""
    pairs: set[tuple[fx.Node, fx.Node]] = set()
    stack = [(first, second)]
    while stack:
        a, b = stack.pop()
        if a is b or (a, b) in pairs:
            continue
        if len(pairs) > LIMIT or a.op != "call_function" or b.op != "call_function" or a.target is not b.target or (
                torch.Tag.nondeterministic_seeded in getattr(a.target, "tags", ())):
            return False
        pairs.add((a, b))
        if not _match(a.args, b.args, stack) or not _match(a.kwargs, b.kwargs, stack):
            return False
    return True


def _match(a: object, b: object, stack: list[tuple[fx.Node, fx.Node]]) -> bool:
    if isinstance(a, fx.Node) and isinstance(b, fx.Node):
        stack.append((a, b))
        return True
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_match(x, y, stack) for x, y in zip(a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_match(a[key], b[key], stack) for key in a)
    if isinstance(a, (torch.SymInt, torch.SymFloat)):
        return isinstance(b, type(a)) and bool(a.node.expr == b.node.expr)      # no guard
    return type(a) is type(b) and bool(a == b)
