"""Operators that only move elements, and the mixed-radix layouts that are read off them and written down again."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import inputs, program, result, same, trace
from torch import fx

from fusion_pass.elements.follow import Follower
from fusion_pass.elements.layouts import Axis, Builder, radix, row_major
from fusion_pass.elements.sizes import Sizes

MOVES_THAT_COMPUTE = ("cat", "scatter", "stack")        # the strategies multiply a part, to tell it from the rest


@settings(max_examples=120, deadline=None)
@given(program(moves_only=True))
def test_following_elements_through_moves(drawn):
    names, run, shape = drawn
    if any(name.startswith(MOVES_THAT_COMPUTE) for name in names):
        return
    x = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    gm = trace(run, x)
    source = inputs(gm)[0]
    product = result(gm)        # the final multiplication by one computes; its operand does not
    trace_of = Follower(Sizes()).follow(product.args[0], torch.arange(Sizes().numel(product)))
    found = torch.full((Sizes().numel(product),), torch.nan, dtype=torch.float64)
    for origin in trace_of.origins:
        assert origin.node is source or isinstance(origin.node, (int, float))
        found[origin.lanes] = x.reshape(-1)[origin.index] if origin.node is source else float(origin.node)
    assert same(found, run(x)), names


factor = st.tuples(st.integers(2, 5), st.integers(-40, 40))


@settings(max_examples=200, deadline=None)
@given(st.lists(factor, min_size=1, max_size=4))
def test_radix_reads_off_what_it_describes(parts):
    size = math.prod(count for count, _ in parts)
    index, values = torch.arange(size), torch.zeros(size, dtype=torch.int64)
    for count, stride in reversed(parts):
        values += index % count * stride
        index = index // count
    found = radix(values, size)
    assert found is not None
    index, again = torch.arange(size), torch.zeros(size, dtype=torch.int64)
    for count, stride in reversed(found):
        again += index % count * stride
        index = index // count
    assert torch.equal(again, values) and math.prod(count for count, _ in found) == size
    assert len(found) <= len(parts), "neighbouring digits that run on are one digit"


def test_radix_refuses_what_is_no_radix():
    assert radix(torch.tensor([0, 1, 2, 7]), 4) is None
    assert radix(torch.tensor([0, 1, 3, 4, 6, 7, 9, 11]), 8) is None
    assert radix(torch.tensor([0]), 1) == []


def base_graph(shape):
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(shape, device="meta")
    output = graph.output((x,))
    return graph, x, output


def run_graph(graph, x, node, value):
    """The value of a node that was built before the output."""
    output = next(iter(reversed(graph.nodes)))
    output.args = ((node,),)
    graph.lint()
    return fx.GraphModule(torch.nn.Module(), graph)(value)[0]


@st.composite
def family(draw):
    """A tensor and axes of it: every dimension whole, in part, split in two, or fixed; in any order."""
    shape = draw(st.lists(st.sampled_from([1, 2, 4, 6]), min_size=1, max_size=4))
    strides, axes, offset = row_major(shape), [], 0
    for size, stride in zip(shape, strides):
        kind = draw(st.sampled_from(["whole", "fixed", "part", "step", "split"]))
        if kind == "fixed":
            offset += draw(st.integers(0, size - 1)) * stride
        elif kind == "part" and size > 2:
            start = draw(st.integers(0, 2))
            offset += start * stride
            axes.append(Axis(size - 2, stride))
        elif kind == "step" and size % 2 == 0:
            offset += draw(st.integers(0, 1)) * stride
            axes.append(Axis(size // 2, 2 * stride))
        elif kind == "split" and size % 2 == 0:
            axes += [Axis(size // 2, 2 * stride), Axis(2, stride)]
        else:
            axes.append(Axis(size, stride))
    if draw(st.booleans()):
        axes.append(Axis(3, 0))
    return shape, offset, draw(st.permutations(axes))


@settings(max_examples=200, deadline=None)
@given(family())
def test_take_views_exactly_the_family(drawn):
    shape, offset, axes = drawn
    graph, x, output = base_graph(shape)
    node = Builder(graph, Sizes(), output).take(x, offset, axes)
    assert node is not None
    value = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    sizes = [axis.size if axis.stride else 1 for axis in axes]
    index = torch.full(sizes, offset)
    for dim, axis in enumerate(axes):
        if axis.stride:
            along = torch.arange(axis.size) * axis.stride
            index = index + along.view([-1 if d == dim else 1 for d in range(len(axes))])
    found = run_graph(graph, x, node, value)
    assert list(node.meta["val"].shape) == sizes == list(found.shape)
    assert torch.equal(found, value.reshape(-1)[index])


@settings(max_examples=120, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4).flatmap(
    lambda sizes: st.tuples(st.just(sizes), st.permutations(range(len(sizes))))))
def test_arrange_puts_the_axes_where_they_belong(drawn):
    sizes, order = drawn
    graph, x, output = base_graph(sizes)
    like = graph.placeholder("like")
    like.meta["val"] = torch.empty([math.prod(sizes)], device="meta")
    strides = dict(zip(order, row_major([sizes[i] for i in order])))
    axes = [Axis(size, strides[i]) for i, size in enumerate(sizes)]
    node = Builder(graph, Sizes(), output).arrange(x, axes, like)
    value = torch.rand(sizes)
    graph.erase_node(like)
    assert torch.equal(run_graph(graph, x, node, value), value.permute(order).reshape(-1))


def test_arrange_refuses_gaps():
    graph, x, output = base_graph([2, 3])
    like = graph.placeholder("like")
    like.meta["val"] = torch.empty([6], device="meta")
    builder = Builder(graph, Sizes(), output)
    assert builder.arrange(x, [Axis(2, 4), Axis(3, 1)], like) is None
    assert builder.arrange(x, [Axis(2, 3), Axis(3, 2)], like) is None
