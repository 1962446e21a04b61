# SPDX-License-Identifier: Apache-2.0
"""Validation shared by all ops: ValueError for shapes, values and devices, TypeError for dtypes.

The same checks run when an op is traced. There a size may be symbolic: comparing it would guard on it (and recompile,
or fail for data-dependent sizes), so symbolic sizes are left to the call on real tensors.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INDICES = (torch.int32, torch.int64)
SCALE_RULES = ("fp32", "ue8m0")
# Below this floor the scale floor / 448 is subnormal, where the exponent trick does not hold.
MIN_FLOOR = 448.0 * 2.0**-126


def known(size: object) -> bool:
    """Whether ``size`` is a plain number rather than a symbol."""
    return isinstance(size, int)


def fail(op: str, expected: str, got: str, hint: str = "") -> None:
    raise ValueError(f"fusion_pass::{op}: expected {expected}, got {got}." + (f" {hint}" if hint else ""))


def check_dtype(op: str, name: str, tensor: Tensor, allowed: Sequence[torch.dtype], hint: str = "") -> None:
    if tensor.dtype not in allowed:
        names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
        got = str(tensor.dtype).removeprefix("torch.")
        raise TypeError(
            f"fusion_pass::{op}: expected {name} of dtype {names}, got {got}." + (f" {hint}" if hint else "")
        )


def check_float(op: str, name: str, tensor: Tensor) -> None:
    check_dtype(op, name, tensor, ACTIVATIONS, "Convert it to a floating dtype.")


def check_shape(op: str, name: str, tensor: Tensor, shape: Sequence[Any], meaning: str, hint: str = "") -> None:
    """``shape`` holds sizes, a tuple of admissible sizes, or None for any; ``meaning`` spells it, e.g. "[T, H, D]"."""
    got = list(tensor.shape)
    good = len(got) == len(shape)
    for have, want in zip(got, shape):
        choices = want if isinstance(want, tuple) else (want,)
        if want is None or not known(have) or not all(known(c) for c in choices):
            continue
        good = good and have in choices
    if not good:
        wanted = ["any" if s is None else " or ".join(map(str, s)) if isinstance(s, tuple) else str(s) for s in shape]
        fail(op, f"{name} of shape {meaning} = [{', '.join(wanted)}]", str(got), hint)


def check_same_device(op: str, first: Tensor, **others: Tensor | None) -> None:
    for name, tensor in others.items():
        if tensor is not None and tensor.device != first.device:
            fail(op, f"{name} on {first.device} like the first argument", str(tensor.device), "Move it there.")


def check_same_dtype(op: str, name: str, tensor: Tensor, like: Tensor) -> None:
    check_dtype(op, name, tensor, (like.dtype,), "Cast it to the dtype of the first argument.")


def check_scale(op: str, scale: float) -> None:
    if not math.isfinite(scale):
        fail(op, "a finite scale", str(scale))


def check_window(op: str, window: int) -> None:
    if window < 0:
        fail(op, "window >= 0 (0 = no window)", str(window))


def check_groups(op: str, heads: int, dim: int, groups: int, rope: Tensor) -> None:
    """Head grouping and the rope table's width against head count and head_dim."""
    if groups < 1:
        fail(op, "groups >= 1", str(groups))
    if known(heads) and heads % groups:
        fail(op, f"groups to divide the {heads} heads", str(groups))
    half = rope.shape[-1]
    if known(half) and known(dim) and 2 * half > dim:
        fail(op, f"rope tables of at most {dim // 2} columns (head_dim / 2)", str(half))


def check_quant(op: str, dim: int, block: int, scale_rule: str, floor: float, pack_scales: bool, k: int) -> None:
    """Quantisation parameters; blocks must not straddle heads (``dim`` % ``block``), as every kernel relies on it."""
    if scale_rule not in SCALE_RULES:
        fail(op, f"scale_rule to be one of {SCALE_RULES}", repr(scale_rule))
    if block < 1 or (known(dim) and dim % block):
        fail(op, f"a block width that divides head_dim {dim}", str(block), "Use 128, or 32.")
    if not (math.isfinite(floor) and floor >= MIN_FLOOR):
        fail(op, f"a finite floor >= {MIN_FLOOR:.3e} (so that no scale is zero or subnormal)", str(floor))
    if pack_scales and scale_rule != "ue8m0":
        fail(op, 'scale_rule="ue8m0" with pack_scales=True', repr(scale_rule), "Raw fp32 scales cannot be packed.")
    if pack_scales and known(k) and k % (4 * block):
        fail(op, f"K divisible by 4 * block = {4 * block} with pack_scales=True", str(k))


def check_token_rope(op: str, cos: Tensor, sin: Tensor, tokens: int) -> None:
    """Tables of the token ops: [T, half]."""
    hint = "Give the rows of each token's own position."
    for name, table in (("cos", cos), ("sin", sin)):
        check_float(op, name, table)
        check_shape(op, name, table, (tokens, None), "[T, rope_dim / 2]", hint)
    check_shape(op, "sin", sin, tuple(cos.shape), "shape of cos")


def check_batch_rope(op: str, cos: Tensor, sin: Tensor, batch: int, queries: int) -> None:
    """Tables of the dense ops: [B or 1, S, half]."""
    hint = "Give the rows of each query's own position, batch size 1 if all sequences share them."
    for name, table in (("cos", cos), ("sin", sin)):
        check_float(op, name, table)
        check_shape(op, name, table, ((1, batch), queries, None), "[B or 1, S, rope_dim / 2]", hint)
    check_shape(op, "sin", sin, tuple(cos.shape), "shape of cos")


def check_sink(op: str, sink: Tensor | None, heads: int) -> None:
    if sink is not None:
        check_float(op, "sink", sink)
        check_shape(op, "sink", sink, (heads,), "[H]", "One logit per head.")


def check_out(op: str, name: str, out: Tensor, like: Tensor) -> None:
    """An out-variant's buffer must have exactly the shape and dtype of the result."""
    check_dtype(op, name, out, (like.dtype,))
    check_shape(op, name, out, tuple(like.shape), "the result's shape")
