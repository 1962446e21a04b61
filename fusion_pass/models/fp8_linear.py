"""The FP8 form of DeepSeek-V4's grouped output projection (``o_a_proj`` / ``wo_a``) in plain torch ops.

What the FP8 checkpoints compute, written so that any tracer sees every step: the activation is quantised on the fly to
E4M3 with one scale per 1x128 block along K, the weight is stored in E4M3 with one scale per 128x128 block, and the
product is taken from the codes. Inference only: the casts to E4M3 have no gradient.

Scales are a rule, not a detail: ``"fp32"`` is ``max(amax, floor) / 448``; ``"ue8m0"`` is that value rounded up to a
power of two, as UE8M0 storage demands (DeepSeek-V4's configuration says ``"scale_fmt": "ue8m0"``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
BLOCK = 128
SCALE_RULES = ("fp32", "ue8m0")


def quantize_activation(
    x: Tensor, scale_rule: str = "fp32", *, block: int = BLOCK, floor: float = 1e-12
) -> tuple[Tensor, Tensor]:
    """Quantise along the last dimension in blocks of 1 x ``block``.

    x: [..., K] of any float dtype, K a multiple of ``block``. floor: lower bound of a block's largest magnitude, so
    that a block of zeros has a scale. Returns codes [..., K] float8_e4m3fn and scales [..., K/block] float32 with x =
    codes * scale. Raises ValueError for a K that is not a multiple of the block or an unknown rule.
    """
    if x.shape[-1] % block:
        raise ValueError(f"quantize_activation: expected a multiple of {block} channels, got {x.shape[-1]}: pad them")
    blocks = x.float().reshape(*x.shape[:-1], x.shape[-1] // block, block)
    scale = _scale(blocks.abs().amax(-1, keepdim=True).clamp_min(floor), scale_rule)
    codes = (blocks / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return codes.reshape(x.shape), scale.squeeze(-1)


def quantize_weight(
    weight: Tensor, scale_rule: str = "fp32", *, block: int = BLOCK, floor: float = 1e-12
) -> tuple[Tensor, Tensor]:
    """Quantise in blocks of ``block`` x ``block``.

    weight: [..., R, K] of any float dtype, K a multiple of ``block`` (the last block of rows may be short). Returns
    codes [..., R, K] float8_e4m3fn and scales [..., ceil(R/block), K/block] float32. Raises ValueError as above.
    """
    rows, columns = weight.shape[-2:]
    if columns % block:
        raise ValueError(f"quantize_weight: expected a multiple of {block} columns, got {columns}: pad them")
    row_blocks = -(-rows // block)
    padded = nn.functional.pad(weight.float(), (0, 0, 0, row_blocks * block - rows))
    blocks = padded.reshape(*weight.shape[:-2], row_blocks, block, columns // block, block)
    scale = _scale(blocks.abs().amax((-3, -1), keepdim=True).clamp_min(floor), scale_rule)
    codes = (blocks / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    codes = codes.reshape(*weight.shape[:-2], row_blocks * block, columns)[..., :rows, :]
    return codes.contiguous(), scale.squeeze(-1).squeeze(-2)


class FP8GroupedLinear(nn.Module):
    """Block-diagonal linear on FP8 codes: [..., G, K] x [G, R, K] -> [..., G, R], in the dtype of the input.

    weight: [G, R, K] float8_e4m3fn. weight_scale: [G, ceil(R/block), K/block] float32. scale_rule: of the activation;
    the weight's scales are taken as they are. block: width of the activation's blocks and side of the weight's: 128 in
    DeepSeek-V4, 32 in V4.1.

    With power-of-two scales on both sides a dequantised value is exact in bfloat16, and the product is taken there
    (with float32 accumulation, as bmm does); otherwise in float32. Moving the module to another dtype leaves weights
    and scales alone.
    """

    weight: Tensor
    weight_scale: Tensor

    def __init__(self, weight: Tensor, weight_scale: Tensor, scale_rule: str = "fp32", *, floor: float = 1e-12,
                 block: int = BLOCK) -> None:
        super().__init__()
        _check_rule(scale_rule)
        if weight.dtype != E4M3:
            raise TypeError(f"FP8GroupedLinear: expected float8_e4m3fn weights, got {weight.dtype}: use from_linear")
        groups, rows, columns = weight.shape
        expected = (groups, -(-rows // block), columns // block)
        if weight_scale.dtype != torch.float32 or tuple(weight_scale.shape) != expected or columns % block:
            raise ValueError(
                f"FP8GroupedLinear: expected float32 scales of shape {expected} for weights {tuple(weight.shape)}, "
                f"got {weight_scale.dtype} {tuple(weight_scale.shape)}"
            )
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", weight_scale)
        self.scale_rule = scale_rule
        self.floor = floor
        self.block = block
        self.n_groups = groups

    @classmethod
    def from_linear(cls, weight: Tensor, n_groups: int, scale_rule: str = "fp32", *, block: int = BLOCK
                    ) -> FP8GroupedLinear:
        """Quantise a stacked weight [G*R, K] of any float dtype."""
        stacked = weight.detach().reshape(n_groups, -1, weight.shape[-1])
        codes, scale = quantize_weight(stacked, scale_rule, block=block)
        return cls(codes, scale, scale_rule, block=block)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., G, K] -> [..., G, R]."""
        groups, rows, columns = self.weight.shape
        grouped = x.reshape(-1, groups, columns).transpose(0, 1)
        codes, scale = quantize_activation(grouped, self.scale_rule, block=self.block, floor=self.floor)
        exact = torch.bfloat16 if self.scale_rule == "ue8m0" and x.dtype == torch.bfloat16 else torch.float32
        activation = _dequantize_activation(codes, scale).to(exact)
        weight = self._dequantize_weight().to(exact)
        y = torch.bmm(activation, weight.transpose(1, 2))
        return y.transpose(0, 1).reshape(*x.shape[:-1], rows).to(x.dtype)

    def extra_repr(self) -> str:
        """Shapes and rule, for print(model)."""
        groups, rows, columns = self.weight.shape
        return (
            f"groups={groups}, in_features_per_group={columns}, out_features_per_group={rows}, "
            f"scale={self.scale_rule}, block={self.block}"
        )

    def _dequantize_weight(self) -> Tensor:
        groups, rows, columns = self.weight.shape
        values, block = self.weight.float(), self.block
        if rows % block == 0:
            blocks = values.reshape(groups, rows // block, block, columns // block, block)
            return (blocks * self.weight_scale[:, :, None, :, None]).reshape(groups, rows, columns)
        scale = self.weight_scale.repeat_interleave(block, 1)[:, :rows].repeat_interleave(block, 2)
        return values * scale

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FP8GroupedLinear:
        # model.to(dtype) casts every floating-point buffer; codes and scales follow the device only.
        weight, scale = self.weight, self.weight_scale
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.weight.dtype != weight.dtype or self.weight_scale.dtype != scale.dtype:
            self.weight = weight.to(self.weight.device)
            self.weight_scale = scale.to(self.weight_scale.device)
        return self


def grouped_linears(model: nn.Module, asked_by: str) -> list[tuple[str, nn.Linear]]:
    """Every ``DeepseekV4GroupedLinear`` (an ``nn.Linear`` with ``n_groups``) of a model, by name.

    Raises ValueError when there is none, or when one has a bias.
    """
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and isinstance(getattr(module, "n_groups", None), int)
    ]
    if not found:
        raise ValueError(f"{asked_by}: no grouped linear (nn.Linear with n_groups) in {type(model).__name__}")
    for name, module in found:
        if module.bias is not None:
            raise ValueError(f"{asked_by}: {name} has a bias, which the FP8 form has not")
    return found


