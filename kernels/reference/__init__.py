# SPDX-License-Identifier: Apache-2.0
"""Pure-torch semantics of every ``fusion_pass`` op.

These functions define what the kernels must compute, and they are the CPU implementations of the ops. They take real
tensors on any device, compute in fp32 (fp64 for fp64 inputs) and round once, at the end.
"""

from .attention import attention, attention_rope, attention_rope_quant
from .bgemm import fp8_bgemm
from .gathered import (
    attention_gathered,
    attention_gathered_rope,
    attention_gathered_rope_quant,
    attention_partials,
)
from .merge import merge_partials, merge_partials_rope, merge_partials_rope_quant
from .paged import (
    attention_paged_fp8,
    attention_paged_fp8_rope,
    attention_paged_fp8_rope_quant,
    decode_pages,
)
from .quant import dequantise, expand_scales, quantise, scale_columns
from .rope import group_heads, inverse_rope, inverse_rope_quant, rotate_inverse

__all__ = [
    "attention",
    "attention_gathered",
    "attention_gathered_rope",
    "attention_gathered_rope_quant",
    "attention_paged_fp8",
    "attention_paged_fp8_rope",
    "attention_paged_fp8_rope_quant",
    "attention_partials",
    "attention_rope",
    "attention_rope_quant",
    "decode_pages",
    "dequantise",
    "expand_scales",
    "fp8_bgemm",
    "group_heads",
    "inverse_rope",
    "inverse_rope_quant",
    "merge_partials",
    "merge_partials_rope",
    "merge_partials_rope_quant",
    "quantise",
    "rotate_inverse",
    "scale_columns",
]
