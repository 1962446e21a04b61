"""What recognition finds: chains, and refusals."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.fx as fx

from ..elements.layouts import Axis
from .anchors import Anchor
from .attention_match import AttentionMatch, OutputAxes
from .projection import Fp8Weight, Grouping
from .quantisation import Quantisation
from .refusal import Refused
from .rotation import Rotation


@dataclass
class Chain:
    """One attention output with its rotation, and the contractions that read it.

    ``rotation.node`` is the node that the replacement produces (with the quantisation folded in when there is one).
    ``attention`` is None when the attention is opaque or refused (then ``attention_refused`` says why).
    """

    anchors: list[Anchor]
    rotation: Rotation
    grouping: Grouping
    quantisation: Quantisation | None = None
    weight: Fp8Weight | None = None
    attention: AttentionMatch | None = None
    attention_refused: Refused | None = None

    @property
    def roles(self) -> tuple[str, ...]:
        roles = list(self.attention.roles) if self.attention is not None else []
        roles.append("inverse_rope")
        if self.quantisation is not None:
            roles.append("fp8_quant")
        return (*roles, "bgemm")

    def quantities(self) -> dict[str, Any]:
        """What must not depend on the example's sizes, by name: equal for the same chain under another assignment of
        the size symbols."""
        rotation, grouping = self.rotation, self.grouping
        widths = [t.half_from for t in (rotation.cos, rotation.sin)]
        # Channels of a head in front of the rotated ones; those are as many as the tables' width says, or fixed.
        start = rotation.rope_start if None in widths else tuple(_place(w) for w in widths if w is not None)
        return {
            "the number of groups": grouping.groups,
            "the heads per group": grouping.heads_per_group,
            "the head's width": rotation.head_dim,
            "the first rotated channel": start,
            "the number of tokens": tuple(a.size if a.size_from is None else _place(a.size_from)
                                          for a in grouping.tokens),
            "the attention output": rotation.source.name,
            "the rotated tensor": rotation.node.name,
            "the tables of the rotation": tuple((t.node.name, t.part, t.negated) for t in (rotation.cos, rotation.sin)),
            "the axes along which the tables change": tuple(bool(a.cos) for a in grouping.tokens),
            "the quantisation": (None if self.quantisation is None
                                 else (self.quantisation.rule, self.quantisation.block)),
            "the roles": self.roles,
        }

    @property
    def output_axes(self) -> OutputAxes:
        return output_axes(self.rotation, self.grouping)


def _place(size_from: tuple[fx.Node, int]) -> tuple[str, int]:
    return size_from[0].name, size_from[1]


@dataclass
class Findings:
    chains: list[Chain] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    by_anchor: dict[fx.Node, Refused] = field(default_factory=dict)     # also of refusals that nobody else hears of
    visits: int = 0


def output_axes(rotation: Rotation, grouping: Grouping) -> OutputAxes:
    """The attention output's axes in the rotation's source."""
    return OutputAxes(tuple(Axis(a.size, a.source, a.size_from) for a in grouping.tokens),
                      Axis(grouping.heads, grouping.head_stride),
                      Axis(rotation.head_dim, rotation.channel_stride), rotation.offset)
