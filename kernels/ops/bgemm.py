# SPDX-License-Identifier: Apache-2.0
"""Op ``fp8_bgemm``: grouped matrix product of block-scaled E4M3 operands.

Shapes: codes [G, T, K] float8_e4m3fn (any strides); scales in either form of the quantising ops: fp32
[G, K/block, M] or packed int32 [G, K/(4*block), M], M = T rounded up to 4; weight [G, R, K] float8_e4m3fn;
weight_scales [G, ceil(R/weight_block), K/weight_block] fp32, float8_e8m0fnu, or its exponent bytes as uint8.
Result [T, G, R] in ``out_dtype``, accumulated in fp32. Mode ``weight_ready``: see :mod:`..modes`; a Hopper kernel may
read the weight before the kernel in front of it on the stream has finished.
"""

import torch
from torch import Tensor

from .. import reference
from . import checks
from .registry import OpSpec, register

OP = "fp8_bgemm"
MODES = ("batch_invariant", "weight_ready")
WEIGHT_SCALES = (torch.float32, torch.float8_e8m0fnu, torch.uint8)


def check_bgemm(
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    block: int,
    weight_block: int,
    out_dtype: torch.dtype,
) -> None:
    checks.check_same_device(OP, codes, scales=scales, weight=weight, weight_scales=weight_scales)
    checks.check_dtype(OP, "codes", codes, (checks.E4M3,), "Quantise with fusion_pass::inverse_rope_quant.")
    checks.check_dtype(OP, "scales", scales, (torch.float32, torch.int32))
    checks.check_dtype(OP, "weight", weight, (checks.E4M3,))
    checks.check_dtype(OP, "weight_scales", weight_scales, WEIGHT_SCALES)
    if out_dtype not in checks.ACTIVATIONS:
        raise TypeError(
            f"fusion_pass::{OP}: expected out_dtype bfloat16, float16, float32 or float64, got {out_dtype}."
        )
    checks.check_shape(OP, "codes", codes, (None, None, None), "[G, T, K]")
    groups, tokens, k = codes.shape
    checks.check_shape(OP, "weight", weight, (groups, None, k), "[G, R, K]")
    packing = 4 * block if scales.dtype == torch.int32 else block
    for name, width in (("block", block), ("weight_block", weight_block)):
        if width < 1 or (checks.known(k) and k % width):
            checks.fail(OP, f"{name} to divide K = {k}", str(width))
    if checks.known(k) and k % packing:
        checks.fail(OP, f"K divisible by 4 * block = {packing} with packed scales", str(k))
    columns = (tokens + 3) // 4 * 4
    meaning = "[G, K/(4*block), ceil(T/4)*4]" if scales.dtype == torch.int32 else "[G, K/block, ceil(T/4)*4]"
    checks.check_shape(OP, "scales", scales, (groups, k // packing, columns), meaning, "Pad the token columns to 4.")
    scale_rows = (weight.shape[1] + weight_block - 1) // weight_block
    checks.check_shape(
        OP,
        "weight_scales",
        weight_scales,
        (groups, scale_rows, k // weight_block),
        "[G, ceil(R/weight_block), K/weight_block]",
    )


def empty_bgemm(
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    block: int,
    weight_block: int,
    out_dtype: torch.dtype,
) -> tuple[Tensor]:
    groups, tokens, _ = codes.shape
    return (codes.new_empty((tokens, groups, weight.shape[1]), dtype=out_dtype),)


register(
    OpSpec(
        OP,
        "Tensor codes, Tensor scales, Tensor weight, Tensor weight_scales, int block=128, int weight_block=128, "
        # None = bfloat16. Not as the schema's default: when a program is packaged torch writes that down as a number,
        # which AOTInductor's loader refuses.
        "ScalarType? out_dtype=None",
        ("out",),
        check_bgemm,
        empty_bgemm,
        reference.fp8_bgemm,
        MODES,
    )
)
