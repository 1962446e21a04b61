"""A bf16 model that has FP8 weights at hand: the grouped projection with its weight in both forms.

``attach_fp8_weights(model)`` changes no number: the projection goes on computing with its bf16 weight. What changes is
that a graph of the model holds the FP8 codes and scales as well, in one op. ``Config(o_proj="fp8")`` lets the pass take
that op's FP8 form, and fuse it with what stands before it; the report calls it a numeric change. Without that option,
or where nothing is fused, the bf16 form is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .fp8_linear import BLOCK, E4M3, SCALE_RULES, grouped_linears, quantize_weight

OP = "fusion_pass::grouped_linear_with_fp8"
Weights = tuple[Tensor, Tensor]


def _grouped_linear(
    x: Tensor,
    weight: Tensor,
    codes: Tensor,
    scales: Tensor,
    block: int = BLOCK,
    scale_rule: str = "ue8m0",
    floor: float = 1e-12,
) -> Tensor:
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1).contiguous()


def _fake(x: Tensor, weight: Tensor, codes: Tensor, scales: Tensor, *others: object, **named: object) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0], weight.shape[1]))


def _define() -> None:
    namespace, _, name = OP.partition("::")
    if hasattr(getattr(torch.ops, namespace), name):
        return
    torch.library.define(
        OP,
        "(Tensor x, Tensor weight, Tensor codes, Tensor scales, int block=128, str scale_rule='ue8m0', "
        "float floor=1e-12) -> Tensor",
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    torch.library.impl(OP, "default", _grouped_linear)
    torch.library.register_fake(OP, _fake)


_define()


class GroupedLinearWithFP8(nn.Module):
    """Block-diagonal linear [..., G, K] x [G, R, K] -> [..., G, R] whose weight is there in bf16 and in FP8.

    weight: [G*R, K], a float dtype: what is computed with. weight_fp8: [G, R, K] float8_e4m3fn and weight_fp8_scale:
    [G, ceil(R/block), K/block] float32 or float8_e8m0fnu: what ``Config(o_proj="fp8")`` computes with, the activation
    quantised on the fly by ``scale_rule`` in blocks of 1 x ``block``. The FP8 buffers are not part of the state dict.
    Raises TypeError and ValueError for other weights.
    """

    weight_fp8: Tensor
    weight_fp8_scale: Tensor

    def __init__(
        self,
        weight: nn.Parameter,
        n_groups: int,
        codes: Tensor,
        scales: Tensor,
        scale_rule: str = "ue8m0",
        *,
        block: int = BLOCK,
        floor: float = 1e-12,
    ) -> None:
        super().__init__()
        columns = weight.shape[-1]
        rows = weight.shape[0] // n_groups
        if codes.dtype != E4M3 or scales.dtype not in (torch.float32, torch.float8_e8m0fnu):
            raise TypeError(
                f"GroupedLinearWithFP8: expected float8_e4m3fn codes with float32 or float8_e8m0fnu scales, "
                f"got {codes.dtype} and {scales.dtype}"
            )
        if scale_rule not in SCALE_RULES:
            raise ValueError(f"expected a scale rule out of {SCALE_RULES}, got {scale_rule!r}")
        wanted = ((n_groups, rows, columns), (n_groups, -(-rows // block), columns // block))
        if (tuple(codes.shape), tuple(scales.shape)) != wanted:
            raise ValueError(
                f"GroupedLinearWithFP8: expected codes and scales of shapes {wanted}, got "
                f"{tuple(codes.shape)} and {tuple(scales.shape)}"
            )
        self.weight = weight
        self.register_buffer("weight_fp8", codes, persistent=False)
        self.register_buffer("weight_fp8_scale", scales, persistent=False)
        self.n_groups = n_groups
        self.scale_rule, self.block, self.floor = scale_rule, block, floor

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., G, K] -> [..., G, R]."""
        columns = x.shape[-1]
        weight = self.weight.view(self.n_groups, -1, columns)
        y = torch.ops.fusion_pass.grouped_linear_with_fp8(
            x.reshape(-1, self.n_groups, columns),
            weight,
            self.weight_fp8,
            self.weight_fp8_scale,
            self.block,
            self.scale_rule,
            self.floor,
        )
        rows: Tensor = y.reshape(*x.shape[:-1], -1)
        return rows

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GroupedLinearWithFP8:
        # model.to(dtype) casts every floating-point buffer; codes and scales follow the device only.
        codes, scales = self.weight_fp8, self.weight_fp8_scale
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.weight_fp8.dtype != codes.dtype or self.weight_fp8_scale.dtype != scales.dtype:
            self.weight_fp8 = codes.to(self.weight_fp8.device)
            self.weight_fp8_scale = scales.to(self.weight_fp8_scale.device)
        return self


def attach_fp8_weights(
    model: nn.Module, weights: Mapping[str, Weights] | None = None, scale_rule: str = "ue8m0", *, block: int = BLOCK
) -> list[str]:
    """Give every grouped linear of a transformers DeepSeek-V4 its weight in FP8 as well, in place; numbers stay.

    weights: by module name, codes [G, R, K] and scales [G, ceil(R/block), K/block] of an FP8 checkpoint; a module that
    is not named is quantised here (exact when its bf16 weight came from E4M3 codes with power-of-two scales).
    Returns the names of the modules. Raises ValueError when there is none, for an unknown name, or for a module with a
    bias.
    """
    found = grouped_linears(model, "attach_fp8_weights")
    unknown = set(weights or ()) - {name for name, _ in found}
    if unknown:
        raise ValueError(
            f"attach_fp8_weights: no grouped linear named {', '.join(sorted(unknown))}; there are "
            f"{', '.join(name for name, _ in found)}"
        )
    module: Any
    for name, module in found:
        groups = int(module.n_groups)
        given = (weights or {}).get(name)
        codes, scales = (
            given
            if given is not None
            else quantize_weight(
                module.weight.detach().reshape(groups, -1, module.weight.shape[-1]), scale_rule, block=block
            )
        )
        parent, _, attribute = name.rpartition(".")
        both = GroupedLinearWithFP8(module.weight, groups, codes, scales, scale_rule, block=block)
        setattr(model.get_submodule(parent), attribute, both)
    return [name for name, _ in found]


__all__ = ["GroupedLinearWithFP8", "attach_fp8_weights"]
