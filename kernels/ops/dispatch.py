# SPDX-License-Identifier: Apache-2.0
"""Chooses, at call time, the kernel that runs an op, or the pure-torch reference.

A :class:`Launcher` is registered for an op by the module that holds the kernel. Those modules import Triton, so they
are imported at the first call on an accelerator, not before. The decision reads sizes, dtypes and the device, never
tensor contents, so it is the same inside a CUDA graph's capture and needs no recompilation.
"""

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("fusion_pass.kernels")

# Modules that register launchers when imported, relative to the kernels package. Absent ones are skipped.
PROVIDERS = [".triton.launchers", ".triton.reduce_launchers", ".gluon.launchers"]


@dataclass(frozen=True)
class Launcher:
    """A kernel for one op.

    ``refuses(*args)`` returns None if it can run these arguments, else the reason why not (for reports).
    ``launch(outs, *args)`` writes every element of the contiguous tensors ``outs``, padding included; it is not called
    when the first output is empty. Arguments are complete and validated. Higher ``priority`` is asked first.

    ``replayable``: all kernels that ``launch`` launches go through :mod:`fusion_pass.kernels.launching`, and everything
    it gives them but addresses follows from the call's signature (:mod:`.decisions`), never from tensor contents or
    state that changes. Then later calls may repeat the launches without it.
    """

    name: str
    refuses: Callable[..., str | None]
    launch: Callable[..., None]
    priority: int = 0
    replayable: bool = False


_launchers: dict[str, list[Launcher]] = {}
_loaded = False
_load_errors: list[str] = []
_generation = 0


def generation() -> int:
    """A number that changes whenever a launcher is registered."""
    return _generation


def register_launcher(op: str, launcher: Launcher) -> None:
    """Add ``launcher`` for ``op``; a launcher of the same name is replaced (so a reload does not pile up)."""
    global _generation
    _generation += 1
    others = [known for known in _launchers.get(op, []) if known.name != launcher.name]
    _launchers[op] = sorted([*others, launcher], key=lambda known: -known.priority)


def load_providers() -> list[str]:
    """Import the modules that register launchers, once. Returns what went wrong, one line each."""
    global _loaded
    if not _loaded:
        _loaded = True
        package = __package__.rpartition(".")[0]
        for provider in PROVIDERS:
            try:
                importlib.import_module(provider, package)
            except ImportError as error:
                missing_provider = isinstance(error, ModuleNotFoundError) and (error.name or "").startswith(package)
                if not missing_provider:
                    _load_errors.append(f"{provider.strip('.')}: {error}")
                    log.warning("fusion_pass kernels are not available, the torch reference runs instead: %s", error)
    return _load_errors


def first_tensor(args: tuple[Any, ...]) -> Tensor:
    return next(a for a in args if isinstance(a, Tensor))


def explain(op: str, args: tuple[Any, ...]) -> tuple[Launcher | None, list[str]]:
    """The launcher that would run ``op`` on ``args`` (None = reference), and why each earlier one refuses."""
    device = first_tensor(args).device
    if device.type != "cuda":
        return None, [f"device {device.type}: Triton kernels run on CUDA, the torch reference runs elsewhere"]
    reasons = list(load_providers())
    if torch.version.hip is not None:
        return None, ["ROCm: the kernels are not validated there, the torch reference runs"]
    for launcher in _launchers.get(op, []):
        reason = launcher.refuses(*args)
        if reason is None:
            return launcher, reasons
        reasons.append(f"{launcher.name}: {reason}")
    return None, reasons or [f"no kernel is registered for {op}"]


def applicable(op: str, args: tuple[Any, ...]) -> list[Launcher]:
    """Every launcher that could run ``op`` on ``args``: the first is the one that does, the others stand behind it."""
    if explain(op, args)[0] is None:
        return []
    return [launcher for launcher in _launchers[op] if launcher.refuses(*args) is None]


def select(op: str, args: tuple[Any, ...]) -> Launcher | None:
    """The launcher for this call, or None for the reference."""
    if first_tensor(args).device.type != "cuda":
        return None
    return explain(op, args)[0]


def launch(launcher: Launcher, outs: tuple[Tensor, ...], args: tuple[Any, ...]) -> None:
    """Run ``launcher`` with the outputs' device current (Triton launches on the current device)."""
    device = outs[0].device
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        launcher.launch(outs, *args)
        return
    with torch.cuda.device(device):
        launcher.launch(outs, *args)
