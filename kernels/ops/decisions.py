# SPDX-License-Identifier: Apache-2.0
"""Remembers, per call signature, that the arguments were valid, which kernel runs them, and how to launch it again.

A decoding step calls the same op once per layer with other data of the same form; validating and choosing anew would
cost as much host time as a launch. What the checks, the gates and the launchers read is the signature: of each tensor
shape, strides, dtype, device and alignment, every other argument itself, the modes, and the environment switch that a
gate reads. Arguments of other tensor types (fakes, subclasses, functorch's wrappers) are not remembered.

The first call of a signature is validated and recorded (:mod:`.recording`), later ones replay its launches
(:mod:`.launch_plans`). Setting ``FUSION_PASS_LAUNCH_PLANS=0`` before the import keeps the ordinary launches.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from torch import Tensor

from ..modes import Modes
from . import dispatch
from .dispatch import Launcher
from .launch_plans import Machine, Plan, cuda_machine
from .recording import record

log = logging.getLogger("fusion_pass.kernels")

LIMIT = 4096  # signatures; sizes that grow with every call would otherwise fill the memory
TRIES = 4  # recordings of one signature: its tensors may coincide in one call and not in the next
ALIGNMENT = 16  # bytes: the widest load of a kernel
SWITCH = "FUSION_PASS_BGEMM"
SWITCHED = "fp8_bgemm"  # the op whose gate reads it
REPLAYS = os.environ.get("FUSION_PASS_LAUNCH_PLANS", "1") != "0"

_Parameter = torch.nn.Parameter


class Decision:
    """What is known of one signature. launcher: None = the reference. plan: None = launch the ordinary way."""

    __slots__ = ("launcher", "outcome", "plan", "tries")

    def __init__(self, launcher: Launcher | None):
        self.launcher = launcher
        self.plan: Plan | None = None
        self.tries = TRIES if REPLAYS and launcher is not None and launcher.replayable else 0
        self.outcome = "not recorded"  # of the last recording

    def run(self, outs: tuple[Tensor, ...], args: tuple[Any, ...]) -> None:
        """Launch the ordinary way, recorded where that is due."""
        launcher = self.launcher
        assert launcher is not None
        machine = _machine(outs[0]) if self.plan is None and self.tries else None
        if machine is None:
            dispatch.launch(launcher, outs, args)
            return
        self.tries -= 1
        found = record(machine, args, outs, lambda: dispatch.launch(launcher, outs, args))
        if isinstance(found, Plan):
            self.plan, self.outcome = found, "recorded"
        else:
            self.outcome = found
            log.debug("%s: launched the ordinary way: %s", launcher.name, found)

    def plan_for(self, addresses: list[int]) -> Plan | None:
        """The plan, if it serves tensors at ``addresses``. One that does not is dropped, and this call recorded."""
        plan = self.plan
        if plan is None or not plan.usable():
            return None
        if plan.same and not plan.fits(addresses):
            self.plan = None
            return None
        return plan


_known: dict[Any, Decision] = {}
_generation = -1


def _machine(tensor: Tensor) -> Machine | None:
    """Where a tensor's launches can be replayed, or None."""
    return cuda_machine() if tensor.is_cuda else None


def _switch() -> Any:
    """The environment switch, or any value that changes when it does. ``os.environ.get`` takes ten times as long as the
    dictionary behind it."""
    behind = getattr(os.environ, "_data", None)
    return behind.get(_SWITCH_KEY) if isinstance(behind, dict) else os.environ.get(SWITCH)


_SWITCH_KEY: Any = os.environ.encodekey(SWITCH) if hasattr(os.environ, "encodekey") else SWITCH


def signature(op: str, args: tuple[Any, ...], how: Modes) -> tuple[tuple[Any, ...] | None, list[int]]:
    """(everything that validity and launches depend on, the addresses of the tensors among ``args``). None as the
    first where it cannot be told."""
    parts: list[Any] = [op, how.batch_invariant, how.check_inputs, how.weight_ready]
    if op == SWITCHED:
        parts.append(_switch())
    addresses: list[int] = []
    for value in args:
        kind = type(value)
        if kind is Tensor or kind is _Parameter:
            try:
                address = value.data_ptr()
            except RuntimeError:  # a wrapper without memory of its own
                return None, addresses
            addresses.append(address)
            parts.append((value.shape, value.stride(), value.dtype, value.device, address % ALIGNMENT))
        elif isinstance(value, Tensor):
            return None, addresses
        else:
            parts.append(value)
    return tuple(parts), addresses


def remember(key: tuple[Any, ...] | None, launcher: Launcher | None) -> Decision:
    """Store the decision for a signature (after the checks have passed)."""
    decision = Decision(launcher)
    if key is not None:
        if len(_known) >= LIMIT:
            _known.clear()
        _known[key] = decision
    return decision


def recall(key: tuple[Any, ...] | None) -> Decision | None:
    """The decision of a signature, or None. Forgets everything when a launcher has been registered since."""
    global _generation
    if _generation != dispatch.generation():
        _known.clear()
        _generation = dispatch.generation()
    return None if key is None else _known.get(key)


def forget() -> None:
    """Forget all decisions and plans (for tools that change launch tables between calls)."""
    _known.clear()
