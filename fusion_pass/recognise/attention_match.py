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
    from .attention_emit import AttentionOperands, GatheredOperands, MergeOperands


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
    """The rows of one key piece as ``pool[indices[t, k] + first + sum(coordinate * step)]``; the piece's masks say
    which of them count.

    ``pool``: a node whose elements are rows of D, in row-major order. ``indices`` has the axes (tokens.., K); a
    negative one counts from ``wrapped`` when that is not 0. ``steps`` are rows per token axis (a batch's own part of
    the pool).
    """

    pool: fx.Node
    indices: Operand
    wrapped: int = 0
    first: int = 0
    steps: tuple[int, ...] = ()


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

    ``form``: "dense" (``q``, ``kv``, masks), or "partials" (only the merge is visible: ``partials``). ``gathered`` has
    one entry per piece of ``kv`` when a dense match may also be written with (one or two) pools and indices, by
    ``emit_gathered``. ``sink`` has the axis (H); ``sink_gate`` (axes (tokens.., 1)) says for which tokens the sink
    counts, in the rare source that masks it. ``scale`` is multiplied by the single element ``scale_node`` when the
    source's scale is a tensor (Python floats are, under ``dynamic=True``).
    ``interior``: the nodes that the replacement makes unnecessary unless others read them.
    ``casts``: the roundings inside. ``copies``: nodes with the same value as one of the operands' (a loop in the source
    computes it anew in every round), which nothing was looked at behind either.
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
    gathered: tuple[Gathered, ...] = ()
    partials: Partials | None = None
    interior: frozenset[fx.Node] = frozenset()
    casts: tuple[fx.Node, ...] = ()
    copies: frozenset[fx.Node] = frozenset()

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

    def emit_gathered(self, builder: Builder) -> GatheredOperands | None:
        """The operands of the gathered form: q [T, H, D], for every entry of ``gathered`` kv [N, D] and indices [T, K]
        (-1 where masked); None when there is no such form or a view cannot be written down."""
        from .attention_emit import emit_gathered
        return emit_gathered(self, builder) if self.gathered else None
