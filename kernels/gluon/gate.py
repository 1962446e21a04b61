# SPDX-License-Identifier: Apache-2.0
"""Which calls the Hopper kernels can run, and why not the others. Reads metadata only; imports no kernel."""

import torch
from torch import Tensor

HEAD_DIM = 512
TESTED_TRITON = ((3, 6),)  # Gluon is experimental: only versions this kernel was compiled and measured with


def hopper_reason(device: torch.device) -> str | None:
    """Why the Hopper kernels cannot run on `device` with the installed Triton, or None."""
    if device.type != "cuda":
        return f"device {device.type}"
    if torch.version.hip is not None:
        return "ROCm"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"compute capability {capability[0]}.{capability[1]}; the kernel is written for 9.0"
    version = _triton_version()
    if version not in TESTED_TRITON:
        return f"triton {'.'.join(map(str, version)) or 'missing'}; tested with 3.6"
    return None


def attention_reason(
    q: Tensor,
    kv: Tensor | None,
    *,
    scale: float,
    extra_kv: Tensor | None = None,
    block: int = 128,
    half: int = 0,
) -> str | None:
    """Why the Hopper kernel cannot run these arguments, or None. Reads metadata only.

    q: [.., H, 512]; kv, extra_kv: [.., N, 512] or None; half: columns of the rope tables (0 = no rotation).
    """
    if reason := hopper_reason(q.device):
        return reason
    if q.dtype != torch.bfloat16:
        return f"dtype {q.dtype}; bfloat16 only"
    if q.shape[-1] != HEAD_DIM:
        return f"head_dim {q.shape[-1]}; 512 only"
    if not scale > 0:
        return f"scale {scale} is not positive"
    if half > 64:
        return f"rope_dim {2 * half}; at most 128"
    if block not in (128, 32):
        return f"quantisation block {block}; 128 or 32"
    for name, pool in (("kv", kv), ("extra_kv", extra_kv)):
        if pool is not None and not rows_aligned(pool):
            return f"{name} rows are not contiguous or not aligned to 16 bytes"
    return None


def _triton_version() -> tuple[int, ...]:
    try:
        from .hopper import triton_version
    except ImportError:
        return ()
    return triton_version()


def rows_aligned(rows: Tensor) -> bool:
    """Whether 16-byte loads of rows [.., N, 512] work and the leading dimensions flatten into one row index."""
    if rows.numel() == 0:
        return True
    flat = rows.dim() == 2 or rows.shape[0] == 1 or rows.stride(0) == rows.shape[1] * rows.stride(1)
    return flat and rows.stride(-1) == 1 and rows.stride(-2) % 8 == 0 and rows.data_ptr() % 16 == 0
