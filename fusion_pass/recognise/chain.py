"""From anchors to chains: every contraction of a rotated attention output, with all that stands before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from ..elements.follow import Follower
from ..elements.layouts import Axis
from ..elements.numeric import Unevaluated
from ..elements.sizes import Sizes, Unsized
from . import other_sizes
from .anchors import Anchor, find_anchors, way_back
from .attention_match import AttentionMatch, OutputAxes
from .attention_sizes import agreed
from .chain_types import Chain, Findings
from .context import Context
from .coverage import unseen
from .projection import recognise_fp8_weight, recognise_grouping
from .quant_path import CONTRACTIONS, FP8, Cones, QuantPath, dtype_of
from .quantisation import Quantisation, agrees_everywhere, recognise_quantisation
from .refusal import Refused
from .rotation import Rotation, recognise_rotation
from .structure import Structure, read_structure
from .transfer import cone_signature, transfer

aten = torch.ops.aten


PATIENCE = 2            # refused nodes on one way back before the anchor is given up: deeper ones differ in layout only
SOFTMAX = {aten.exp.default, aten.exp2.default, aten._softmax.default, aten.softmax.int, aten._safe_softmax.default,
           aten.sigmoid.default, aten.logsumexp.default}
NORMALISATION = {aten.rsqrt.default, aten.mean.dim, aten.embedding.default}


def behind_softmax(node: fx.Node, limit: int = 96) -> bool:
    """Might ``node`` be an attention output? Looks for an exponential behind it, through at most one contraction and
    no further than a normalisation. Cheap and generous: it only saves proofs that must fail."""
    queue, seen = [(node, 0)], {node}
    for here, depth in queue:
        if here.op != "call_function" or here.target in NORMALISATION:
            continue
        name = getattr(here.target, "__name__", "")
        if here.target in SOFTMAX or "scaled_dot_product" in name or "attention" in name:
            return True
        depth += here.target in CONTRACTIONS
        if depth > 1 or len(queue) > limit:
            continue
        for operand in here.all_input_nodes:
            if operand not in seen:
                seen.add(operand)
                queue.append((operand, depth))
    return False


@dataclass
class _Candidate:
    node: fx.Node
    structure: Structure
    rotation: Rotation | Refused
    path: QuantPath
    seen: set[fx.Node]


class ChainFinder:
    """Finds the chains of one graph under one assignment of its size symbols."""

    def __init__(self, context: Context, sizes: Sizes):
        self.context, self.sizes = context, sizes
        self.follower = Follower(sizes)
        self.cones = Cones()
        self._candidates: dict[fx.Node, _Candidate | None] = {}

    def find(self) -> Findings:
        findings = Findings()
        proven: list[Chain] = []
        given_up: set[int] = set()
        by_source: dict[fx.Node, list[tuple[Anchor, _Candidate]]] = {}
        waiting: list[tuple[Anchor, _Candidate]] = []

        def settle() -> None:
            """Finish the anchors whose outputs are complete, so that later layers can be recognised by them."""
            for anchors, found in self._chains(by_source):
                if isinstance(found, Refused):
                    findings.by_anchor.update((anchor.node, found) for anchor in anchors)
                if isinstance(found, Chain):
                    findings.chains.append(found)
                    proven.append(found)
                elif found.silent:
                    given_up.update(cone_signature(a.operand) for a, _ in waiting)
                else:
                    findings.refused.append(found)
            by_source.clear()
            waiting.clear()

        for anchor in find_anchors(self.context.module.graph, self.sizes):
            moved = next((m for m in (transfer(chain, anchor) for chain in proven) if m is not None), None)
            if moved is not None:
                findings.chains.append(moved)
                self.follower.visits += len(moved.attention.interior) if moved.attention is not None else 16
                continue
            if cone_signature(anchor.operand) in given_up:
                continue
            candidate = self._best_candidate(anchor)
            if candidate is None:
                given_up.add(cone_signature(anchor.operand))
                continue
            source = candidate.structure.source
            if by_source and source not in by_source:
                settle()
            by_source.setdefault(source, []).append((anchor, candidate))
            waiting.append((anchor, candidate))
        settle()
        findings.visits = self.follower.visits + self.cones.visits
        return findings

    def _best_candidate(self, anchor: Anchor) -> _Candidate | None:
        """The nearest node that holds a proven rotation, else the nearest that holds partly changed heads."""
        refused: list[_Candidate] = []
        for candidate in self._candidates_of(anchor):
            if isinstance(candidate.rotation, Rotation):
                return candidate
            refused.append(candidate)
            if len(refused) == PATIENCE:
                break
        return refused[0] if refused else None

    def _candidates_of(self, anchor: Anchor) -> Iterator[_Candidate]:
        """Nodes on the operand's way back that hold partly changed heads, nearest to the contraction first."""
        for node in way_back(anchor.operand, self.sizes, QuantPath(self.sizes, self.cones)):
            if node in self.context.fixed:
                continue
            if node not in self._candidates:
                self._candidates[node] = self._candidate(node)
            candidate = self._candidates[node]
            if candidate is not None:
                yield candidate

    def _candidate(self, node: fx.Node) -> _Candidate | None:
        kind = dtype_of(node)
        if kind is None or not (kind.is_floating_point or kind in FP8):
            return None
        seen: set[fx.Node] = set()
        self.sizes.seen = seen
        try:
            path = QuantPath(self.sizes, self.cones)
            structure = read_structure(node, self.sizes, self.follower, path)
            if structure is None:
                return None
            rotation = recognise_rotation(structure, self.sizes, self.follower, path)
            return _Candidate(node, structure, rotation, path, seen)
        except (Unsized, Unevaluated):
            return None

    def _chains(self, by_source: dict[fx.Node, list[tuple[Anchor, _Candidate]]],
                ) -> Iterator[tuple[list[Anchor], Chain | Refused]]:
        for group in by_source.values():
            for candidate, anchors in self._common(group):
                yield anchors, self._chain(candidate, anchors)

    def _common(self, group: list[tuple[Anchor, _Candidate]]) -> list[tuple[_Candidate, list[Anchor]]]:
        """One contraction: the node nearest to it. Several readers of one output: the node they all come from."""
        if len(group) == 1:
            return [(group[0][1], [group[0][0]])]
        every = [(anchor, list(self._candidates_of(anchor))) for anchor, _ in group]
        shared = [c for c in every[0][1] if all(c in candidates for _, candidates in every[1:])]
        good = [c for c in shared if isinstance(c.rotation, Rotation)]
        if good or shared:
            return [((good or shared)[0], [anchor for anchor, _ in group])]
        return [(candidate, [anchor]) for anchor, candidate in group]

    def _chain(self, candidate: _Candidate, anchors: list[Anchor]) -> Chain | Refused:
        rotation = candidate.rotation
        self.sizes.seen = set(candidate.seen)       # what other chains were proved by says nothing of this one
        if isinstance(rotation, Refused):
            # Of interest only if what was rotated is an attention output: every rotated query looks like this.
            source = candidate.structure.source
            is_output = source.op == "call_function" and behind_softmax(source) and any(
                isinstance(self._recognise_attention(source, axes), AttentionMatch)
                for axes in _guessed_axes(candidate.structure))
            return Refused(rotation.role, rotation.reason, rotation.node, silent=not is_output)
        path = QuantPath(self.sizes, self.cones)
        grouping = recognise_grouping(rotation, anchors, self.sizes, self.follower, path)
        if isinstance(grouping, Refused):
            return grouping
        if self._overlap(rotation, anchors):
            return Refused("bgemm", "the rotated output is read by more than the grouped projection: "
                           + ", ".join(a.node.name for a in anchors), anchors[-1].node)
        chain = Chain(anchors, rotation, grouping)
        if candidate.path.casts or candidate.path.scales:
            found = self._quantisation(rotation, candidate)
            if isinstance(found, Refused):
                return found
            chain.quantisation = found
            if len(anchors) == 1 and found.scales is None and rotation.node is anchors[0].operand and (
                    anchors[0].contraction.in_order()):
                chain.weight = recognise_fp8_weight(anchors[0].contraction, grouping.groups, self.sizes,
                                                    self.follower)
        return self._covered(self.with_attention(chain))

    def _quantisation(self, rotation: Rotation, candidate: _Candidate) -> Quantisation | Refused:
        try:
            return recognise_quantisation(rotation, candidate.path, self.sizes, self.follower,
                                          self.context.tensor_constant)
        except (Unsized, Unevaluated) as error:
            return Refused("fp8_quant", str(error), rotation.node)

    def _covered(self, chain: Chain) -> Chain | Refused:
        """Proofs look at samples; what lies on the way of other elements only is looked at here, or not removed."""
        missing = unseen(chain, self.sizes)
        if missing and chain.attention is not None:
            outside = unseen(dataclasses.replace(chain, attention=None), self.sizes)
            inside = [n for n in missing if n not in outside]
            if inside:
                chain.attention, chain.attention_refused = None, Refused(
                    "fmha", f"some tokens, heads or channels come by {inside[0].name}, apart from the others",
                    inside[0])
            missing = outside
        if missing and not agrees_everywhere(chain.rotation, chain.quantisation, self.sizes,
                                             self.context.tensor_constant):
            role = "inverse_rope" if chain.quantisation is None else "fp8_quant"
            return Refused(role, f"some tokens, heads or channels come by {missing[0].name}, apart from the others",
                           missing[0])
        return chain

    def _overlap(self, rotation: Rotation, anchors: list[Anchor]) -> bool:
        """Do two of the contractions read the same elements of the rotated output? (Loops over groups, blocks or tokens
        do not; a second consumer does.)"""
        if len(anchors) == 1:
            return False
        rows: list[Any] = []
        for anchor in anchors:
            lanes = anchor.contraction.indices(torch.zeros(1, dtype=torch.int64))[0][0]
            trace = self.follower.follow(anchor.operand, lanes, stop=frozenset([rotation.node]),
                                         through=QuantPath(self.sizes, self.cones))
            rows.extend(o.index for o in trace.origins if o.node is rotation.node)
        read = torch.cat(rows)
        return len(torch.unique(read)) < len(read)

    def with_attention(self, chain: Chain) -> Chain:
        found = self._recognise_attention(chain.rotation.source, chain.output_axes)
        if isinstance(found, AttentionMatch):
            chain.attention = found
        else:
            chain.attention_refused = found
        return chain

    def _recognise_attention(self, source: fx.Node, axes: OutputAxes) -> AttentionMatch | Refused:
        from .attention import recognise_attention
        try:
            return recognise_attention(source, axes, self.context, self.sizes)
        except (Unsized, Unevaluated) as error:
            return Refused("fmha", str(error), source)


