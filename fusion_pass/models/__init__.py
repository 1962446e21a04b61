"""Parts of models in plain torch ops, to be traced: what an FP8 checkpoint computes, without anybody's kernels."""

from __future__ import annotations

from .fp8_linear import FP8GroupedLinear, quantize_activation, quantize_weight, replace_grouped_linear
from .random_deepseek_v4 import cache_argument, cache_tensors, filled_cache, random_deepseek_v4
from .tensor_parallel import split_attention
from .two_forms import GroupedLinearWithFP8, attach_fp8_weights

__all__ = [
    "FP8GroupedLinear",
    "GroupedLinearWithFP8",
    "attach_fp8_weights",
    "cache_argument",
    "cache_tensors",
    "filled_cache",
    "quantize_activation",
    "quantize_weight",
    "random_deepseek_v4",
    "replace_grouped_linear",
    "split_attention",
]
