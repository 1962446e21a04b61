"""The compile-time gate: is the recognised chain one that the ops support, and is it allowed here? Always a reason."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from .config import Config
from .elements.moves import is_float_cast, is_move
from .fx_access import target_of
from .kernels.ops.checks import MIN_FLOOR
from .recognise.chain_types import Chain

BLOCKS = (128, 32)


@dataclass(frozen=True)
class Decision:
    """``fuse`` and why (or why not)."""

    fuse: bool
    reason: str


def device_note(device: torch.device) -> str:
    """Which implementation the ops take on this device, as far as the device alone decides it."""
    if device.type != "cuda":
        return f"{device.type}: the ops' reference path (no Triton kernels for this device)"
    if torch.version.hip is not None:
        return "ROCm: the ops' reference path (the kernels are written for NVIDIA GPUs)"
    try:
        import triton  # type: ignore[import-untyped]
    except ImportError:
        return "cuda without triton: the ops' reference path"
    major, minor = torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (0, 0)
    return f"sm_{major}{minor}, triton {triton.__version__}: Triton kernels"


def partition_gate(heads: int, groups: int, world_size: int) -> Decision:
    """May ``heads`` heads in ``groups`` output groups be split over ``world_size`` ranks? Every rank needs whole
    groups: then attention, rotation, quantisation and projection of a group stay on one rank.
    """
    if world_size < 1 or groups < 1 or heads < 1 or heads % groups:
        return Decision(False, f"{heads} heads in {groups} groups over {world_size} ranks: expected positive numbers, "
                               "and heads divisible by groups")
    if groups % world_size:
        return Decision(False, f"{world_size} ranks split a group: o_groups = {groups} is not divisible by "
                               f"{world_size}, so a rank would project a part of a group only; use a number of ranks "
                               f"that divides {groups}")
    return Decision(True, f"{groups // world_size} of {groups} groups and {heads // world_size} of {heads} heads on "
                          f"each of {world_size} ranks")


_SUMS = frozenset(("all_reduce", "all_reduce_", "reduce_scatter_tensor", "all_reduce_coalesced"))


def _summed_over_ranks(node: fx.Node) -> fx.Node | None:
    """A collective that sums ``node`` (through moves and casts) over ranks, before anything else reads it."""
    stack, seen = [node], set()
    while stack:
        for user in stack.pop().users:
            if user in seen or user.op != "call_function":
                continue
            seen.add(user)
            if getattr(user.target, "namespace", "") in ("_c10d_functional", "c10d_functional", "c10d") and (
                    target_of(user)._opname in _SUMS):
                return user
            if is_move(user) or is_float_cast(user):
                stack.append(user)
    return None


def compile_time_gate(chain: Chain, config: Config) -> Decision:
    """Decide from shapes, dtypes, the device and the configuration."""
    rotation, grouping = chain.rotation, chain.grouping
    value = rotation.source.meta["val"]
    for rule in config.disable_rules:
        if rule in chain.roles:
            return Decision(False, f"the rule {rule!r} is switched off (disable_rules)")
    if value.dtype == torch.float64 or rotation.node.meta["val"].dtype == torch.float64:
        return Decision(False, "float64: the kernels compute in fp32 and would lose precision")
    if value.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return Decision(False, f"attention output of dtype {value.dtype}: expected bf16, fp16 or fp32")
    if chain.quantisation is not None and rotation.head_dim % chain.quantisation.block:
        return Decision(False, f"head_dim {rotation.head_dim} is no multiple of the quantisation block "
                               f"{chain.quantisation.block}")
    if chain.quantisation is not None and not chain.quantisation.floor >= MIN_FLOOR:
        return Decision(False, f"a block of zeros is divided by a scale of zero: the source's smallest magnitude is "
                               f"{chain.quantisation.floor:g}, the ops need one of at least {MIN_FLOOR:.1e}")
    for anchor in chain.anchors:
        collective = _summed_over_ranks(anchor.node)
        if collective is not None:
            return Decision(False, f"a group is split over ranks: {collective.name} adds the ranks' parts of the "
                                   "grouped projection (o_groups is not divisible by the number of ranks)")
    if value.requires_grad:
        return Decision(False, "autograd needs the intermediate values (trace under no_grad or inference_mode)")
    if chain.attention is not None and chain.attention.form == "partials":
        bound = "the architecture's measured table" if config.kv_split is None else f"at most {config.kv_split}"
        merge = f"; KvSplit: {bound}, chosen at each call from the sizes"
    else:
        merge = ""
    what = f"{grouping.heads} heads in {grouping.groups} groups, head_dim {rotation.head_dim}"
    return Decision(True, f"{what}; {device_note(value.device)}{merge}")