def find_chains(context: Context) -> Findings:
    """The chains of a graph. With symbolic sizes a chain must also hold, as the same chain, for sizes other than the
    example's."""
    findings = ChainFinder(context, context.sizes[0]).find()
    for sizes in context.sizes[1:]:
        if not findings.chains:
            break
        again = ChainFinder(context, sizes).find()
        findings.visits += again.visits
        others = {chain.anchors[0].node: chain for chain in again.chains}
        kept = []
        for chain in findings.chains:
            other = others.get(chain.anchors[0].node)
            if other is not None and other.quantities() == chain.quantities():
                if chain.attention is not None and other.attention is not None:
                    both = agreed(chain.attention, other.attention, context.sizes[0], sizes)
                    if isinstance(both, Refused):
                        chain.attention, chain.attention_refused = None, both
                    else:
                        chain.attention = both
                kept.append(chain)
            else:
                findings.refused.append(Refused("bgemm", other_sizes.what_differs(
                    chain, other or again.by_anchor.get(chain.anchors[0].node), context.module.graph,
                    context.sizes[0], sizes), chain.anchors[0].node))
        findings.chains = kept
    return findings


def _guessed_axes(structure: Structure) -> Iterator[OutputAxes]:
    """Possible axes of an output whose rotation was refused. Any axis may be the heads, the innermost first; so may two
    that follow one another (groups of heads)."""
    ordered = sorted(structure.axes, key=lambda a: a.source)
    for inner in ordered:
        outer = next((a for a in ordered if a is not inner and a.source == inner.source * inner.size), None)
        for heads in ([inner, outer], [inner]) if outer is not None else ([inner],):
            size = heads[0].size * (heads[1].size if len(heads) > 1 else 1)
            yield OutputAxes(tuple(Axis(a.size, a.source, a.size_from) for a in reversed(ordered) if a not in heads),
                             Axis(size, inner.source), Axis(structure.head_dim, structure.channel_stride),
                             structure.offset)
