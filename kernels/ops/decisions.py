# SPDX-License-Identifier: Apache-2.0
"""Remembers, per call signature, that the arguments were valid and which kernel runs them.

A decoding step calls the same op once per layer with other data of the same form; validating and choosing anew would
cost as much host time as a launch. What the checks and the gates read is the signature: of each tensor shape, strides,
dtype, device and alignment, every other argument itself, the modes, and the environment switch that a gate reads.
Arguments of other tensor types (fakes, subclasses, functorch's wrappers) are not remembered.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from ..modes import current
from . import dispatch
from .dispatch import Launcher

LIMIT = 4096  # signatures; sizes that grow with every call would otherwise fill the memory
ALIGNMENT = 16  # bytes: the widest load of a kernel
SWITCH = "FUSION_PASS_BGEMM"

_PLAIN = (Tensor, torch.nn.Parameter)
_known: dict[Any, Launcher | None] = {}
_generation = -1


def signature(op: str, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Everything that validity and the choice of a kernel depend on, or None where it cannot be told."""
    parts: list[Any] = [op, current(), os.environ.get(SWITCH)]
    for value in args:
        kind = type(value)
        if kind in _PLAIN:
            try:
                address = value.data_ptr()
            except RuntimeError:  # a wrapper without memory of its own
                return None
            parts += (value.shape, value.stride(), value.dtype, value.device, address % ALIGNMENT)
        elif isinstance(value, Tensor):
            return None
        else:
            parts.append(value)
    return tuple(parts)


def remember(key: tuple[Any, ...] | None, launcher: Launcher | None) -> None:
    """Store the decision for a signature (after the checks have passed)."""
    if key is not None:
        if len(_known) >= LIMIT:
            _known.clear()
        _known[key] = launcher


def recall(key: tuple[Any, ...] | None) -> tuple[bool, Launcher | None]:
    """(whether the signature was decided, its launcher: None = the reference). Forgets everything when a launcher has
    been registered since."""
    global _generation
    if _generation != dispatch.generation():
        _known.clear()
        _generation = dispatch.generation()
    if key is None or key not in _known:
        return False, None
    return True, _known[key]
