# SPDX-License-Identifier: Apache-2.0
"""The kernels of one run of a model on the GPU, their times added up by category."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import torch

RUNS = 3
ATTENTION, EXPERTS, GEMMS, REST = "attention and merge", "experts (grouped GEMM)", "other GEMMs", "everything else"
# In this order; Inductor's kernels (triton_...) are named after the operators around them and belong to the rest.
PATTERNS = (
    (REST, re.compile(r"^triton_(poi|per|red|tem|for)_")),
    (EXPERTS, re.compile(r"GroupProblemShape|grouped_gemm|grouped_mm")),
    (GEMMS, re.compile(r"nvjet|cutlass|gemm|gemv|splitK|xmma|dot_kernel|dotParams|reduce_1Block_kernel", re.I)),
)


def own_kernels() -> set[str]:
    """Names of all Triton and Gluon functions of this package that were imported."""
    from triton.runtime.jit import KernelInterface

    modules = [module for name, module in sys.modules.items() if name.startswith("fusion_pass.kernels")]
    values = (value for module in modules for value in vars(module).values())
    return {value.fn.__name__ for value in values if isinstance(value, KernelInterface)}


def category(name: str, own: set[str]) -> str:
    """Category of a kernel by its name."""
    if name in own:
        return ATTENTION
    return next((what for what, pattern in PATTERNS if pattern.search(name)), REST)


def kernel_profile(run: Callable[[], Any]) -> dict[str, Any]:
    """Of one call of ``run`` (mean of some): ``kernels``, their number, ``kernel_us``, the sum of their times in
    microseconds, which counts what overlaps twice, and ``profile``, that sum by category."""
    from torch.profiler import ProfilerActivity, profile

    own = own_kernels()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(RUNS):
            run()
        torch.cuda.synchronize()
    on_device = [event for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    times = dict.fromkeys((ATTENTION, EXPERTS, GEMMS, REST), 0.0)
    for event in on_device:
        times[category(event.name, own)] += event.time_range.elapsed_us() / RUNS
    return {
        "kernels": round(len(on_device) / RUNS),
        "kernel_us": round(sum(times.values()), 1),
        "profile": {what: round(us, 1) for what, us in times.items()},
    }
