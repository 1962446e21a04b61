"""Small chains to trace: one spelling per role, and what must not be taken for one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

HEADS, GROUPS, DIM, ROPE, RANK = 4, 2, 128, 16, 8


def inputs(batch: int = 1, tokens: int = 5, keys: int = 7, dtype: torch.dtype = torch.bfloat16) -> tuple:
    """q, kv, mask, sink, cos, sin, weight."""
    g = torch.Generator().manual_seed(batch * 100 + tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    angle = (torch.arange(tokens) + 3)[:, None] * 100.0 ** (-torch.arange(ROPE // 2) / (ROPE // 2))
    mask = torch.zeros(batch, 1, tokens, keys).masked_fill(torch.rand(batch, 1, tokens, keys, generator=g) < 0.2, -1e30)
    return (normal(batch, tokens, HEADS, DIM).to(dtype), normal(batch, keys, DIM).to(dtype), mask, normal(HEADS),
            angle.cos()[None].expand(batch, -1, -1), angle.sin()[None].expand(batch, -1, -1),
            (normal(GROUPS, RANK, HEADS // GROUPS * DIM) / 16).to(dtype))


def attention(q, kv, mask, sink, softmax=torch.softmax):
    """[B, S, H, D]; the sink is one more column, dropped again."""
    scores = torch.einsum("bshd,bnd->bhsn", q.float(), kv.float()) * DIM ** -0.5 + mask
    column = sink.view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[1], -1)
    p = softmax(torch.cat([scores, column], -1), -1)[..., :-1]
    return torch.einsum("bhsn,bnd->bshd", p, kv.float()).to(q.dtype)


def rotate(o, cos, sin):
    """The inverse rotation of interleaved pairs of the last channels."""
    even, odd = o[..., -ROPE::2].float(), o[..., -ROPE + 1::2].float()
    c, s = cos.unsqueeze(2), sin.unsqueeze(2)
    turned = torch.stack([even * c + odd * s, odd * c - even * s], -1).flatten(-2)
    return torch.cat([o[..., :-ROPE], turned.to(o.dtype)], -1)


def quantise(x, block=128):
    """1 x block E4M3 with raw scales, and back."""
    blocks = x.float().unflatten(-1, (x.shape[-1] // block, block))
    scale = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-10) / 448.0
    return ((blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def project(o, weight):
    """[B, S, G, R]."""
    x = o.reshape(*o.shape[:2], GROUPS, HEADS // GROUPS * DIM)
    return torch.einsum("bsgk,grk->bsgr", x, weight.to(x.dtype))


def chain(q, kv, mask, sink, cos, sin, weight):
    return project(rotate(attention(q, kv, mask, sink), cos, sin), weight)


def quantised_chain(q, kv, mask, sink, cos, sin, weight):
    o = rotate(attention(q, kv, mask, sink), cos, sin)
    return project(quantise(o.reshape(*o.shape[:2], GROUPS, HEADS // GROUPS * DIM)), weight)


def opaque(o, cos, sin, weight):
    return project(rotate(o, cos, sin), weight)


def merged(parts, lse, sink, cos, sin, weight):
    """Normalised partials [P, T, H, D] and their natural log-sum-exp, merged with the sink."""
    top = torch.maximum(lse.amax(0), sink)
    weights = torch.exp(lse - top)
    total = weights.sum(0) + torch.exp(sink - top)
    o = ((parts.float() * weights.unsqueeze(-1)).sum(0) / total.unsqueeze(-1)).to(parts.dtype)
    return project(rotate(o[None], cos, sin), weight)


def merge_inputs(parts: int = 3, tokens: int = 5) -> tuple:
    _, _, _, sink, cos, sin, weight = inputs(1, tokens)
    g = torch.Generator().manual_seed(parts)
    return (torch.randn(parts, tokens, HEADS, DIM, generator=g), torch.randn(parts, tokens, HEADS, generator=g), sink,
            cos, sin, weight.float())


def aot(fn: Callable, args: tuple, dynamic: bool = False) -> fx.GraphModule:
    """The graph that AOTAutograd makes for inference."""
    found = []

    def keep(gm, _inputs):
        found.append(gm)
        return gm

    torch._dynamo.reset()
    if dynamic:
        for tensor, dims in zip(args, ((1,), (), (2,), (), (1,), (1,), ())):
            for dim in dims:
                torch._dynamo.maybe_mark_dynamic(tensor, dim)
    with torch.no_grad():
        torch.compile(fn, backend=aot_autograd(fw_compiler=keep, inference_compiler=keep), fullgraph=True)(*args)
    return found[0]


def raw(fn: Callable, args: tuple, functional: bool = True) -> fx.GraphModule:
    """make_fx on fake tensors; ``functional``: without in-place operators."""
    with torch.no_grad():
        traced = torch.func.functionalize(fn, remove="mutations") if functional else fn
        return make_fx(traced, tracing_mode="fake")(*args)
