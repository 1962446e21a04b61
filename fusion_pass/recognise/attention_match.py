"""What was found out about an attention: its operands as elements of nodes of the graph.

All operands are given as families of elements (node, offset, axes in row-major index space), so that they can be
rebuilt as views in whatever layout the op wants (``attention_emit.py``), however the source laid them out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.fx as fx

from ..elements.layouts import Axis

if TYPE_CHECKING:
    from ..elements.layouts import Builder
    from .attention_emit import AttentionOperands, MergeOperands


@dataclass(frozen=True)
class OutputAxes:
    """Where the attention output lives in its node O: element (t.., h, d) is
    ``O[offset + sum(coordinate * stride)]`` in row-major index space; ``tokens`` outermost first (may be empty)."""

    tokens: tuple[Axis, ...]
    heads: Axis
    channels: Axis
    offset: int = 0


@dataclass(frozen=True)
class Cut:
    """The slice ``start:end`` of a dimension (negative: from the end; None: to the end)."""

    dim: int
    start: int
    end: int | None


@dataclass(frozen=True)
class Operand:
    """A family of elements of ``node``, or of ``node`` cut to ``cuts`` first (offset and strides are those of the cut
    value; needed where a part of a dimension of symbolic size is meant). ``fallbacks``: the same elements in nodes
    further down, for when a view of ``node`` cannot be written down."""

    node: fx.Node
    offset: int
    axes: tuple[Axis, ...]
    fallbacks: tuple[Operand, ...] = ()
    cuts: tuple[Cut, ...] = ()


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees. ``operand`` has the axes (tokens.., keys), stride 0 where it does not depend on one.

    ``kind`` "keep": bool, True = attend; "drop": bool, True = masked; "add": floating, added to the scaled score after
    multiplication by ``coefficient``.
    """

    operand: Operand
    kind: str
    coefficient: float = 1.0


@dataclass(frozen=True)
class KeyPiece:
    """Some of the keys: ``rows`` has the axes (tokens.., keys, D); token axes have stride 0 where rows are shared."""

    rows: Operand
    masks: tuple[Mask, ...] = ()

    @property
    def keys(self) -> Axis:
        return self.rows.axes[-2]


@dataclass(frozen=True)
class Gathered:
    """``rows[t, k] = pool[indices[t, k]]``, masked exactly where the index is negative: ``pool`` has the axes (N, D),
    ``indices`` (tokens.., K)."""

    pool: Operand
    indices: Operand


@dataclass(frozen=True)
class Partials:
    """Split-KV partials. ``parts`` have the axes (tokens.., H, D), or (P, tokens.., H, D) when ``stacked``; the
    statistics the same without D. ``total`` None: the partials are normalised and ``top`` is a log-sum-exp; else
    (top, total) are the row maximum and the sum. ``stat_scale`` turns ``top`` into a natural logarithm."""

    parts: tuple[Operand, ...]
    top: tuple[Operand, ...]
    total: tuple[Operand, ...] | None
    stacked: bool
    stat_scale: float = 1.0


@dataclass(frozen=True)
class AttentionMatch:
    """An attention that was proved to be

        softmax over keys and sink of (scale * q . k + mask), times the key rows themselves

    ``form``: "dense" (``q``, ``kv``, masks), or "partials" (only the merge is visible: ``partials``). ``gathered`` is
    set when a dense match may also be written with a pool and indices. ``sink`` has the axis (H); ``sink_gate`` (axes
    (tokens.., 1)) says for which tokens the sink counts, in the rare source that masks it. ``scale`` is multiplied by
    the single element ``scale_node`` when the source's scale is a tensor (Python floats are, under ``dynamic=True``).
    ``interior``: the nodes that the replacement makes unnecessary unless others read them.
    ``casts``: the roundings inside.
    """

    form: str
    axes: OutputAxes
    output: fx.Node
    roles: tuple[str, ...]
    q: Operand | None = None
    kv: tuple[KeyPiece, ...] = ()
    sink: Operand | None = None
    sink_gate: tuple[Mask, ...] = ()
    scale: float = 1.0
    scale_node: Operand | None = None
    gathered: Gathered | None = None
    partials: Partials | None = None
    interior: frozenset[fx.Node] = frozenset()
    casts: tuple[fx.Node, ...] = ()

    @property
    def token_count(self) -> int:
        total = 1
        for axis in self.axes.tokens:
            total *= axis.size
        return total

    def emit(self, builder: Builder) -> AttentionOperands | MergeOperands | None:
        """Insert the nodes that make the op's operands; None when a view cannot be written down.

        dense: ``AttentionOperands`` (q [B, S, H, D], kv [B, N, D], mask [B or 1, S, N] or None, sink [H] or None,
        scale), with B * S tokens in the order of ``axes.tokens``. partials: ``MergeOperands`` (partials
        [P, T, H, D], lse_or_max [P, T, H], sum or None, sink, stat_scale).
        """
        from .attention_emit import emit_attention, emit_merge
        return emit_merge(self, builder) if self.form == "partials" else emit_attention(self, builder)
