# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs
"""DeepGEMM's fp8_einsum as a backend of ``fp8_bgemm`` for many tokens, where it is installed and asked for.

It is faster than our Hopper kernel from 256 tokens on, but compiles with nvcc at its first call for a shape, which a
server does not want unasked: it is used only with ``FUSION_PASS_BGEMM=deepgemm`` in the environment.
"""

import importlib
import os
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from ..modes import current
from ..tuning.bgemm import DEEPGEMM_TOKENS
from .gate import hopper_reason

SWITCH = "FUSION_PASS_BGEMM"


@cache
def _module() -> ModuleType | None:
    try:
        module = importlib.import_module("deep_gemm")
    except (ImportError, OSError, RuntimeError):
        return None
    return module if hasattr(module, "fp8_einsum") else None


def refuses(
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    block: int,
    weight_block: int,
    out_dtype: torch.dtype,
) -> str | None:
    """Why DeepGEMM does not take this call (arguments of the op), or None."""
    if os.environ.get(SWITCH, "").lower() != "deepgemm":
        return f"not asked for ({SWITCH}=deepgemm)"
    if reason := hopper_reason(codes.device):
        return reason
    if current().batch_invariant:
        return "batch_invariant: one kernel for every number of tokens, the portable one"
    if codes.shape[1] < DEEPGEMM_TOKENS:
        return f"{codes.shape[1]} tokens: from {DEEPGEMM_TOKENS} on"
    if (block, weight_block) != (128, 128):
        return f"blocks {block}, {weight_block}; 128 only"
    if scales.dtype != torch.float32 or weight_scales.dtype != torch.float32:
        return "scales that are not fp32"
    if out_dtype != torch.bfloat16:
        return f"output dtype {out_dtype}; bfloat16 only"
    if weight.shape[1] % 128:
        return f"R {weight.shape[1]} is not a multiple of 128"
    if _module() is None:
        return "deep_gemm with fp8_einsum is not importable"
    return None


def launch(outs, codes, scales, weight, weight_scales, block, weight_block, out_dtype) -> None:
    """out [T, G, R]; codes [G, T, K], scales [G, K/128, M] token-contiguous, as the op takes them."""
    tokens = codes.shape[1]
    a = (codes.contiguous().transpose(0, 1), scales.contiguous()[..., :tokens].permute(2, 0, 1))
    b = (weight.contiguous(), weight_scales.contiguous())
    module = _module()
    assert module is not None  # or `refuses` had said so
    module.fp8_einsum("bhr,hdr->bhd", a, b, outs[0], None, (1, 128, 128))
