"""The chain as a model's own torch code states it, an operation after the other: what the pass finds, and what plain
Inductor compiles."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.inputs import AttentionInputs, Projection
from fusion_pass.models import quantize_activation

FLOOR = 1e-10  # of a block's largest magnitude, as in the fused chains


def attention(
    q: Tensor,
    kv: Tensor,
    extra_kv: Tensor,
    indices: Tensor,
    extra_indices: Tensor,
    sink: Tensor,
    scale: float,
) -> Tensor:
    """[T, H, D]: softmax with sinks over the keys that two index lists (-1: none) name, one of each pool."""
    keys = torch.cat([kv[indices.clamp_min(0).long()], extra_kv[extra_indices.clamp_min(0).long()]], 1)  # [T, K, D]
    masked = torch.cat([indices, extra_indices], 1) < 0
    scores = torch.matmul(q, keys.transpose(1, 2)).float() * scale
    scores = scores.masked_fill(masked.unsqueeze(1), float("-inf"))
    with_sink = torch.cat([scores, sink.view(1, -1, 1).expand(q.shape[0], -1, 1)], -1)
    return torch.matmul(with_sink.softmax(-1)[..., :-1].to(q.dtype), keys)


def inverse_rope(o: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """o [T, H, D] with its last 2 * half channels, interleaved pairs, turned back; cos, sin [T, half]."""
    half = cos.shape[-1]
    plain, turned = o.split([o.shape[-1] - 2 * half, 2 * half], -1)
    even, odd = turned.float().unflatten(-1, (half, 2)).unbind(-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    back = torch.stack([even * cos + odd * sin, odd * cos - even * sin], -1).flatten(-2)
    return torch.cat([plain, back.to(o.dtype)], -1)


def product(o: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """[T, G, R]: o [T, G, K] quantised in blocks of 128 with power-of-two scales, times weight [G, R, K] of E4M3 codes
    with scales [G, R/128, K/128]; both dequantised, as FP8 checkpoints are run in plain torch."""
    groups, rank, width = weight.shape
    codes, scales = quantize_activation(o.transpose(0, 1), "ue8m0", floor=FLOOR)
    rows = (codes.float().unflatten(-1, (width // 128, 128)) * scales.unsqueeze(-1)).flatten(-2)
    blocks = weight.float().view(groups, rank // 128, 128, width // 128, 128)
    values = (blocks * weight_scales[:, :, None, :, None]).view(groups, rank, width)
    return torch.bmm(rows.to(o.dtype), values.to(o.dtype).transpose(1, 2)).transpose(0, 1)


def unfused(attended: tuple, cos: Tensor, sin: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """[T, G, R]: the whole chain; ``attended``: the arguments of :func:`attention`."""
    o = inverse_rope(attention(*attended), cos, sin)
    return product(o.reshape(o.shape[0], weight.shape[0], -1), weight, weight_scales)


@functools.cache
def with_inductor() -> Callable[..., Tensor]:
    """:func:`unfused` compiled by plain Inductor, for every number of tokens anew."""
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(unfused, dynamic=False, fullgraph=True)


def call(function: Callable[..., Tensor], x: AttentionInputs, w: Projection) -> Tensor:
    """`function` with the signature of :func:`unfused` on a table's inputs."""
    attended = (x.q, x.kv, x.extra_kv, x.indices, x.extra_indices, x.sink, x.scale)
    with torch.no_grad():
        return function(attended, x.cos, x.sin, w.weight, w.scales)
