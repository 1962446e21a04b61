"""Traced graphs of small functions, and random programs of the element evaluator's operators."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fusion_pass.elements.numeric import Numeric
from fusion_pass.elements.sizes import Sizes

aten = torch.ops.aten


def trace(fn: Callable, *args: torch.Tensor) -> fx.GraphModule:
    """The functional ATen graph of ``fn``, with metadata."""
    with torch.no_grad():
        return make_fx(torch.func.functionalize(fn, remove="mutations"), tracing_mode="real")(*args)


def result(gm: fx.GraphModule) -> fx.Node:
    output = next(iter(reversed(gm.graph.nodes)))
    value = output.args[0]
    return value[0] if isinstance(value, (list, tuple)) else value


def inputs(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


def evaluate(gm: fx.GraphModule, args: tuple[torch.Tensor, ...], index: torch.Tensor | None = None) -> torch.Tensor:
    """All (or the given) elements of the result by the numeric engine, as a flat tensor."""
    leaves = {node: (lambda i, a=a: wide(a).reshape(-1)[i]) for node, a in zip(inputs(gm), args)}
    node = result(gm)
    engine = Numeric(Sizes(), leaves, lambda n: getattr(gm, str(n.target)))
    return engine.values(node, torch.arange(Sizes().numel(node)) if index is None else index)


def wide(t: torch.Tensor) -> torch.Tensor:
    if t.is_complex():
        return t.to(torch.complex128)
    if t.is_floating_point():
        return t.double()
    return t if t.dtype == torch.bool else t.long()


def same(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-9) -> bool:
    wanted = wide(wanted).reshape(-1)
    return torch.allclose(found.to(wanted.dtype), wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


# ------------------------------------------------------------------------------------------- random programs

Step = Callable[[torch.Tensor], torch.Tensor]


@st.composite
def layout_step(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[str, Step]:
    """One operator that moves elements of a tensor of this shape."""
    rank = len(shape)
    dim = draw(st.integers(0, rank - 1))
    size = shape[dim]
    kinds = ["transpose", "flip", "unsqueeze", "flatten", "slice", "roll", "repeat", "cat", "pad", "scatter", "expand",
             "stack", "clone", "split", "tril", "torch_roll", "pick", "select_rows", "take", "put", "copy", "diagonal"]
    kinds += ["select"] if rank > 1 else []
    kinds += ["unflatten"] if size % 2 == 0 and size else []
    kind = draw(st.sampled_from(kinds))
    other = draw(st.integers(0, rank - 1))
    start = draw(st.integers(0, max(size - 1, 0)))
    step = draw(st.integers(1, 3))
    steps: dict[str, Step] = {
        "transpose": lambda x: x.transpose(dim, other), "flip": lambda x: x.flip(dim),
        "unsqueeze": lambda x: x.unsqueeze(dim), "flatten": lambda x: x.reshape(-1),
        "slice": lambda x: x[(slice(None),) * dim + (slice(start, None, step),)],
        "roll": lambda x: torch.cat([x.narrow(dim, start, size - start), x.narrow(dim, 0, start)], dim),
        "repeat": lambda x: x.repeat_interleave(2, dim), "cat": lambda x: torch.cat([x, x * 2], dim),
        "pad": lambda x: torch.nn.functional.pad(x, (1, 2), value=3.0), "clone": lambda x: x.clone(),
        "scatter": lambda x: torch.slice_scatter(x, x.narrow(dim, start, 1) * 3, dim, start, start + 1),
        "expand": lambda x: x.unsqueeze(0).expand(2, *x.shape), "stack": lambda x: torch.stack([x, -x], dim),
        "select": lambda x: x.select(dim, start), "unflatten": lambda x: x.unflatten(dim, (2, size // 2)),
        "split": lambda x: x.split(max(1, size // 2), dim)[0], "tril": lambda x: x if rank < 2 else x.tril(1 - start),
        "torch_roll": lambda x: x.roll(start + 1, dim), "diagonal": lambda x: torch.diag_embed(x, 1 - start),
        "pick": lambda x: x[(slice(None),) * dim + ((torch.arange(size) * step + start) % size,)],
        "select_rows": lambda x: x.index_select(dim, (size - 1 - torch.arange(size)) // step),
        "take": lambda x: torch.take_along_dim(x, (torch.arange(size).view(
            [-1 if d == dim else 1 for d in range(rank)]).expand_as(x) + start) % size, dim),
        "put": lambda x: _put(x, dim, torch.arange(start, size, step)),
        "copy": lambda x: x.index_copy(dim, torch.arange(start, size, step), x.flip(dim).narrow(
            dim, 0, len(range(start, size, step)))),
    }
    return f"{kind}({dim},{other},{start},{step})", steps[kind]


def _put(x: torch.Tensor, dim: int, at: torch.Tensor) -> torch.Tensor:
    where = (slice(None),) * dim + (at,)
    x = x.clone()
    x[where] = x.flip(dim)[where]
    return x


@st.composite
def value_step(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[str, Step]:
    """One operator that computes."""
    rank = len(shape)
    dim = draw(st.integers(0, rank - 1))
    kinds = {
        "affine": lambda x: x * 0.5 - 0.25, "square": lambda x: x * x, "exp": lambda x: torch.exp(x.clamp(-3, 3)),
        "sigmoid": lambda x: x.sigmoid(), "where": lambda x: torch.where(x > 0.1, x, -x), "sub": lambda x: 1 - x,
        "softmax": lambda x: x.softmax(dim), "sum": lambda x: x.sum(dim, keepdim=True),
        "amax": lambda x: x.abs().amax(dim, keepdim=True), "mean": lambda x: x.mean(dim, keepdim=True),
        "normalise": lambda x: x / (x.abs().sum(dim, keepdim=True) + 1), "lse": lambda x: x.logsumexp(dim, True),
        "matmul": lambda x: x.reshape(-1, x.shape[-1]) @ x.reshape(-1, x.shape[-1]).T,
        "cumsum": lambda x: x.cumsum(dim),
        "max": lambda x: x.max(dim).values, "maximum": lambda x: torch.maximum(x, x.flip(dim)),
        "mask": lambda x: x.masked_fill(x < 0, -1.0), "complex": _complex,
        "convolution": lambda x: torch.nn.functional.conv1d(
            x.reshape(1, -1, shape[-1]), torch.arange(1.0, x.numel() // shape[-1] + 1, dtype=x.dtype).reshape(-1, 1, 1),
            groups=x.numel() // shape[-1]),
        "eye": lambda x: x.reshape(-1, shape[-1]) @ torch.eye(shape[-1], dtype=x.dtype).roll(1, 0),
    }
    name = draw(st.sampled_from(sorted(kinds)))
    return f"{name}({dim})", kinds[name]


def _complex(x: torch.Tensor) -> torch.Tensor:
    if x.shape[-1] % 2:
        return x
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
    turned = pairs * torch.polar(torch.ones_like(pairs.real), pairs.real).conj()
    return torch.view_as_real(turned).flatten(-2)


@st.composite
def program(draw: st.DrawFn, moves_only: bool = False) -> tuple[list[str], Step, tuple[int, ...]]:
    """Names of the steps, the function, and the shape of its input."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)))
    names: list[str] = []
    steps: list[Step] = []
    current = torch.zeros(shape, dtype=torch.float64)
    for _ in range(draw(st.integers(1, 7))):
        kind = layout_step if moves_only or draw(st.booleans()) else value_step
        name, step = draw(kind(tuple(current.shape)))
        following = step(current)
        if not 0 < following.numel() <= 4096 or not 0 < following.dim() <= 6:
            continue
        names.append(name)
        steps.append(step)
        current = following

    def run(x: torch.Tensor) -> torch.Tensor:
        for step in steps:
            x = step(x)
        return x * 1.0
    return names, run, shape
