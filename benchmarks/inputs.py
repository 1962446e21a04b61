"""Random inputs of one attention layer and of its output projection, as the tables use them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.shapes import Shape

DEVICE = "cuda"
POOL_ROWS = 65536
PAGE_ROWS = 64  # rows of a page of the FP8 cache
ROW_BYTES = 584  # 448 e4m3 + 64 bf16 (576), then 7 exponent bytes and one of padding
NOPE = 448


@dataclass(frozen=True)
class AttentionInputs:
    """Queries of T tokens and their keys: indices into a window pool and a compressed pool."""

    q: Tensor  # [T, H, 512] bf16
    kv: Tensor  # [N, 512] bf16
    extra_kv: Tensor
    indices: Tensor  # [T, window] int32
    extra_indices: Tensor  # [T, compressed] int32, about 2 % of them -1
    sink: Tensor  # [H] fp32
    cos: Tensor  # [T, 32] fp32
    sin: Tensor
    scale: float


@dataclass(frozen=True)
class Projection:
    """Weight of the grouped output projection, quantised in blocks of 128 x 128."""

    weight: Tensor  # [G, R, K] float8_e4m3fn
    scales: Tensor  # [G, R/128, K/128] fp32


def pools(count: int, rows: int = POOL_ROWS, dim: int = 512) -> list[Tensor]:
    """`count` key pools [rows, dim] bf16."""
    return [torch.randn(rows, dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(count)]


def attention_inputs(shape: Shape, tokens: int, kv: Tensor, extra_kv: Tensor) -> AttentionInputs:
    """Fresh queries and random indices over the given pools."""

    def indices(width: int, rows: int, invalid: float) -> Tensor:
        drawn = torch.randint(0, rows, (tokens, width), device=DEVICE, dtype=torch.int32)
        return drawn.masked_fill_(torch.rand(tokens, width, device=DEVICE) < invalid, -1)

    angle = torch.rand(tokens, shape.rope_dim // 2, device=DEVICE) * 6.28
    return AttentionInputs(
        torch.randn(tokens, shape.heads, shape.head_dim, device=DEVICE, dtype=torch.bfloat16),
        kv,
        extra_kv,
        indices(shape.window_keys, kv.shape[0], 0.0),
        indices(shape.compressed_keys, extra_kv.shape[0], 0.02),
        torch.randn(shape.heads, device=DEVICE),
        angle.cos(),
        angle.sin(),
        shape.head_dim**-0.5,
    )


def quantised_rows(groups: int, tokens: int, width: int) -> tuple[Tensor, Tensor]:
    """Random activations [G, T, K] e4m3 with power-of-two fp32 scales [G, K/128, M], padding columns zero."""
    x = torch.randn(groups, tokens, width // 128, 128, device=DEVICE)
    scale = torch.exp2(torch.ceil(torch.log2(x.abs().amax(-1) / 448)))
    codes = (x / scale.unsqueeze(-1)).to(torch.float8_e4m3fn).view(groups, tokens, width)
    padded = torch.zeros(groups, width // 128, (tokens + 3) // 4 * 4, device=DEVICE)
    padded[..., :tokens] = scale.transpose(1, 2)
    return codes, padded


def projection(shape: Shape) -> Projection:
    """Random weight of the grouped projection."""
    groups, rank, width = shape.groups, shape.rank, shape.group_width
    blocks = torch.randn(groups, rank // 128, 128, width // 128, 128, device=DEVICE)
    scale = blocks.abs().amax((2, 4)) / 448
    codes = (blocks / scale[:, :, None, :, None]).to(torch.float8_e4m3fn)
    return Projection(codes.view(groups, rank, width), scale)


def fp8_pages(kv: Tensor) -> Tensor:
    """Rows [N, 512] as a paged FP8 cache [N / 64, 64, 1, 584] uint8 (each page padded to a multiple of 576 bytes).

    A page holds its rows' 576 bytes (448 e4m3, 64 bf16), then its rows' 8 exponent bytes (7 blocks of 64, one padding).
    """
    rows = kv.shape[0]
    nope = kv[:, :NOPE].float().view(rows, 7, 64)
    scale = torch.exp2(torch.ceil(torch.log2((nope.abs().amax(-1) / 448).clamp_min(1e-4))))
    codes = (nope / scale.unsqueeze(-1)).to(torch.float8_e4m3fn).view(rows, NOPE).view(torch.uint8)
    data = torch.cat([codes, kv[:, NOPE:].contiguous().view(torch.uint8)], 1)
    exponents = torch.zeros(rows, 8, dtype=torch.uint8, device=kv.device)
    exponents[:, :7] = (torch.log2(scale) + 127).to(torch.uint8)
    pages = rows // PAGE_ROWS
    used = PAGE_ROWS * ROW_BYTES
    storage = torch.zeros(pages, -(-used // 576) * 576, dtype=torch.uint8, device=kv.device)
    storage[:, : PAGE_ROWS * 576] = data.view(pages, -1)
    storage[:, PAGE_ROWS * 576 : used] = exponents.view(pages, -1)
    return storage.as_strided((pages, PAGE_ROWS, 1, ROW_BYTES), (storage.stride(0), ROW_BYTES, ROW_BYTES, 1))
