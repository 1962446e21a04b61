"""Other people's kernels for the same work, when they are importable, and a stand-in for the one that no wheel carries.

- FlashMLA (`sgl-flash-mla`, legacy sm_90 kernels): sparse decode over FP8 pages, sparse forward over bf16 rows.
- DeepGEMM (`tokenspeed-deepgemm`): fp8_einsum, compiled by nvcc at its first call.
- vLLM's inverse-RoPE + quantisation kernel, where `vllm` is importable (its one module and its imports are enough).
- `row_per_warp_quant`: a stand-in for it where it is not, written here with the same design (one warp per token and
  head, the rotation partner reloaded). Tables name which of the two they timed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.harness import Call
from benchmarks.inputs import AttentionInputs


def _optional(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError):
        return None


VLLM_QUANT = "fused_inv_rope_fp8_quant"
_VLLM_HOMES = ("vllm.models.deepseek_v4.common.ops", "vllm.v1.attention.ops.deepseek_v4_ops")  # newest first


def vllm_quant() -> Callable[..., tuple[Tensor, Tensor]] | None:
    """vLLM's function, or None."""
    modules = (_optional(f"{home}.{VLLM_QUANT}") for home in _VLLM_HOMES)
    return next((getattr(module, VLLM_QUANT) for module in modules if module is not None), None)


def flash_mla() -> ModuleType | None:
    module = _optional("flash_mla")
    return module if module is not None and module.has_legacy() else None


def deep_gemm() -> ModuleType | None:
    module = _optional("deep_gemm")
    return module if module is not None and hasattr(module, "fp8_einsum") else None


def flash_mla_bf16(module: ModuleType, x: AttentionInputs, rows: Tensor) -> Call:
    """FlashMLA's sparse forward. It takes one pool: `rows` is x.kv followed by x.extra_kv."""
    offset = x.kv.shape[0]
    extra = torch.where(x.extra_indices >= 0, x.extra_indices + offset, x.extra_indices)
    indices = torch.cat([x.indices, extra], 1).unsqueeze(1).contiguous()
    kv = rows.unsqueeze(1)
    return lambda: module.flash_mla_sparse_fwd(x.q, kv, indices, x.scale, 512, x.sink, None, use_legacy=True)[0]


def flash_mla_fp8(module: ModuleType, x: AttentionInputs, pages: Tensor, extra_pages: Tensor) -> Call:
    """FlashMLA's sparse decode over FP8 pages of both pools; its schedule is planned at the first call and reused."""
    plan = module.get_mla_metadata()[0]
    q = x.q.unsqueeze(1)
    indices, extra = x.indices.unsqueeze(1), x.extra_indices.unsqueeze(1)

    def call() -> Tensor:
        out, _ = module.flash_mla_with_kvcache(
            q,
            pages,
            None,
            None,
            512,
            plan,
            None,
            x.scale,
            False,
            True,
            indices,
            x.sink,
            extra_pages,
            extra,
            use_legacy=True,
        )
        return out.squeeze(1)

    return call


def deep_gemm_bgemm(
    module: ModuleType, codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, out: Tensor
) -> Call:
    """fp8_einsum on codes [G, T, K], scales [G, K/128, M], weight [G, R, K] with fp32 scales; out [T, G, R]."""
    tokens = codes.shape[1]
    a = (codes.transpose(0, 1), scales[..., :tokens].permute(2, 0, 1))
    b = (weight, weight_scales)
    return lambda: module.fp8_einsum("bhr,hdr->bhd", a, b, out, None, (1, 128, 128))


@triton.jit(do_not_specialize=["tokens"])
def _row_per_warp(
    o,
    cos,
    sin,
    codes,
    scales,
    tokens,
    padded,
    HEADS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, 512)
    if token >= tokens:
        block = tl.arange(0, 4)
        tl.store(scales + (head * 4 + block) * padded + token, 0.0 * block)
        return
    row = o + (token * HEADS + head) * 512
    x = tl.load(row + column).to(tl.float32)
    partner = tl.load(row + (column ^ 1)).to(tl.float32)
    pair = column // 2 - (256 - HALF)
    rotated = pair >= 0
    c = tl.load(cos + token * HALF + pair, mask=rotated, other=1.0)
    s = tl.load(sin + token * HALF + pair, mask=rotated, other=0.0)
    x = tl.where(rotated, tl.where(column % 2 == 0, x * c + partner * s, x * c - partner * s), x)
    blocks = tl.reshape(x, [4, 128])
    amax = tl.maximum(tl.max(tl.abs(blocks), 1), 1e-10)
    scale = tl.exp2(tl.ceil(tl.log2(amax / 448.0)))
    y = tl.reshape(blocks / scale[:, None], [512]).to(tl.float8e4nv)
    out = codes + ((head // PER_GROUP) * tokens.to(tl.int64) + token) * (PER_GROUP * 512) + (head % PER_GROUP) * 512
    tl.store(out + column, y)
    tl.store(scales + (head * 4 + tl.arange(0, 4)) * padded + token, scale)


def row_per_warp_quant(o: Tensor, cos: Tensor, sin: Tensor, groups: int, codes: Tensor, scales: Tensor) -> None:
    """Stand-in, see the module: o [T, H, 512] -> codes [G, T, K], scales fp32 [G, K/128, M]."""
    tokens, heads, _ = o.shape
    _row_per_warp[(scales.shape[-1], heads)](
        o,
        cos,
        sin,
        codes,
        scales,
        tokens,
        scales.shape[-1],
        HEADS=heads,
        PER_GROUP=heads // groups,
        HALF=cos.shape[1],
        num_warps=1,
        num_stages=1,
    )


# o [T, H, 512] -> codes [G, T, K], scales fp32 [G, K/128, M]
Quantisation = Callable[[Tensor], tuple[Tensor, Tensor]]


def vllm_quantisation(cos: Tensor, sin: Tensor, groups: int) -> Quantisation | None:
    """vLLM's kernel with the rotation tables [T, half] as it takes them, made beforehand; None where it is missing."""
    function = vllm_quant()
    if function is None:
        return None
    table = torch.cat([cos, sin], 1).float().contiguous()
    positions = torch.arange(cos.shape[0], device=cos.device)

    def quantise(o: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = function(o, positions, table, groups, o.shape[1] // groups)
        padded = scales.stride(2)  # [T, G, K/128], tokens fastest
        whole = scales.as_strided((groups, scales.shape[2], padded), (scales.stride(1), padded, 1))
        return codes.transpose(0, 1), whole

    return quantise


def stand_in_quantisation(cos: Tensor, sin: Tensor, groups: int) -> Quantisation:
    """The stand-in, with outputs of its own as an engine's op allocates them."""

    def quantise(o: Tensor) -> tuple[Tensor, Tensor]:
        tokens, heads, dim = o.shape
        width = heads // groups * dim
        codes = torch.empty(groups, tokens, width, device=o.device, dtype=torch.float8_e4m3fn)
        scales = torch.empty(groups, width // 128, (tokens + 3) // 4 * 4, device=o.device)
        row_per_warp_quant(o, cos, sin, groups, codes, scales)
        return codes, scales

    return quantise


def quantisation(cos: Tensor, sin: Tensor, groups: int) -> Quantisation:
    """The kernel that a peers' chain uses: vLLM's, else the stand-in."""
    return vllm_quantisation(cos, sin, groups) or stand_in_quantisation(cos, sin, groups)
