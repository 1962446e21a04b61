"""A property that a node has by itself or by its inputs, asked of whole cones without recursion and once per node."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping

import torch
import torch.fx as fx


def has_property(node: fx.Node, answers: MutableMapping[fx.Node, bool], own: Callable[[fx.Node], bool | None], *,
          decided_by: bool, limit: int | None = None) -> bool:
    """Whether a property holds at ``node``; ``answers`` keeps what was found out of the nodes on the way.

    ``own`` is the answer of a node by itself, None where its tensor inputs decide: one input whose answer is
    ``decided_by`` gives that answer, else it is the other one (also of a node without tensor inputs). So
    ``decided_by=True`` means "any input", ``decided_by=False`` "all inputs". After ``limit`` inputs the answer is no
    for whatever is still open.
    """
    stack, passed = [node], 0
    while stack:
        here = stack[-1]
        if here in answers:
            stack.pop()
            continue
        answer = own(here)
        if answer is None:
            inputs = tensor_inputs(here)
            missing = [n for n in inputs if n not in answers]
            if any(answers.get(n) is decided_by for n in inputs):
                answer = decided_by
            elif limit is not None and passed > limit:
                answer = False
            elif missing:
                passed += len(missing)
                stack.append(missing[0])
                continue
            else:
                answer = not decided_by
        answers[here] = answer
    return answers[node]


def is_tensors(value: object) -> bool:
    """Whether a node's value is a tensor, or the tensors of a split or of an operator with several results."""
    return isinstance(value, torch.Tensor) or isinstance(value, (list, tuple)) and any(
        isinstance(v, torch.Tensor) for v in value)


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if is_tensors(n.meta.get("val"))]
