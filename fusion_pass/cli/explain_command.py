"""``explain MODULE:FUNCTION``."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..explain import explain
from ..report import Report
from .console import step


class UsageError(Exception):
    """What the user named cannot be used; the message says how it should look."""


def run(arguments: Namespace) -> int:
    """Exit code 0: something would be fused; 1: nothing; 2: the target cannot be used."""
    try:
        model, args, kwargs = _inputs(_load(arguments.target))
    except UsageError as error:
        print(f"explain: {error}", file=sys.stderr)
        return 2
    with step("capturing"), torch.no_grad():
        report: Report = explain(model, dynamic=True if arguments.dynamic else None)(*args, **kwargs)
    print(report.to_json(indent=2) if arguments.json else report)
    return 0 if report.fused else 1


def _load(target: str) -> Callable[[], Any]:
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise UsageError(f"expected MODULE:FUNCTION or FILE.py:FUNCTION, got {target!r}")
    try:
        if place.endswith(".py"):
            path = Path(place)
            spec = importlib.util.spec_from_file_location(path.stem, path)
            if spec is None or spec.loader is None or not path.is_file():
                raise UsageError(f"no file {place}")
            module = importlib.util.module_from_spec(spec)
            sys.modules[path.stem] = module
            spec.loader.exec_module(module)
        else:
            sys.path.insert(0, os.getcwd())
            module = importlib.import_module(place)
    except ImportError as error:
        raise UsageError(f"cannot import {place}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"{place} has no function {name!r}")
    return function  # type: ignore[no-any-return]


def _inputs(function: Callable[[], Any]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    result = function()
    if not isinstance(result, tuple) or len(result) not in (2, 3) or not callable(result[0]):
        raise UsageError("the function should return (model, args) or (model, args, kwargs)")
    model, args, *rest = result
    if not isinstance(args, (tuple, list)):
        args = (args,)
    return model, tuple(args), dict(rest[0]) if rest else {}
