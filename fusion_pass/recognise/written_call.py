"""A call of a declared op in a functional graph: direct, or inside ``auto_functionalized`` (version 1 or 2)."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops import auto_functionalize as af
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

from ..fx_access import args_of, kwargs_of, target_of
from ..patterns.opaque import NotExpanded

Expand = Callable[..., tuple[Any, ...]]


@dataclass(frozen=True)
class Call:
    """arguments: in the order of the schema, nodes or constants. operands: the nodes the call reads. readers: nodes
    that stand for a result, with its position in what ``evaluate`` returns."""

    node: fx.Node
    schema: torch._C.FunctionSchema
    arguments: list[Any]
    operands: list[fx.Node]
    readers: list[tuple[fx.Node, int]]

    def evaluate(self, expand: Callable[..., tuple[Any, ...]], value_of: Callable[[fx.Node], Any]) -> tuple[Any, ...]:
        """What the call computes, by ``expand``, with ``value_of`` the operands: results, then changed arguments (or,
        for version 2, their whole buffers)."""
        if self.node.target is af.auto_functionalized_v2:
            return self._evaluate_v2(expand, value_of)
        arguments = [fx.node.map_arg(a, value_of) for a in self.arguments]
        results = tuple(_invoke(expand, self.schema, arguments))
        return self._padding() + results

    def _padding(self) -> tuple[Any, ...]:
        # A functionalised op without results has None in their place.
        hop = self.node.target is af.auto_functionalized or self.node.target is af.auto_functionalized_v2
        return (None,) if hop and not self.schema.returns else ()

    def _evaluate_v2(self, expand: Expand, value_of: Callable[[fx.Node], Any]) -> tuple[Any, ...]:
        given: dict[str, Any] = dict(fx.node.map_arg(kwargs_of(self.node), value_of))
        bases = list(given.pop("_all_bases", ()))
        names, types = af.get_mutable_args_from_schema(self.schema)
        infos = af.read_view_information_from_args(names, types, given, bases)
        places = {}
        for name in names:
            info = infos[name]
            if info is None:
                given[name] = None
                continue
            if isinstance(info, list):
                raise NotExpanded("a list of buffers")
            places[name] = _Place.of(info, bases[info.base_index])
            given[name] = places[name].read(bases[info.base_index])
        arguments = [given.get(a.name, a.default_value) for a in self.schema.arguments]
        results = tuple(_invoke(expand, self.schema, arguments))
        count = len(self.schema.returns)
        for name, new in zip(names, results[count:]):
            if name in places:
                at = infos[name].base_index
                bases[at] = places[name].write(bases[at], new)
        return self._padding() + results[:count] + tuple(bases)


def read_call(node: fx.Node) -> Call:
    """Raises NotExpanded for a form that is not functional."""
    if node.target is af.auto_functionalized or node.target is af.auto_functionalized_v2:
        schema = args_of(node)[0]._schema
        arguments = [node.kwargs.get(a.name, a.default_value) for a in schema.arguments]
        return Call(node, schema, arguments, node.all_input_nodes, _getitems(node))
    schema = target_of(node)._schema
    if schema.is_mutable:
        raise NotExpanded("it changes its arguments in place: functionalise the graph first")
    names = [a.name for a in schema.arguments]
    given = dict(zip(names, node.args)) | dict(node.kwargs)
    arguments = [given.get(a.name, a.default_value) for a in schema.arguments]
    readers = [(node, 0)] if len(schema.returns) == 1 else _getitems(node)
    return Call(node, schema, arguments, node.all_input_nodes, readers)


def _getitems(node: fx.Node) -> list[tuple[fx.Node, int]]:
    readers = []
    for user in node.users:
        if user.target is not operator.getitem:
            raise NotExpanded(f"its results are read by {user.name} as a whole")
        readers.append((user, int(args_of(user)[1])))
    return readers


def _invoke(expand: Expand, schema: torch._C.FunctionSchema, arguments: list[Any]) -> tuple[Any, ...]:
    """Arguments without a default by position, the others by name."""
    positional = [v for a, v in zip(schema.arguments, arguments) if not a.has_default_value()]
    named = {a.name: v for a, v in zip(schema.arguments, arguments) if a.has_default_value()}
    try:
        return expand(*positional, **named)
    except NotExpanded:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise NotExpanded(f"operands that do not fit its description: {error}") from error


@dataclass(frozen=True)
class _Place:
    """Where an argument that is changed in place lies in its buffer: the whole, a slice, or the whole reshaped."""

    kind: str
    detail: tuple[Any, ...]

    @staticmethod
    def of(info: Any, base: torch.Tensor) -> _Place:
        if isinstance(info, (af.NotView, af.AliasViewInfo)):
            return _Place("whole", ())
        if isinstance(info, af.SliceViewInfo):
            return _Place("slice", (info.dim, info.start, info.end))
        size, stride = tuple(info.size), tuple(info.stride)
        if statically_known_true(sym_eq(info.storage_offset, 0)) and base.is_contiguous():
            if len(size) == base.dim() <= 4:
                for order in itertools.permutations(range(base.dim())):
                    turned = base.permute(order)
                    if _same(turned.shape, size) and _same(turned.stride(), stride):
                        return _Place("permuted", order)
            flat = base.new_empty(size)
            if _same(flat.stride(), stride) and statically_known_true(sym_eq(flat.numel(), base.numel())):
                return _Place("reshaped", size)
        raise NotExpanded("it writes into a strided view of a buffer")

    def read(self, base: torch.Tensor) -> torch.Tensor:
        if self.kind == "slice":
            dim, start, end = self.detail
            part: torch.Tensor = torch.ops.aten.slice.Tensor(base, dim, start, end)
            return part
        if self.kind == "permuted":
            return base.permute(self.detail)
        return base.reshape(self.detail) if self.kind == "reshaped" else base

    def write(self, base: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        if self.kind == "slice":
            dim, start, end = self.detail
            return torch.slice_scatter(base, new, dim, start, end)
        if self.kind == "permuted":
            order = list(self.detail)
            return new.permute([order.index(d) for d in range(len(order))])
        return new.reshape(base.shape) if self.kind == "reshaped" else new


def _same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(statically_known_true(sym_eq(a, b)) for a, b in zip(left, right))
