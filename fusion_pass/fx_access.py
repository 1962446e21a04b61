# SPDX-License-Identifier: Apache-2.0
"""Arguments and targets of FX nodes as ``Any``: FX types them as a union of twenty, where an operator's schema says
which one it is.
"""

from __future__ import annotations

from typing import Any

from torch import fx


def args_of(node: fx.Node) -> tuple[Any, ...]:
    """``node.args``."""
    return node.args


def target_of(node: fx.Node) -> Any:
    """``node.target``: an operator, for a node that calls a function."""
    return node.target


def kwargs_of(node: fx.Node) -> dict[str, Any]:
    """``node.kwargs``."""
    return node.kwargs
