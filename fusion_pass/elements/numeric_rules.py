"""Element rules of operators that are neither moves, contractions nor pointwise: reductions, softmax, data-dependent
loads, bit reinterpretation, complex views, fused scaled-dot-product attention."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
import torch.fx as fx

from ..fx_access import args_of, kwargs_of, target_of
from .loads import INDEXED, BooleanIndex, load_index
from .moves import CASTS, broadcast_index, ravel, unravel
from .numeric import EIGHT_BIT, MAX_ELEMENTS, Numeric, Unevaluated, cast_like, to_dtype, widen

aten = torch.ops.aten
prims = torch.ops.prims


def _cast(engine: Numeric, node: fx.Node, index: torch.Tensor) -> torch.Tensor:
    return to_dtype(engine.values(args_of(node)[0], index), engine.sizes.dtype(node))


def _bits(engine: Numeric, node: fx.Node, index: torch.Tensor) -> torch.Tensor:
    """``view(dtype)``: reinterpret bits; the last dimension shrinks or grows with the item sizes."""
    source = args_of(node)[0]
    before, after = engine.sizes.dtype(source), engine.sizes.dtype(node)
    if before.itemsize == after.itemsize:
        raw = engine.values(source, index).to(before) if before not in EIGHT_BIT else (
            engine.values(source, index).to(torch.float32).to(before))
        return widen(raw.view(after))
    if before.itemsize > after.itemsize:
        times = before.itemsize // after.itemsize
        raw = engine.values(source, index // times).to(before).view(after).view(-1, times)
        return widen(raw.gather(1, (index % times)[:, None]).flatten())
    times = after.itemsize // before.itemsize
    at = (index[:, None] * times + torch.arange(times)).flatten()
    raw = engine.values(source, at)
    raw = raw.to(torch.float32).to(before) if before in EIGHT_BIT else raw.to(before)
    return widen(raw.view(-1, times).view(after).flatten())


def _view_as_complex(engine: Numeric, node: fx.Node, index: torch.Tensor) -> torch.Tensor:
    pairs = engine.values(args_of(node)[0], torch.stack([index * 2, index * 2 + 1], 1).flatten()).view(-1, 2)
    return torch.complex(pairs[:, 0].contiguous(), pairs[:, 1].contiguous())


def _view_as_real(engine: Numeric, node: fx.Node, index: torch.Tensor) -> torch.Tensor:
    whole = engine.values(args_of(node)[0], index // 2)
    return torch.where(index % 2 == 0, whole.real, whole.imag)


def _conj(engine: Numeric, node: fx.Node, index: torch.Tensor) -> torch.Tensor:
    return engine.values(args_of(node)[0], index).conj().resolve_conj()


def _conj_free(engine: Numeric, node: fx.Node, index: torch.Tensor) -> torch.Tensor:
    return engine.values(args_of(node)[0], index)


def _polar(engine: Numeric, node: fx.Node, index: torch.Tensor) -> torch.Tensor:
    radius, angle = (engine.values(a, broadcast_index(index, engine.sizes.shape(node), engine.sizes.shape(a)))
                     for a in args_of(node))
    return torch.polar(radius, angle)


def _complex(engine: Numeric, node: fx.Node, index: torch.Tensor) -> torch.Tensor:
    re, im = (engine.values(a, broadcast_index(index, engine.sizes.shape(node), engine.sizes.shape(a)))
              for a in args_of(node)[:2])
    return torch.complex(re.to(torch.float64), im.to(torch.float64))


def _boolean_put(engine: Numeric, node: fx.Node, index: torch.Tensor) -> torch.Tensor:
    """``x[mask] = scalar``."""
    base, (mask, *more), value = args_of(node)[:3]
    if more or engine.sizes.numel(value) != 1:
        raise Unevaluated(node, "boolean index_put of more than one value")
    shape, mask_shape = engine.sizes.shape(base), engine.sizes.shape(mask)
    tail = engine.sizes.numel(node) // max(engine.sizes.numel(mask), 1)
    assert shape[:len(mask_shape)] == mask_shape
    chosen = engine.values(mask, index // tail)
    put = engine.values(value, torch.zeros(1, dtype=torch.int64))
    result = engine.values(base, index)
    return torch.where(chosen, put.to(result.dtype), result)


def _arange(engine: Numeric, node: fx.Node, index: torch.Tensor) -> torch.Tensor:
    numbers = [engine.sizes.number(a) for a in args_of(node)]
    start: int | float = 0
    step: int | float = 1
    if node.target is prims.iota.default:
        start, step = engine.sizes.number(kwargs_of(node)["start"]), engine.sizes.number(kwargs_of(node)["step"])
    elif node.target is aten.arange.start:
        start = numbers[0]
    elif node.target is aten.arange.start_step:
        start, step = numbers[0], numbers[2] if len(numbers) > 2 else 1
    return cast_like(index * step + start, engine.sizes.dtype(node))


def _eye(engine: Numeric, node: fx.Node, index: torch.Tensor) -> torch.Tensor:
    columns = engine.sizes.shape(node)[1]
    return cast_like(index // columns == index % columns, engine.sizes.dtype(node))


def _dims_of(engine: Numeric, node: fx.Node, position: int = 1) -> tuple[list[int], bool]:
    rank = len(engine.sizes.shape(args_of(node)[0]))
    dims = args_of(node)[position] if len(args_of(node)) > position else kwargs_of(node).get("dim")
    dims = engine.sizes.argument(dims)
    keepdim = kwargs_of(node).get("keepdim", False)
    if len(args_of(node)) > position + 1:
        keepdim = args_of(node)[position + 1]
    if dims is None or dims == []:
        return list(range(rank)), bool(keepdim)
    return [d % rank for d in ([dims] if isinstance(dims, int) else dims)], bool(keepdim)


Rule = Callable[[Numeric, fx.Node, torch.Tensor], torch.Tensor]


def _reduction(function: Callable[[torch.Tensor], torch.Tensor]) -> Rule:
    def rule(engine: Numeric, node: fx.Node, index: torch.Tensor) -> torch.Tensor:
        dims, keepdim = _dims_of(engine, node)
        # A statistic that is broadcast back along its row is asked for once per element of the row.
        unique, where = torch.unique(index, return_inverse=True)
        return function(engine.rows(node, args_of(node)[0], dims, keepdim, unique))[where]
    return rule


def _getitem(engine: Numeric, node: fx.Node, index: torch.Tensor) -> torch.Tensor:
    parent, which = args_of(node)
    rule = TUPLE_RULES.get(parent.target)
    if rule is None:
        raise Unevaluated(node, f"output {which} of {parent.target} has no element rule")
    return rule(engine, parent, which, index)


def _max_dim(engine: Numeric, node: fx.Node, which: int, index: torch.Tensor) -> torch.Tensor:
    dims, keepdim = _dims_of(engine, node)
    unique, where = torch.unique(index, return_inverse=True)
    rows = engine.rows(node, args_of(node)[0], dims, keepdim, unique)
    result = rows.max(1) if node.target is aten.max.dim else rows.min(1)
    return result[which][where]


def _softmax(engine: Numeric, node: fx.Node, index: torch.Tensor) -> torch.Tensor:
    source = args_of(node)[0]
    shape = engine.sizes.shape(source)
    dim = int(engine.sizes.number(args_of(node)[1])) % len(shape)
    coordinates = unravel(index, shape)
    outer = coordinates[:dim] + coordinates[dim + 1:]
    outer_shape = shape[:dim] + shape[dim + 1:]
    outer_index = ravel(outer, outer_shape) if outer else torch.zeros_like(index)
    unique, where = torch.unique(outer_index, return_inverse=True)
    rows = engine.rows(node, source, [dim], False, unique)
    probabilities = torch.softmax(rows, 1)
    if node.target is aten._safe_softmax.default:
        probabilities = torch.where((rows == -torch.inf).all(1, keepdim=True), 0.0, probabilities)
    if node.target in (aten._log_softmax.default, aten.log_softmax.int):
        probabilities = torch.log_softmax(rows, 1)
    return probabilities[where, coordinates[dim]]


def _sdpa(engine: Numeric, node: fx.Node, which: int, index: torch.Tensor) -> torch.Tensor:
    """Output (0) or log-sum-exp (1) of the fused scaled-dot-product operators."""
    query, key, value = args_of(node)[:3]
    schema = [a.name for a in target_of(node)._schema.arguments]
    given = dict(zip(schema, args_of(node))) | dict(kwargs_of(node))
    mask = given.get("attn_mask", given.get("attn_bias"))
    if given.get("dropout_p", 0.0) not in (0, 0.0):
        raise Unevaluated(node, "dropout")
    b, h, s, d = engine.sizes.shape(query)
    _, kv_heads, n, dv = engine.sizes.shape(value)
    scale = given.get("scale")
    scale = d ** -0.5 if scale is None else float(engine.sizes.number(scale))
    if which == 0:
        row, column = index // dv, index % dv
    elif which == 1:
        row, column = index, index
    else:
        raise Unevaluated(node, f"output {which} of {node.target}")
    rows, where = torch.unique(row, return_inverse=True)
    batch, head, token = rows // (h * s), rows // s % h, rows % s
    kv_head = head * kv_heads // h
    q = engine.values(query, (rows[:, None] * d + torch.arange(d)).flatten()).view(-1, 1, d)
    at = (batch * kv_heads + kv_head)[:, None, None] * n + torch.arange(n)[None, :, None]
    if len(rows) * n * d > MAX_ELEMENTS:
        raise Unevaluated(node, "too many products")
    k = engine.values(key, (at * d + torch.arange(d)).flatten()).view(len(rows), n, d)
    scores = (q * k).sum(-1) * scale
    if mask is not None:
        full = ((batch * h + head) * s + token)[:, None] * n + torch.arange(n)
        at_mask = broadcast_index(full, (b, h, s, n), engine.sizes.shape(mask)).flatten()
        values = engine.values(mask, at_mask).view(scores.shape)
        scores = scores.masked_fill(~values, -torch.inf) if values.dtype == torch.bool else scores + values
    if given.get("is_causal"):
        scores = scores.masked_fill(torch.arange(n)[None] > token[:, None], -torch.inf)
    if which == 1:
        return torch.logsumexp(scores, 1)[where]
    probabilities = torch.softmax(scores, 1)
    at_value = ((batch * kv_heads + kv_head)[where][:, None] * n + torch.arange(n)) * dv + column[:, None]
    return (probabilities[where] * engine.values(value, at_value.flatten()).view(at_value.shape)).sum(1)


def _indexed(engine: Numeric, node: fx.Node, index: torch.Tensor) -> torch.Tensor:
    """Data-dependent loads: ``x[i, j]``, index_select, gather, embedding. Out-of-range indices wrap."""
    try:
        source, at = load_index(node, index, engine.sizes, engine.values)
    except BooleanIndex as error:
        raise Unevaluated(node, "boolean index") from error
    return engine.values(source, at)


def _index_put(engine: Numeric, node: fx.Node, index: torch.Tensor) -> torch.Tensor:
    """``x[i] = v`` with index tensors for the leading dimensions (the last writer wins)."""
    base, indices, value = args_of(node)[:3]
    if len(indices) == 1 and indices[0] is not None and engine.sizes.dtype(indices[0]) == torch.bool:
        return _boolean_put(engine, node, index)
    if len(args_of(node)) > 3 and args_of(node)[3]:
        raise Unevaluated(node, "accumulating index_put")
    shape = engine.sizes.shape(base)
    if any(i is None for i in indices):
        raise Unevaluated(node, "index_put with gaps")
    broadcast = tuple(torch.broadcast_shapes(*[engine.sizes.shape(i) for i in indices]))  # type: ignore[no-untyped-call]
    tail_shape = shape[len(indices):]
    count = 1
    for size in broadcast:
        count *= size
    if count > MAX_ELEMENTS // 64:
        raise Unevaluated(node, "too many writes")
    writes = torch.arange(count)
    heads = [engine.values(i, broadcast_index(writes, broadcast, engine.sizes.shape(i))) for i in indices]
    if any(h.dtype == torch.bool for h in heads):
        raise Unevaluated(node, "boolean index_put")
    written = ravel([h % s for h, s in zip(heads, shape)], shape[:len(indices)])
    tail = 1
    for size in tail_shape:
        tail *= size
    owner = {int(w): i for i, w in enumerate(written.tolist())}
    result = engine.values(base, index).clone()
    lanes = [lane for lane, i in enumerate((index // tail).tolist()) if i in owner]
    if lanes:
        chosen = torch.tensor(lanes)
        which = torch.tensor([owner[int(i)] for i in (index[chosen] // tail).tolist()])
        full = which * tail + index[chosen] % tail
        at = broadcast_index(full, broadcast + tail_shape, engine.sizes.shape(value))
        result[chosen] = engine.values(value, at).to(result.dtype)
    return result


def _logsumexp(rows: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(rows, 1)


def _cumsum(engine: Numeric, node: fx.Node, index: torch.Tensor) -> torch.Tensor:
    shape = engine.sizes.shape(node)
    dim = int(engine.sizes.number(args_of(node)[1])) % len(shape)
    coordinates = unravel(index, shape)
    outer = coordinates[:dim] + coordinates[dim + 1:]
    outer_shape = shape[:dim] + shape[dim + 1:]
    rows = engine.rows(node, args_of(node)[0], [dim], False, ravel(outer, outer_shape) if outer else 0 * index)
    return rows.cumsum(1).gather(1, coordinates[dim][:, None]).flatten()


def _vector_norm(engine: Numeric, node: fx.Node, index: torch.Tensor) -> torch.Tensor:
    order = args_of(node)[1] if len(args_of(node)) > 1 else 2
    dims, _ = _dims_of(engine, node, 2)
    keepdim = bool(args_of(node)[3]) if len(args_of(node)) > 3 else bool(kwargs_of(node).get("keepdim", False))
    unique, where = torch.unique(index, return_inverse=True)
    rows = engine.rows(node, args_of(node)[0], dims, keepdim, unique)
    norms: torch.Tensor = torch.linalg.vector_norm(rows, float(order), 1)
    return norms[where]


def _aminmax(engine: Numeric, node: fx.Node, which: int, index: torch.Tensor) -> torch.Tensor:
    rank = len(engine.sizes.shape(args_of(node)[0]))
    dim, keepdim = kwargs_of(node).get("dim"), bool(kwargs_of(node).get("keepdim", False))
    unique, where = torch.unique(index, return_inverse=True)
    rows = engine.rows(node, args_of(node)[0], list(range(rank)) if dim is None else [dim % rank], keepdim, unique)
    return (rows.amin(1) if which == 0 else rows.amax(1))[where]


def _frexp(engine: Numeric, node: fx.Node, which: int, index: torch.Tensor) -> torch.Tensor:
    return widen(torch.frexp(engine.values(args_of(node)[0], index))[which])


def _total(function: Callable[[torch.Tensor], torch.Tensor]) -> Rule:
    def rule(engine: Numeric, node: fx.Node, index: torch.Tensor) -> torch.Tensor:
        rank = len(engine.sizes.shape(args_of(node)[0]))
        return function(engine.rows(node, args_of(node)[0], list(range(rank)), False, index))
    return rule


def _sum(engine: Numeric, node: fx.Node, index: torch.Tensor) -> torch.Tensor:
    return _reduction(lambda rows: rows.sum(1))(engine, node, index)


RULES: dict[object, Callable[[Numeric, fx.Node, torch.Tensor], torch.Tensor]] = {
    **dict.fromkeys(CASTS, _cast), **dict.fromkeys(INDEXED, _indexed),
    aten.view.dtype: _bits, aten.view_as_complex.default: _view_as_complex,
    aten.view_as_real.default: _view_as_real, aten.arange.default: _arange, aten.arange.start: _arange,
    aten.arange.start_step: _arange, prims.iota.default: _arange, operator.getitem: _getitem,
    aten.sum.dim_IntList: _sum, aten.sum.default: _total(lambda r: r.sum(1)),
    aten.mean.dim: _reduction(lambda r: r.to(torch.float64).mean(1)), aten.mean.default: _total(lambda r: r.mean(1)),
    aten.amax.default: _reduction(lambda r: r.amax(1)), aten.amin.default: _reduction(lambda r: r.amin(1)),
    aten.max.default: _total(lambda r: r.amax(1)), aten.min.default: _total(lambda r: r.amin(1)),
    aten.linalg_vector_norm.default: _vector_norm, aten.logsumexp.default: _reduction(_logsumexp),
    aten.prod.dim_int: _reduction(lambda r: r.prod(1)),
    aten.any.dim: _reduction(lambda r: (r != 0).any(1)), aten.all.dim: _reduction(lambda r: (r != 0).all(1)),
    aten.any.dims: _reduction(lambda r: (r != 0).any(1)), aten.all.dims: _reduction(lambda r: (r != 0).all(1)),
    aten.any.default: _total(lambda r: (r != 0).any(1)), aten.all.default: _total(lambda r: (r != 0).all(1)),
    aten._softmax.default: _softmax, aten.softmax.int: _softmax, aten._safe_softmax.default: _softmax,
    aten._log_softmax.default: _softmax, aten.log_softmax.int: _softmax, aten.cumsum.default: _cumsum,
    aten.index_put.default: _index_put, aten._conj.default: _conj, aten._conj_physical.default: _conj,
    aten.conj.default: _conj, aten.conj_physical.default: _conj, aten.polar.default: _polar,
    aten.eye.default: _eye, aten.eye.m: _eye, aten.complex.default: _complex,
    aten.view_as_complex_copy.default: _view_as_complex, aten.view_as_real_copy.default: _view_as_real,
    aten.real.default: lambda e, n, i: torch.real(e.values(args_of(n)[0], i)),
    aten.imag.default: lambda e, n, i: torch.imag(e.values(args_of(n)[0], i)),
    aten.resolve_conj.default: _conj_free, aten.resolve_neg.default: _conj_free,
    aten.scaled_dot_product_attention.default: lambda e, n, i: _sdpa(e, n, 0, i),
}
TUPLE_RULES: dict[object, Callable[[Numeric, fx.Node, int, torch.Tensor], torch.Tensor]] = {
    aten.max.dim: _max_dim, aten.min.dim: _max_dim, aten.aminmax.default: _aminmax, aten.frexp.Tensor: _frexp,
}
for _name in ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
              "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
              "_scaled_dot_product_attention_math"):
    if hasattr(aten, _name):
        TUPLE_RULES[getattr(aten, _name).default] = _sdpa
