# SPDX-License-Identifier: Apache-2.0
"""Definitions of the ops ``torch.ops.fusion_pass.*``; importing this package registers all of them.

Every op is functional, has contiguous outputs, an out-variant (overload ``.out``), a fake implementation with exact
strides, and the pure-torch reference as its implementation wherever no kernel applies. ``explain(op, args)`` says which
kernel a call would run, and why.
"""

from . import attention, bgemm, contract_ops, gathered, merge, paged, rope
from .dispatch import Launcher, explain, register_launcher
from .registry import SPECS

__all__ = [
    "SPECS",
    "Launcher",
    "attention",
    "bgemm",
    "contract_ops",
    "explain",
    "gathered",
    "merge",
    "paged",
    "register_launcher",
    "rope",
]