def replace_grouped_linear(model: nn.Module, scale_rule: str = "ue8m0", *, block: int = BLOCK) -> list[str]:
    """Replace every grouped linear of a transformers DeepSeek-V4 by its FP8 form, quantising its weight, in place.

    block: 128 as in DeepSeek-V4's checkpoints, 32 as in V4.1's. Returns the names of the replaced modules. Raises
    ValueError when there is none, or when one has a bias or a K that is not a multiple of the block.
    """
    _check_rule(scale_rule)
    found = grouped_linears(model, "replace_grouped_linear")
    module: Any
    for name, module in found:
        parent, _, attribute = name.rpartition(".")
        groups = int(module.n_groups)
        linear = FP8GroupedLinear.from_linear(module.weight, groups, scale_rule, block=block)
        setattr(model.get_submodule(parent), attribute, linear)
    return [name for name, _ in found]


def _scale(amax: Tensor, rule: str) -> Tensor:
    _check_rule(rule)
    # Not the module's constant: with dynamic=True, Dynamo makes a graph input of a global float.
    scale = amax / torch.finfo(torch.float8_e4m3fn).max
    if rule == "fp32":
        return scale
    # Round up to a power of two in the bits: log2 rounds, and a scale that comes out one step too small saturates
    # codes.
    bits = scale.view(torch.int32)
    return ((bits + 0x007FFFFF) & 0x7F800000).view(torch.float32)


def _dequantize_activation(codes: Tensor, scale: Tensor) -> Tensor:
    blocks = codes.float().reshape(*scale.shape, codes.shape[-1] // scale.shape[-1])
    return (blocks * scale.unsqueeze(-1)).reshape(codes.shape)


def _check_rule(rule: str) -> None:
    if rule not in SCALE_RULES:
        raise ValueError(f"expected a scale rule out of {SCALE_RULES}, got {rule!r}")
