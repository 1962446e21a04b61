"""The compile-time gate: is the recognised chain one that the ops support, and is it allowed here? Always a reason."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .config import Config
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
    if value.requires_grad:
        return Decision(False, "autograd needs the intermediate values (trace under no_grad or inference_mode)")
    if chain.attention is not None and chain.attention.form == "partials":
        bound = "the architecture's measured table" if config.kv_split is None else f"at most {config.kv_split}"
        merge = f"; KvSplit: {bound}, chosen at each call from the sizes"
    else:
        merge = ""
    what = f"{grouping.heads} heads in {grouping.groups} groups, head_dim {rotation.head_dim}"
    return Decision(True, f"{what}; {device_note(value.device)}{merge}")
