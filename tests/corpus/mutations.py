"""Semantic mutations of a traced graph: each makes one small change that a reader of the code could overlook.

A mutator takes a graph, a node it applies to and a random generator, and changes the graph in place (False: it does not
apply after all). The metadata is computed anew afterwards; a mutant whose shapes do not work any more is discarded.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

aten = torch.ops.aten
prims = torch.ops.prims
Mutator = Callable[[fx.Graph, fx.Node, random.Random], bool]
MUTATORS: dict[str, tuple[Callable[[fx.Node], bool], Mutator]] = {}
EIGHT_BIT = (torch.float8_e4m3fn, torch.float8_e5m2)


def mutator(applies: Callable[[fx.Node], bool]) -> Callable[[Mutator], Mutator]:
    def register(function: Mutator) -> Mutator:
        MUTATORS[function.__name__] = (applies, function)
        return function
    return register


def value(node: object) -> torch.Tensor | None:
    found = node.meta.get("val") if isinstance(node, fx.Node) else None
    return found if isinstance(found, torch.Tensor) else None


def calls(*targets: object) -> Callable[[fx.Node], bool]:
    return lambda node: node.op == "call_function" and node.target in targets


def floating(node: fx.Node) -> bool:
    """A computed (or given) float tensor with more than one element that somebody reads."""
    found = value(node)
    return (node.op in ("call_function", "placeholder") and found is not None and found.is_floating_point()
            and found.dtype not in EIGHT_BIT and found.dtype.itemsize > 1 and found.numel() > 1 and bool(node.users))


def insert(graph: fx.Graph, node: fx.Node, make: Callable[[fx.Node], fx.Node]) -> bool:
    """Let every reader of ``node`` read ``make(node)`` instead."""
    before = set(graph.nodes)
    following = node.next
    while following.op == "placeholder":
        following = following.next
    with graph.inserting_before(following):
        new = make(node)
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user in before)
    return True


def call(graph: fx.Graph, target: object, *args: object, **kwargs: object) -> fx.Node:
    return graph.call_function(target, args, kwargs)


def scalar(node: fx.Node, position: int) -> bool:
    return len(node.args) > position and isinstance(node.args[position], (int, float)) and not isinstance(
        node.args[position], bool)


def with_argument(node: fx.Node, position: int, argument: object) -> bool:
    node.update_arg(position, argument)
    return True


def swap(node: fx.Node, a: int = 0, b: int = 1) -> bool:
    first, second = node.args[a], node.args[b]
    node.args = tuple(second if i == a else first if i == b else x for i, x in enumerate(node.args))
    return True


# --------------------------------------------------------------------------------------------------- operators


@mutator(calls(aten.add.Tensor, aten.sub.Tensor))
def flip_a_sign(graph, node, rng):
    node.target = aten.sub.Tensor if node.target is aten.add.Tensor else aten.add.Tensor
    return True


@mutator(calls(aten.neg.default, aten._conj.default, aten.abs.default, aten.reciprocal.default, aten.exp.default,
               aten.exp2.default, aten.ceil.default, aten.sqrt.default, aten.log.default))
def drop_an_operator(graph, node, rng):
    node.replace_all_uses_with(node.args[0])
    return True


@mutator(calls(aten.sub.Tensor, aten.div.Tensor, aten.pow.Scalar))
def swap_operands(graph, node, rng):
    return swap(node) if all(isinstance(a, fx.Node) for a in node.args[:2]) else False


@mutator(calls(aten.exp.default, aten.exp2.default, aten.log2.default, aten.log.default, aten.cos.default,
               aten.sin.default, aten.ceil.default, aten.maximum.default, aten.minimum.default, aten.amax.default,
               aten.bitwise_left_shift.Tensor_Scalar, aten.log1p.default, aten.clamp_min.default))
def another_function(graph, node, rng):
    node.target = {
        aten.exp.default: aten.exp2.default, aten.exp2.default: aten.exp.default, aten.log2.default: aten.log.default,
        aten.log.default: aten.log2.default, aten.cos.default: aten.sin.default, aten.sin.default: aten.cos.default,
        aten.ceil.default: aten.floor.default, aten.maximum.default: aten.minimum.default,
        aten.minimum.default: aten.maximum.default, aten.amax.default: aten.amin.default,
        aten.bitwise_left_shift.Tensor_Scalar: aten.bitwise_right_shift.Tensor_Scalar,
        aten.log1p.default: aten.log.default, aten.clamp_min.default: aten.clamp_max.default,
    }[node.target]
    return True


@mutator(calls(aten.sum.dim_IntList, aten.amax.default))
def mean_instead(graph, node, rng):
    node.target = aten.mean.dim
    return value(node.args[0]).is_floating_point()


@mutator(calls(aten.cat.default, aten.stack.default))
def exchange_parts(graph, node, rng):
    parts = list(node.args[0])
    if len(parts) < 2:
        return False
    a, b = rng.sample(range(len(parts)), 2)
    parts[a], parts[b] = parts[b], parts[a]
    return with_argument(node, 0, parts)


@mutator(calls(aten.where.self))
def exchange_branches(graph, node, rng):
    return swap(node, 1, 2)


@mutator(calls(aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar, aten.lt.Tensor, aten.le.Tensor,
               aten.gt.Tensor, aten.ge.Tensor, aten.eq.Scalar, aten.ne.Scalar))
def off_by_one_comparison(graph, node, rng):
    packet, overload = str(node.target).split(".")[1:]
    other = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "eq": "ne", "ne": "eq"}[packet]
    node.target = getattr(getattr(aten, other), overload)
    return True


# --------------------------------------------------------------------------------------------------- constants


@mutator(lambda n: calls(aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar)(n) and scalar(n, 1))
def change_a_factor(graph, node, rng):
    return with_argument(node, 1, node.args[1] * rng.choice([1.25, 0.5, 1.0625, -1.0]))


@mutator(lambda n: calls(aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar)(n) and scalar(n, 1))
def change_a_term(graph, node, rng):
    return with_argument(node, 1, node.args[1] + rng.choice([1, -1, 2]))


@mutator(calls(aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default))
def change_a_clamp(graph, node, rng):
    positions = [i for i in range(1, len(node.args)) if scalar(node, i)]
    if not positions:
        return False
    at = rng.choice(positions)
    return with_argument(node, at, node.args[at] * rng.choice([0.5, 0.875, 1e4]) or 1)


@mutator(calls(aten.bitwise_and.Scalar, aten.bitwise_left_shift.Tensor_Scalar, aten.bitwise_right_shift.Tensor_Scalar,
               aten.__lshift__.Scalar, aten.__rshift__.Scalar, aten.eq.Scalar, aten.lt.Scalar, aten.gt.Scalar,
               aten.ge.Scalar, aten.le.Scalar, aten.remainder.Scalar))
def change_an_integer(graph, node, rng):
    return with_argument(node, 1, node.args[1] + rng.choice([1, -1])) if scalar(node, 1) else False


@mutator(calls(aten.full.default, aten.full_like.default, aten.scalar_tensor.default, aten.masked_fill.Scalar))
def change_a_fill(graph, node, rng):
    at = {aten.scalar_tensor.default: 0, aten.masked_fill.Scalar: 2}.get(node.target, 1)
    number = node.args[at]
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return False
    dtype = value(node).dtype
    return with_argument(node, at, number + 1 if abs(number) < 1e9 else (3.0 if dtype.is_floating_point else 0))


@mutator(calls(aten.arange.start_step, prims.iota.default, aten.arange.default))
def shift_positions(graph, node, rng):
    return insert(graph, node, lambda n: call(graph, aten.add.Tensor, n, 1))


# --------------------------------------------------------------------------------------------------- layout


@mutator(calls(aten.slice.Tensor))
def shift_a_slice(graph, node, rng):
    source, dim = value(node.args[0]), node.args[1] if len(node.args) > 1 else 0
    size, start = source.shape[dim], node.args[2] if len(node.args) > 2 else 0
    start = start + size if start < 0 else start
    step = node.args[4] if len(node.args) > 4 else 1
    length = value(node).shape[dim]
    stop = start + (length - 1) * step + 1
    by = rng.choice([1, 2])
    by = by if stop + by <= size else -by
    if start + by < 0 or stop + by > size:
        return False
    node.args = (node.args[0], dim, start + by, stop + by, step)
    return True


@mutator(calls(aten.select.int))
def select_the_neighbour(graph, node, rng):
    size = value(node.args[0]).shape[node.args[1]]
    return with_argument(node, 2, (node.args[2] + 1) % size) if size > 1 else False


@mutator(calls(aten.slice_scatter.default))
def shift_a_write(graph, node, rng):
    dim, start, end = (list(node.args) + [0, None, None])[2:5] if len(node.args) > 2 else (0, None, None)
    size = value(node).shape[dim]
    start = 0 if start is None else start + size * (start < 0)
    end = size if end is None else min(end, size) if end >= 0 else end + size
    by = 1 if end < size else -1
    if start + by < 0 or len(node.args) > 5 and node.args[5] != 1:
        return False
    node.args = (*node.args[:2], dim, start + by, end + by)
    return True


@mutator(calls(aten.permute.default))
def exchange_dimensions(graph, node, rng):
    order, shape = list(node.args[1]), value(node).shape
    same = [(i, j) for i in range(len(order)) for j in range(i) if shape[i] == shape[j] and shape[i] > 1]
    if not same:
        return False
    i, j = rng.choice(same)
    order[i], order[j] = order[j], order[i]
    return with_argument(node, 1, order)


@mutator(calls(aten.view.default, aten._unsafe_view.default, aten.reshape.default))
def read_transposed(graph, node, rng):
    """Split dimensions the other way round: (a, b) instead of (b, a), then a transpose back (heads of a group that are
    not neighbours, blocks that are interleaved)."""
    shape = list(value(node).shape)
    pairs = [i for i in range(len(shape) - 1) if shape[i] > 1 and shape[i + 1] > 1]
    if not pairs:
        return False
    i = rng.choice(pairs)
    other = shape[:i] + [shape[i + 1], shape[i]] + shape[i + 2:]
    order = list(range(len(shape)))
    order[i], order[i + 1] = i + 1, i
    node.update_arg(1, other)
    return insert(graph, node, lambda n: call(graph, aten.permute.default, n, order))


@mutator(lambda n: floating(n) or value(n) is not None and value(n).dtype in EIGHT_BIT and bool(n.users))
def reverse_an_axis(graph, node, rng):
    """Heads, groups, tokens, channels or keys in another order."""
    dims = [d for d, size in enumerate(value(node).shape) if size > 1]
    if not dims:
        return False
    dim = rng.choice(dims)
    return insert(graph, node, lambda n: call(graph, aten.flip.default, n, [dim]))


@mutator(floating)
def roll_an_axis(graph, node, rng):
    dims = [d for d, size in enumerate(value(node).shape) if size > 1]
    if not dims:
        return False
    dim = rng.choice(dims)
    size = value(node).shape[dim]

    def rolled(n: fx.Node) -> fx.Node:
        parts = [call(graph, aten.slice.Tensor, n, dim, 1, size), call(graph, aten.slice.Tensor, n, dim, 0, 1)]
        return call(graph, aten.cat.default, parts, dim)
    return insert(graph, node, rolled)


@mutator(calls(aten.index.Tensor, aten.gather.default, aten.index_select.default, aten.embedding.default))
def load_another_row(graph, node, rng):
    rows = value(node.args[0]).shape[0]
    at = 2 if node.target in (aten.gather.default, aten.index_select.default) else 1
    index = node.args[at][0] if isinstance(node.args[at], (list, tuple)) else node.args[at]
    if value(index) is None or value(index).dtype == torch.bool or rows < 2:
        return False
    with graph.inserting_before(node):
        moved = call(graph, aten.remainder.Scalar, call(graph, aten.add.Tensor, index, 1), rows)
    node.replace_input_with(index, moved)
    return True


# --------------------------------------------------------------------------------------------------- operands


@mutator(lambda n: n.op == "placeholder" and value(n) is not None and bool(n.users))
def exchange_inputs(graph, node, rng):
    """cos for sin, keys for queries: two inputs of one shape."""
    mine = value(node)
    others = [n for n in graph.nodes if n.op == "placeholder" and n is not node and value(n) is not None
              and value(n).shape == mine.shape and value(n).dtype == mine.dtype and n.users]
    if not others:
        return False
    other = rng.choice(others)
    users, theirs = list(node.users), list(other.users)
    for user in users:
        user.replace_input_with(node, other) if user not in theirs else None
    for user in theirs:
        user.replace_input_with(other, node) if user not in users else None
    return True


@mutator(lambda n: n.op == "placeholder" and floating(n) and value(n).numel() <= 64)
def drop_the_sink(graph, node, rng):
    """A per-head input (the sink) loses its effect, or takes another."""
    return insert(graph, node, rng.choice([
        lambda n: call(graph, aten.mul.Tensor, n, 0.0), lambda n: call(graph, aten.neg.default, n),
        lambda n: call(graph, aten.sub.Tensor, n, 1e9), lambda n: call(graph, aten.add.Tensor, n, 0.6931471805599453)]))


@mutator(floating)
def insert_a_nonlinearity(graph, node, rng):
    target = rng.choice([aten.tanh.default, aten.relu.default, aten.sin.default, aten.abs.default])
    return insert(graph, node, lambda n: call(graph, target, n))


@mutator(floating)
def scale_by_position(graph, node, rng):
    """Another factor for every head, token or channel."""
    dims = [d for d, size in enumerate(value(node).shape) if size > 1]
    dim = rng.choice(dims)
    found = value(node)
    shape = [found.shape[dim] if d == dim else 1 for d in range(found.dim())]

    def scaled(n: fx.Node) -> fx.Node:
        ramp = call(graph, aten.arange.start_step, 0, found.shape[dim], dtype=torch.float32, device=found.device)
        ramp = call(graph, aten.add.Tensor, call(graph, aten.mul.Tensor, ramp, 0.1), 1.0)
        ramp = call(graph, aten.view.default, ramp, shape)
        return call(graph, prims.convert_element_type.default, call(graph, aten.mul.Tensor, n, ramp), found.dtype)
    return insert(graph, node, scaled)


@mutator(floating)
def double_one_place(graph, node, rng):
    """One index of one axis (one token, one head, one channel) is twice as large: what samples could miss."""
    dims = [d for d, size in enumerate(value(node).shape) if size > 1]
    dim = rng.choice(dims)
    found = value(node)
    place = rng.randrange(found.shape[dim])

    def doubled(n: fx.Node) -> fx.Node:
        part = call(graph, aten.slice.Tensor, n, dim, place, place + 1)
        twice = call(graph, aten.mul.Tensor, part, 2.0)
        return call(graph, aten.slice_scatter.default, n, twice, dim, place, place + 1)
    return insert(graph, node, doubled)


@mutator(lambda n: value(n) is not None and value(n).dtype is torch.float8_e4m3fn and n.op == "call_function"
         and any("dtype" in k for k in n.kwargs) or calls(prims.convert_element_type.default)(n) and value(
             n).dtype is torch.float8_e4m3fn)
def another_eight_bit_float(graph, node, rng):
    if "dtype" in node.kwargs:
        node.kwargs = {**node.kwargs, "dtype": torch.float8_e5m2}
        return True
    return with_argument(node, 1, torch.float8_e5m2)


# --------------------------------------------------------------------------------------------------- drawing


def mutants(gm: fx.GraphModule, count: int, seed: int) -> list[tuple[str, fx.GraphModule]]:
    """Up to ``count`` mutants of ``gm``, spread over the mutators, with fresh metadata."""
    rng = random.Random(seed)
    places: dict[str, list[int]] = {}
    nodes = list(gm.graph.nodes)
    for name, (applies, _) in MUTATORS.items():
        found = [i for i, node in enumerate(nodes) if applies(node)]
        rng.shuffle(found)
        if found:
            places[name] = found
    result: list[tuple[str, fx.GraphModule]] = []
    names = list(places)
    while names and len(result) < count:
        rng.shuffle(names)
        for name in list(names):
            if len(result) >= count:
                break
            if not places[name]:
                names.remove(name)
                continue
            at = places[name].pop()
            mutant = mutated(gm, name, at, rng)
            if mutant is not None:
                result.append((f"{name} at {nodes[at].name}", mutant))
    return result


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of the graph over the same parameters, with the same metadata."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, values))
    return fx.GraphModule(gm, graph)


def mutated(gm: fx.GraphModule, name: str, at: int, rng: random.Random) -> fx.GraphModule | None:
    mutant = copied(gm)
    try:
        if not MUTATORS[name][1](mutant.graph, list(mutant.graph.nodes)[at], rng):
            return None
        mutant.graph.eliminate_dead_code()
        mutant.graph.lint()
        mutant.recompile()
        refresh_metadata(mutant)
    except Exception:
        return None         # shapes or dtypes do not fit any more: no program at all
    before, after = outputs(gm), outputs(mutant)
    return mutant if [(t.shape, t.dtype) for t in before] == [(t.shape, t.dtype) for t in after] else None


def outputs(gm: fx.GraphModule) -> list[torch.Tensor]:
    output = next(iter(reversed(gm.graph.nodes)))
    return [node.meta["val"] for node in output.all_input_nodes]


def refresh_metadata(gm: fx.GraphModule) -> None:
    inputs = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    mode = torch._guards.detect_fake_mode(inputs) or FakeTensorMode()
    with torch.no_grad():
        FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*inputs)
