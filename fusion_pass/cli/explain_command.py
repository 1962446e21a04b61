"""``explain MODULE:FUNCTION``."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..explain import explain
from ..explain_html import page
from ..explain_text import text
from ..report import Report
from .console import step
from .target import UsageError, load


def run(arguments: Namespace) -> int:
    """Exit code 0: something would be fused; 1: nothing; 2: the target or the output file cannot be used."""
    try:
        model, args, kwargs = _inputs(load(arguments.target))
    except UsageError as error:
        print(f"explain: {error}", file=sys.stderr)
        return 2
    with step("capturing"), torch.no_grad():
        report: Report = explain(model, dynamic=True if arguments.dynamic else None)(*args, **kwargs)
    if arguments.html:
        try:
            Path(arguments.html).write_text(page(report, f"fusion_pass: {arguments.target}"), encoding="utf-8")
        except OSError as error:
            print(f"explain: cannot write {arguments.html}: {error.strerror}", file=sys.stderr)
            return 2
        print(f"wrote {arguments.html}", file=sys.stderr)
    print(report.to_json(indent=2) if arguments.json else text(report, graphs=arguments.graphs))
    return 0 if report.fused else 1


def _inputs(function: Callable[[], Any]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    result = function()
    if not isinstance(result, tuple) or len(result) not in (2, 3) or not callable(result[0]):
        raise UsageError("the function should return (model, args) or (model, args, kwargs)")
    model, args, *rest = result
    if not isinstance(args, (tuple, list)):
        args = (args,)
    return model, tuple(args), dict(rest[0]) if rest else {}
