# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="import-untyped"
"""How a compiled kernel is called past Triton's Python: the one place that knows a Triton version's form.

``kernel[grid](...)`` inspects every argument anew (for the kernel's specialisation), builds a cache key and calls
hooks before it calls a small C function that packs the arguments and launches. For a call that is known to end in the
same compiled kernel, that C function is all it takes. Its form is private to Triton, so only versions whose form was
read are served: elsewhere :func:`entry` names a reason, and callers go on launching the ordinary way.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..launching import ensure_context

try:
    from triton import knobs
except ImportError:  # a version without them, whose form is not known
    knobs = None

KNOWN_TRITON = ((3, 6),)


@dataclass(frozen=True)
class Entry:
    """A compiled kernel at a grid. ``call(*head, *arguments)``, with the stream put into ``head[stream]``, launches it.

    Arguments are those of the kernel in its own order, compile-time ones included (ignored). Pointers are integers. A
    tensor descriptor is the list that ``descriptors[position](address, shape, strides, padding)`` returns. ``hooks``:
    the kernel's own list of hooks; a launch past Triton would not run them.
    """

    call: Callable[..., None]
    head: tuple[Any, ...]
    stream: int
    descriptors: dict[int, Callable[..., list[Any]]]
    hooks: list[Any]


class _Address:
    """Stands for the tensor of a descriptor, of which Triton asks nothing but the address."""

    def __init__(self, address: int):
        self.address = address

    def data_ptr(self) -> int:
        return self.address


@dataclass(frozen=True)
class _Described:
    base: _Address
    shape: list[int]
    strides: list[int]
    padding: str


def _descriptor(metadata: Any, address: int, shape: list[int], strides: list[int], padding: str) -> list[Any]:
    from triton.backends.nvidia.driver import make_tensordesc_arg

    ensure_context()
    found: list[Any] = make_tensordesc_arg(_Described(_Address(address), shape, strides, padding), metadata)
    return found


@functools.cache
def unknown_form() -> str | None:
    """Why kernels cannot be called past Triton here, or None."""
    if torch.version.hip is not None:
        return "ROCm"
    try:
        import triton
        from triton.backends.nvidia import driver
        from triton.compiler import CompiledKernel
    except ImportError as error:
        return str(error)
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version not in KNOWN_TRITON:
        return f"triton {triton.__version__}: how it calls kernels is known for 3.6"
    parts = ((knobs.runtime, "launch_enter_hook"), (driver, "make_tensordesc_arg"), (driver, "CudaLauncher"))
    absent = [name for place, name in (*parts, (CompiledKernel, "run")) if not hasattr(place, name)]
    return f"triton {triton.__version__} has no {absent[0]}" if absent else None


def entry(kernel: Any, compiled: Any, grid: tuple[int, ...]) -> Entry | str:
    """How to call what ``kernel[grid](...)`` has just launched and returned, or why it cannot be called."""
    if reason := unknown_form():
        return reason
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.compiler import CompiledKernel

    if type(compiled) is not CompiledKernel or type(compiled.run) is not CudaLauncher:
        return f"the launch returned a {type(compiled).__name__}"
    run = compiled.run
    if run.global_scratch_size or run.profile_scratch_size:
        return "the kernel takes scratch memory"
    if kernel.debug or kernel.pre_run_hooks:
        return "the kernel has hooks, or is debugged"
    call, signature = run.launch, list(compiled.src.signature.values())
    positions = [i for i, kind in enumerate(signature) if isinstance(kind, str) and kind.startswith("tensordesc")]
    descriptors: dict[int, Callable[..., list[Any]]] = {}
    if positions:
        metadata = getattr(compiled.metadata, "tensordesc_meta", None)
        inner = _closed_over(call, "launcher")
        if inner is None or not metadata or len(metadata) != len(positions):
            return "tensor descriptors of an unknown form"
        call = inner
        descriptors = {i: functools.partial(_descriptor, meta) for i, meta in zip(positions, metadata)}
    size = (*grid, 1, 1)[:3]
    head = (
        *size, None, compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None,
        compiled.packed_metadata, None, None, None,
    )  # fmt: skip
    return Entry(call, head, 3, descriptors, kernel.pre_run_hooks)


def _closed_over(function: Any, name: str) -> Any:
    """The value that ``function`` closes over under ``name``, or None: Triton wraps the C function of kernels with
    tensor descriptors into one that encodes these at every call."""
    code = getattr(function, "__code__", None)
    if code is None or name not in code.co_freevars:
        return None
    return function.__closure__[code.co_freevars.index(name)].cell_contents


def undisturbed() -> bool:
    """Whether nothing wants to see launches or change what is compiled: no hooks (of a profiler), no debug mode."""
    runtime = knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return False
    return not (runtime.debug or knobs.compilation.instrumentation_mode)


def in_clusters(compiled: Any, size: int, more_bytes: int) -> None:
    """Have all launches of ``compiled``, whose programs are one CTA each, put ``size`` neighbouring CTAs into a cluster
    and give each ``more_bytes`` of shared memory behind what Triton has planned, from a multiple of 128 on.

    A launch's grid counts clusters then. RuntimeError where this Triton's launcher goes by something else.
    """
    compiled = compiled.result() if hasattr(compiled, "result") else compiled  # it may still be compiling
    metadata = compiled.metadata
    plain = (metadata.num_warps, 1, metadata.shared)
    clustered = (metadata.num_warps, size, -(-metadata.shared // 128) * 128 + more_bytes)
    if compiled.packed_metadata not in (plain, clustered):
        raise RuntimeError(
            f"expected the launcher of triton {KNOWN_TRITON[0]} to go by warps, CTAs and shared memory, {plain}; "
            f"found {compiled.packed_metadata}. Please report it, with the version"
        )
    compiled.packed_metadata = clustered


CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
_kept: set[int] = set()


def keep_shared_memory(compiled: Any) -> None:
    """Have a kernel run with the multiprocessors' memory split in favour of shared memory. A hint.

    For what ``kernel[grid](...)`` has just launched and returned. A multiprocessor changes the split only while it is
    empty, and for a kernel that needs little shared memory the driver chooses a large L1 cache. A CTA that needs nearly
    all shared memory then cannot start beside it, though everything else it needs is free.
    """
    function = getattr(compiled, "function", None)
    if not isinstance(function, int) or function in _kept:
        return
    _kept.add(function)
    if (driver := _driver()) is not None:
        driver.cuFuncSetAttribute(ctypes.c_void_p(function), ctypes.c_int(CARVEOUT), ctypes.c_int(100))


@functools.cache
def _driver() -> ctypes.CDLL | None:
    """CUDA's driver library, which is loaded wherever a kernel has been launched."""
    try:
        return None if torch.version.hip is not None else ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
