"""What attention computes an output, found by following its elements and proved by value.

1. discovery: the output is a linear function, channel by channel, of one or more products of weights with value rows
   (tiles, splits, branches); the weights are exponentials of query-key products of the very same rows;
2. bindings: strides of queries, rows and masks along tokens, heads, keys and channels; scale, mask polarity;
3. proof: at sampled tokens, heads and channels (all ends, both sides of the rotated tail) the graph's value equals

       sum_n exp(l_n) * row_n / (sum_n exp(l_n) + exp(sink)),   l_n = scale * q.row_n + mask_n

   for random products, rows, masks and sinks, in float64 to 1e-9. One formula covers all spellings of the sink.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.fx as fx

from ..elements.loads import INDEXED
from ..elements.moves import is_float_cast
from ..elements.numeric import Unevaluated
from ..elements.sizes import Sizes, Unsized
from ..fx_access import args_of
from .apart import division, recognise_apart
from .attention_bindings import Binder, Binding
from .attention_match import AttentionMatch, KeyPiece, Mask, Operand, OutputAxes
from .attention_proof import depends_on
from .attention_reference import Prover
from .attention_sites import Explorer, Segment
from .context import Context
from .descent import Reach, is_tensor
from .gathered import recognise_gathered
from .merge import merges_partials, recognise_partials
from .paths import Unfollowed
from .refusal import Refused
from .region import dependents, unknown_inputs

aten = torch.ops.aten
MAX_SINK_CANDIDATES = 4
MOST_LOOKED_AT = 16  # nodes behind a concatenation


def recognise_attention(output: fx.Node, axes: OutputAxes, context: Context,
                        sizes: Sizes | None = None) -> AttentionMatch | Refused:
    """The attention whose result (before the inverse rotation) lives in ``output`` at ``axes``, or why it is none.

    ``sizes`` is the assignment of the size symbols that ``axes`` are given for (default: the context's first)."""
    sizes = sizes or context.sizes[0]
    try:
        apart = division(output, axes, sizes)
        if apart is not None:
            return recognise_apart(axes, apart, lambda part: recognise_attention(output, part, context, sizes))
        explorer = Explorer(output, axes, sizes, context)
        result = _recognise(explorer, context)
        if isinstance(result, Refused) and explorer.left_out:
            # Rows that are zero for every token are not always a sink's: padding in front of a window, say.
            again = Explorer(output, axes, sizes, context, zero_rows_are_keys=True)
            second = _recognise(again, context)
            result = second if isinstance(second, AttentionMatch) else result
    except Unevaluated as error:
        return Refused("fmha", f"depends on {depends_on(error.node)}: {error}", error.node)
    except (Unsized, Unfollowed) as error:
        return Refused("fmha", str(error), output)
    context.counters["attention"] += explorer.descent.visits + explorer.follower.visits
    return result


def _recognise(explorer: Explorer, context: Context) -> AttentionMatch | Refused:
    output = explorer.output
    found = _segments(explorer)
    if isinstance(found, Refused):
        return found
    segments, opaque = found
    if not segments:
        partials = recognise_partials(explorer, opaque, context)
        scores = explorer.partial_scores
        if isinstance(partials, Refused) and scores is not None:
            return Refused("fmha", f"a score comes from a product over {scores.extent} of "
                           f"{explorer.axes.channels.size} channels: parts are taken together where all of them are "
                           "added up, with one factor, for the same queries and keys", scores.node)
        return partials
    if opaque:
        node = opaque[0].node
        return Refused("fmha", f"the output also depends on {depends_on(node)}", node)
    for node in (output, *(s.scores.lhs for s in segments)):
        if explorer.sizes.dtype(node) == torch.float64:
            return Refused("fmha", "computed in float64: the fused kernels accumulate in fp32", node)
    # Not the output itself: it may also hold what other loops computed.
    origin = explorer.follower.follow(output, explorer.output_index(*explorer.base())).only()
    root = origin.node if origin is not None and isinstance(origin.node, fx.Node) else output
    region = dependents(root, {s.scores.node for s in segments}, set(), context)
    binder = Binder(explorer, segments, region, context.constant)
    bindings = []
    for segment in segments:
        bound = _bind(explorer, binder, segment)
        if isinstance(bound, Refused):
            return bound
        bindings.extend(bound)
    refused = _disagreement(bindings)
    if refused is not None:
        return refused
    match = _prove(explorer, context, binder, bindings, region)
    if isinstance(match, Refused) or match.gathered or match.sink_gate:
        return match
    # Rows picked from two pools and joined: one piece of dense keys, or two pieces of gathered ones.
    apart = _cut_at_joins(explorer, binder, bindings)
    if not apart or _disagreement(apart) or not recognise_gathered(binder, apart, context.constant):
        return match
    gathered = _prove(explorer, context, binder, apart, region)
    return gathered if isinstance(gathered, AttentionMatch) and gathered.gathered else match


def _disagreement(bindings: list[Binding]) -> Refused | None:
    """What the keys do not have in common, though a softmax over all of them needs it."""
    first = bindings[0]
    for other in bindings[1:]:
        if (other.query.node, other.query.offset, other.query.axes) != (
                first.query.node, first.query.offset, first.query.axes):
            return Refused("fmha", "different keys are multiplied by different queries", other.segment.scores.node)
        if abs(other.scale - first.scale) > 1e-9 * abs(first.scale) or other.scale_node is not first.scale_node:
            return Refused("fmha", "different keys have different softmax scales", other.segment.scores.node)
    return None


def _segments(explorer: Explorer) -> tuple[list[Segment], list[Reach]] | Refused:
    """All segments of the attention, and what the output depends on linearly that is no attention."""
    segments: list[Segment] = []
    opaque: list[Reach] = []
    work = [(reach, reach.path) for reach in explorer.terms()]
    while work:
        reach, path = work.pop(0)
        if len(reach.lanes) != explorer.axes.channels.size:
            return Refused("fmha", "parts of the channels are computed apart", reach.node, silent=not segments)
        site = explorer.as_site(reach, path)
        if site is None:
            opaque.append(Reach(reach.node, reach.lanes, reach.index, path))
            continue
        keys = explorer.keys(site)
        if not len(keys):
            continue
        found = explorer.segments(site, keys)
        if isinstance(found, Refused):
            return found
        if found is not None:
            segments.extend(found)
            continue
        inner = explorer.parts(site) if site.fused is None else None
        if inner:
            work = [(r, r.path) for r in inner] + work
        else:
            opaque.append(Reach(reach.node, reach.lanes, reach.index, path))
    return segments, opaque


def _bind(explorer: Explorer, binder: Binder, segment: Segment) -> list[Binding] | Refused:
    """The segment bound as one, or else cut where its rows come from different nodes."""
    whole = binder.bind(segment)
    if not isinstance(whole, Refused):
        return [whole]
    parts = _by_origin(explorer, binder, segment)
    return whole if parts is None else parts


def _by_origin(explorer: Explorer, binder: Binder, segment: Segment) -> list[Binding] | Refused | None:
    """The segment cut where its rows come from different nodes, if they do and its weights are cut alike."""
    parts = explorer.by_origin(segment.site, torch.arange(segment.start, segment.start + segment.count))
    if len(parts) < 2:
        return None
    bindings: list[Binding] = []
    for keys in parts:
        found = explorer.segments(segment.site, keys)
        if found is None or isinstance(found, Refused):
            return None
        for part in found:
            binding = binder.bind(part)
            if isinstance(binding, Refused):
                return binding
            bindings.append(binding)
    return bindings


def _cut_at_joins(explorer: Explorer, binder: Binder, bindings: list[Binding]) -> list[Binding] | None:
    """The bindings, those over joined rows cut where these were joined; None where no rows were, or not so."""
    cut: list[Binding] = []
    for binding in bindings:
        parts = _by_origin(explorer, binder, binding.segment) if _joins_picked_rows(binding) else [binding]
        if parts is None or isinstance(parts, Refused):
            return None
        cut.extend(parts)
    return cut if len(cut) > len(bindings) else None


def _joins_picked_rows(binding: Binding) -> bool:
    """Whether the rows are a concatenation with a part that an index picked: cheap, and not the proof."""
    node = binding.piece.rows.node
    if node.target is not aten.cat.default:
        return False
    seen = list(node.all_input_nodes)
    for part in seen:
        if part.target in INDEXED:
            return True
        if len(seen) < MOST_LOOKED_AT and part.op == "call_function":
            seen.extend(part.all_input_nodes[:1])
    return False


def _prove(explorer: Explorer, context: Context, binder: Binder, bindings: list[Binding],
           region: set[fx.Node]) -> AttentionMatch | Refused:
    bindings = sorted(bindings, key=lambda b: (context.order(b.piece.rows.node), b.piece.rows.offset))
    masked = {mask.operand.node for b in bindings for mask in b.piece.masks}
    scale_nodes = {b.scale_node for b in bindings if b.scale_node is not None}
    candidates = _sink_candidates(explorer, context, bindings, region, masked | scale_nodes)
    if isinstance(candidates, Refused):
        return candidates
    refusal: Refused | None = None
    tried: list[fx.Node | None] = [*candidates[:MAX_SINK_CANDIDATES]] or [None]
    for sink_node in tried:
        prover = Prover(explorer, binder, bindings, context.constant, sink_node)
        result = prover.prove()
        context.counters["attention_proof"] += prover.visits
        if not isinstance(result, Refused):
            match = _match(explorer, bindings, region, prover.parts_normalised(), *result)
            if match.sink_gate or len(match.kv) != len(bindings):
                return match
            return replace(match, gathered=recognise_gathered(binder, bindings, context.constant))
        refusal = refusal or result
    assert refusal is not None
    return refusal


def _sink_candidates(explorer: Explorer, context: Context, bindings: list[Binding], region: set[fx.Node],
                     known: set[fx.Node]) -> list[fx.Node] | Refused:
    """Nodes that may hold the sink: what else the region reads, from its origin towards the region."""
    sites = {n: b.segment.site for b in bindings for n in _product_nodes(b.segment.site.node)}
    products = {b.segment.scores.node for b in bindings}
    chains: list[list[fx.Node]] = []
    for node in sorted(region, key=context.order):
        if node in products:
            continue
        site = sites.get(node)
        for operand in node.all_input_nodes:
            if operand in region or not is_tensor(operand) or (site is not None and operand is site.values.rhs):
                continue
            chains.extend(unknown_inputs(operand, known, explorer.sizes))
    held = known | {b.query.node for b in bindings} | {b.piece.rows.node for b in bindings}
    for binding in bindings:
        scores, way = binding.segment.scores, binding.segment.rows[binding.rows_at].path
        # Keys that were joined like the values have been compared with them, element by element.
        for operand in (scores.lhs,) if way and way[0].kind == "equal" else (scores.lhs, scores.rhs):
            chains.extend(unknown_inputs(operand, held, explorer.sizes))
    if not chains:
        return []
    origins = {chain[-1] for chain in chains}
    if len(origins) > 1:
        first, second = sorted(origins, key=context.order)[:2]
        return Refused("fmha", f"depends on {depends_on(first)} and on {depends_on(second)}: only one can be the sink",
                       second)
    common = [node for node in reversed(chains[0]) if all(node in chain for chain in chains)]
    return [node for node in common if node.meta["val"].dtype.is_floating_point]


def _product_nodes(node: fx.Node) -> list[fx.Node]:
    """A contraction and, when it is the sum of a product, that product (and casts between)."""
    result = [node]
    while result[-1].target is aten.sum.dim_IntList or len(result) > 1 and is_float_cast(result[-1]):
        result.append(args_of(result[-1])[0])
    return result


def _match(explorer: Explorer, bindings: list[Binding], region: set[fx.Node], normalised: bool,
           sink: Operand | None, gate: tuple[Mask, ...]) -> AttentionMatch:
    first = bindings[0]
    roles = ("fmha", "kv_merge") if merges_partials([b.segment.site for b in bindings], normalised) else ("fmha",)
    scale_node = None
    if first.scale_node is not None:
        scale_node = Operand(first.scale_node, 0, ())
    return AttentionMatch(
        form="dense", axes=explorer.axes, output=explorer.output, roles=roles, q=first.query,
        kv=tuple(coalesced([b.piece for b in bindings])), sink=sink, sink_gate=gate, scale=first.scale,
        scale_node=scale_node, interior=frozenset(region), copies=_joined_here(explorer, first.query.node),
        casts=tuple(n for n in region if is_float_cast(n) and narrows(n)))


def _joined_here(explorer: Explorer, query: fx.Node) -> frozenset[fx.Node]:
    """What operands that the source does not join, or joins twice, are put together from."""
    ends = set(explorer.parts_joined)
    stack = [query] if query in explorer.context.scratch else []
    while stack:
        for operand in stack.pop().all_input_nodes:
            if operand in explorer.context.scratch:
                stack.append(operand)
            else:
                ends.add(operand)
    return frozenset(ends)


def narrows(cast: fx.Node) -> bool:
    """Whether a float cast loses bits."""
    before, after = args_of(cast)[0].meta["val"].dtype, cast.meta["val"].dtype
    return torch.finfo(after).eps > torch.finfo(before).eps


def coalesced(pieces: list[KeyPiece]) -> list[KeyPiece]:
    """Neighbouring pieces of one node (tiles, splits of the same keys) as one piece."""
    result = [pieces[0]]
    for piece in pieces[1:]:
        joined = _joined(result[-1], piece)
        if joined is None:
            result.append(piece)
        else:
            result[-1] = joined
    return result


def _joined(first: KeyPiece, second: KeyPiece) -> KeyPiece | None:
    if len(first.masks) != len(second.masks):
        return None
    masks = []
    for a, b in zip(first.masks, second.masks):
        operand = _joined_operand(a.operand, b.operand, -1)
        if operand is None or (a.kind, a.coefficient) != (b.kind, b.coefficient):
            return None
        masks.append(Mask(operand, a.kind, a.coefficient))
    rows = _joined_operand(first.rows, second.rows, -2)
    return None if rows is None else KeyPiece(rows, tuple(masks))


def _joined_operand(first: Operand, second: Operand, keys: int) -> Operand | None:
    """One operand for two whose key axes follow each other in the same node."""
    a, b = first.axes[keys], second.axes[keys]
    others = [(x, y) for n, (x, y) in enumerate(zip(first.axes, second.axes)) if n != len(first.axes) + keys]
    if first.node is not second.node or a.size_from or b.size_from or any(x != y for x, y in others):
        return None
    stride = a.stride if a.size > 1 else second.offset - first.offset
    if second.offset != first.offset + a.size * stride or (b.size > 1 and b.stride != stride):
        return None
    axes = list(first.axes)
    axes[keys] = type(a)(a.size + b.size, stride)
    return Operand(first.node, first.offset, tuple(axes))
