"""Concrete sizes for a graph.

Element coordinates are concrete integers, so a graph with symbolic sizes is evaluated for one assignment of its size
symbols. The sizes are read from ``meta["val"]`` through sympy substitution: no SymInt is ever compared, so no guard
is added to the user's program.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx


class Unsized(Exception):
    """A node whose value carries no tensor metadata, or whose size cannot be made concrete."""


class Sizes:
    """Shapes, dtypes and concrete arguments of the nodes of one graph under one assignment of its size symbols.

    ``assignment`` maps sympy symbols to integers; symbols that are missing take their hint (the size that the user's
    example had). ``Sizes.candidates(graph)`` yields assignments that differ in every symbol.
    """

    def __init__(self, assignment: dict[sympy.Symbol, int] | None = None):
        self.assignment = dict(assignment or {})
        self.seen: set[fx.Node] = set()     # nodes that an engine has looked at, see recognise/coverage.py
        self.loads_move = True              # rolls, and loads by indices made from nothing (loads.py), are moves
        self.from_nothing: dict[fx.Node, bool] = {}                 # answers of constants.py
        self.may_be_known: dict[fx.Node, bool] = {}                 # answers of recognise/unchanged.py
        self.are_signs: dict[fx.Node, torch.Tensor | None] = {}
        self._shapes: dict[fx.Node, tuple[int, ...]] = {}
        self._numbers: dict[sympy.Expr, int | float] = {}

    def number(self, value: object) -> int | float | bool:
        """A Python number for an int, float, SymInt, SymFloat, or for the node that computes one."""
        if isinstance(value, fx.Node):
            value = value.meta.get("val")
        if isinstance(value, (bool, int, float)):
            return value
        if isinstance(value, torch.SymBool):
            return bool(self._substitute(value.node.expr))
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            known: Any = value.node
            if known.is_constant():
                return int(known.maybe_as_int()) if isinstance(value, torch.SymInt) else float(known.expr)
            number = self._substitute(value.node.expr, value.node.shape_env)
            return int(number) if isinstance(value, torch.SymInt) else float(number)
        raise Unsized(f"no number for {value!r}")

    def _substitute(self, expr: Any, shape_env: object = None) -> Any:
        if not isinstance(expr, sympy.Basic):
            return expr
        if expr not in self._numbers:
            values = {}
            for symbol in expr.free_symbols:
                if symbol not in self.assignment:
                    hint = symbol_hints(shape_env).get(symbol)
                    if hint is None:
                        raise Unsized(f"no value for the size symbol {symbol}")
                    self.assignment[symbol] = hint
                values[symbol] = self.assignment[symbol]
            self._numbers[expr] = expr.xreplace({s: sympy.sympify(v) for s, v in values.items()})
        result = self._numbers[expr]
        return float(result) if getattr(result, "is_Float", False) else (
            int(result) if getattr(result, "is_integer", True) else float(result))

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """Concrete shape of a tensor-valued node."""
        shape = self._shapes.get(node)
        if shape is None:
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor):
                raise Unsized(f"{node} has no tensor value")
            shape = tuple(int(self.number(s)) for s in value.shape)
            self._shapes[node] = shape
        return shape

    def numel(self, node: fx.Node) -> int:
        total = 1
        for size in self.shape(node):
            total *= size
        return total

    def argument(self, value: object) -> Any:
        """An operator argument with every symbolic number (and list of them) made concrete; tensors stay nodes."""
        if isinstance(value, (list, tuple)):
            return [self.argument(v) for v in value]
        if isinstance(value, fx.Node) and not isinstance(value.meta.get("val"), torch.Tensor):
            return self.number(value)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self.number(value)
        return value

    @staticmethod
    def dtype(node: fx.Node) -> torch.dtype:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            raise Unsized(f"{node} has no tensor value")
        return value.dtype

    @staticmethod
    def candidates(graph: fx.Graph) -> Iterator[Sizes]:
        """The hints first, then hints moved apart, so that two symbols never agree by accident."""
        yield Sizes()
        hints: dict[sympy.Symbol, int] = {}
        equal: dict[sympy.Symbol, sympy.Expr] = {}
        for node in graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, (torch.SymInt, torch.SymFloat)) and not value.node.is_constant():
                found = symbol_hints(value.node.shape_env)
                hints.update({s: found[s] for s in value.node.expr.free_symbols if s in found})
                equal = equal or _equalities(value.node.shape_env)
        if hints:
            for step in (1, 2, 5):
                values = {s: max(2, hint) + step * (i + 1) if isinstance(hint, int) else hint
                          for i, (s, hint) in enumerate(sorted(hints.items(), key=lambda kv: str(kv[0])))}
                for symbol, expr in equal.items():
                    if symbol in values and all(s in values for s in expr.free_symbols):
                        values[symbol] = int(expr.xreplace({s: sympy.Integer(values[s]) for s in expr.free_symbols}))
                yield Sizes(values)


def _equalities(shape_env: Any) -> dict[sympy.Symbol, sympy.Expr]:
    """Symbols that the program's guards make equal to others (``Eq(a + a // 16, b + a // 16)``: a is b), where the
    ShapeEnv itself has not replaced them. No symbol on the left stands on a right side."""
    found: dict[sympy.Symbol, sympy.Expr] = {}
    for guard in getattr(shape_env, "guards", ()):
        if not isinstance(guard.expr, sympy.Eq):
            continue
        difference = sympy.expand((guard.expr.lhs - guard.expr.rhs).xreplace(found))
        for symbol in sorted(difference.free_symbols, key=str, reverse=True):
            rest = difference - symbol
            if symbol not in rest.free_symbols:             # symbol + rest == 0
                solved = -rest
            elif symbol not in (difference + symbol).free_symbols:
                solved = difference + symbol
            else:
                continue
            found = {s: e.xreplace({symbol: solved}) for s, e in found.items()} | {symbol: solved}
            break
    return found


def symbol_hints(shape_env: object) -> dict[sympy.Symbol, int | float]:
    """The example values of a ShapeEnv's size symbols (the attribute was renamed between torch versions)."""
    for name in ("backed_var_to_val", "var_to_val"):
        table = getattr(shape_env, name, None)
        if table:
            return {s: (float(v) if getattr(v, "is_Float", False) else int(v)) for s, v in table.items()
                    if getattr(v, "is_number", isinstance(v, (int, float)))}
    return {}
