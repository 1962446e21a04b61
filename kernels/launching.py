# SPDX-License-Identifier: Apache-2.0
"""The one way to launch a Triton or Gluon kernel of ours, so that launches can be observed.

``at(kernel, grid)(*arguments, **options)`` is ``kernel[grid](*arguments, **options)``. While an observer is set in this
thread, it is told of each launch: that is how :mod:`.ops.recording` learns what a launcher launches. A launch that went
past it would be missing from the recorded plan, hence no other module may subscript a kernel.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

# (kernel, what the launch returned, grid, arguments, options)
Observer = Callable[[Any, Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None]
_observer: ContextVar[Observer | None] = ContextVar("fusion_pass_launch_observer", default=None)
# Bytes behind the shared memory that Triton has planned for a kernel, for barriers that CTAs of a cluster signal.
CLUSTER_BARRIER_BYTES = 128


def at(kernel: Any, grid: tuple[int, ...], cluster: int = 1) -> Callable[..., Any]:
    """What launches ``kernel`` over ``grid``; with ``cluster`` > 1, over so many neighbouring CTAs for each of `grid`,
    which start together (gluon/cluster.py)."""
    observer = _observer.get()
    launch: Callable[..., Any] = kernel[grid] if cluster == 1 else _clustered(kernel, grid, cluster)
    if observer is None:
        return launch

    def observed(*args: Any, **options: Any) -> Any:
        result = launch(*args, **options)
        observer(kernel, result, grid, args, options)
        return result

    return observed


def _clustered(kernel: Any, grid: tuple[int, ...], cluster: int) -> Callable[..., Any]:
    """``kernel[grid]`` whose programs come in clusters, though each is compiled as one CTA of its own."""
    from .triton.calling import in_clusters

    launch = kernel[grid]

    def compiled_first(*args: Any, **options: Any) -> Any:
        compiled = kernel.warmup(*args, grid=grid, **options)
        if compiled is not None:  # a hook of Triton's can have compilation, and thereby launches, left out
            in_clusters(compiled, cluster, CLUSTER_BARRIER_BYTES)
        return launch(*args, **options)

    return compiled_first


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Tell ``observer`` of every launch of this thread while the body runs."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


_thread = threading.local()


def ensure_context() -> None:
    """Make a CUDA context current in a thread that has none yet, as threads begin: tensor descriptors cannot be encoded
    without. (A launch sees to that itself, but its descriptors are encoded before.)"""
    if getattr(_thread, "has_context", False) or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    if not torch.cuda.is_current_stream_capturing():  # a thread that captures has one
        torch.cuda.mem_get_info()
    _thread.has_context = True
