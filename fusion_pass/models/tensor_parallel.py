"""Tensor parallelism of DeepSeek-V4's attention: heads, and the output groups that they belong to, split over ranks.

Every rank keeps ``heads / world_size`` heads, whole groups of them, and projects them with its own part of
``o_a_proj``; ``o_b_proj`` becomes row-parallel, so that one all_reduce per layer, behind it, adds the ranks' parts. The
chain from attention to the grouped projection is then local to a rank and is fused there as on one GPU. The latent
keys, the compressor and the indexer are shared by all heads and stay on every rank, and so do the experts
(transformers' own expert-parallel plan splits those; it does not touch the attention).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ..gate import partition_gate


class SummedOverRanks(nn.Module):
    """A linear whose input features are split over ranks (row-parallel): the local product, then the sum over ranks.

    linear: the local part, without bias. group: process group, None for the default one.
    """

    def __init__(self, linear: nn.Module, group: Any = None) -> None:
        super().__init__()
        self.linear = linear
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., local features] -> what the whole linear gives, the same on every rank."""
        return sum_over_ranks(self.linear(x), self.group)


def sum_over_ranks(x: Tensor, group: Any = None) -> Tensor:
    """``x`` summed over the ranks of ``group`` (None: the default group), in a form that Dynamo traces."""
    import torch.distributed as dist
    import torch.distributed._functional_collectives as collectives

    everyone: Any = dist.group.WORLD
    total: Tensor = collectives.all_reduce(x, "sum", everyone if group is None else group)
    return total


def split_attention(
    model: nn.Module, rank: int, world_size: int, group: Any = None, *, split_groups: bool = False
) -> list[str]:
    """Keep this rank's heads of every attention layer of a transformers DeepSeek-V4, in place.

    Takes bf16 and FP8 forms of the projections (this package's and transformers' own). Split are ``q_b_proj`` and
    ``o_a_proj`` by rows, ``sinks``, and ``o_b_proj`` by columns. ``group`` is the process group of the sum behind
    ``o_b_proj``, None for the default one. Returns the names of the attention layers.

    Raises ValueError, with the reason of :func:`fusion_pass.gate.partition_gate`, for a number of ranks that splits a
    group. ``split_groups=True`` splits all the same (each rank holds a part of a group, and a second all_reduce adds
    the parts behind ``o_a_proj``): right numbers, but not fused.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"split_attention: expected a rank from 0 to {world_size - 1}, got {rank}")
    layers = [
        (name, module)
        for name, module in model.named_modules()
        if hasattr(module, "o_a_proj") and hasattr(module, "o_b_proj") and hasattr(module, "sinks")
    ]
    if not layers:
        raise ValueError(
            f"split_attention: no DeepSeek-V4 attention (o_a_proj, o_b_proj, sinks) in {type(model).__name__}"
        )
    for name, layer in layers:
        decision = partition_gate(layer.num_heads, layer.o_a_proj.n_groups, world_size)
        if not decision.fuse and not (split_groups and layer.num_heads % world_size == 0):
            raise ValueError(f"split_attention: {name}: {decision.reason}")
    for _, layer in layers:
        _split_layer(layer, rank, world_size, group)
    return [name for name, _ in layers]


def _split_layer(layer: Any, rank: int, world_size: int, group: Any) -> None:
    groups = layer.o_a_proj.n_groups
    whole = groups % world_size == 0
    layer.num_heads //= world_size
    layer.num_key_value_groups = layer.num_heads
    # The layer reads the number of groups from the configuration, which others read as well.
    layer.config = copy.copy(layer.config)
    layer.config.num_attention_heads = layer.num_heads
    layer.config.o_groups = groups // world_size if whole else groups
    layer.sinks = nn.Parameter(_part(layer.sinks.data, 0, rank, world_size), requires_grad=False)
    _keep_part(layer.q_b_proj, 0, rank, world_size)
    if whole:
        _keep_part(layer.o_a_proj, 0, rank, world_size)
        layer.o_a_proj.n_groups = groups // world_size
        _keep_part(layer.o_b_proj, -1, rank, world_size)
        layer.o_b_proj = SummedOverRanks(layer.o_b_proj, group)
    else:
        if groups > 1:
            raise ValueError(
                f"split_attention: split_groups=True needs one group or whole groups, got {groups} over "
                f"{world_size} ranks"
            )
        _keep_part(layer.o_a_proj, -1, rank, world_size)
        layer.o_a_proj = SummedOverRanks(layer.o_a_proj, group)


def _keep_part(linear: Any, dim: int, rank: int, world_size: int) -> None:
    """Weights and block scales split alike: both have rows (or groups of rows) first and columns last."""
    if getattr(linear, "bias", None) is not None:
        raise ValueError("split_attention: a projection has a bias, which DeepSeek-V4's have not")
    for name in ("weight", "weight_scale", "weight_scale_inv", "weight_fp8", "weight_fp8_scale"):
        tensor = getattr(linear, name, None)
        if tensor is None:
            continue
        part = _part(tensor.data, dim, rank, world_size)
        if isinstance(tensor, nn.Parameter):
            setattr(linear, name, nn.Parameter(part, requires_grad=False))
        else:
            setattr(linear, name, part)
    for name, size in (("out_features", 0), ("in_features", -1)):
        if size == dim and isinstance(getattr(linear, name, None), int):
            setattr(linear, name, getattr(linear, name) // world_size)


def _part(tensor: Tensor, dim: int, rank: int, world_size: int) -> Tensor:
    length = tensor.shape[dim]
    if length % world_size:
        raise ValueError(
            f"split_attention: {length} rows or columns of a weight or of its block scales do not split over "
            f"{world_size} ranks"
        )
    return tensor.narrow(dim, rank * (length // world_size), length // world_size).clone(
        memory_format=torch.contiguous_format
    )


__all__ = ["SummedOverRanks", "split_attention", "sum_over_ranks"]
