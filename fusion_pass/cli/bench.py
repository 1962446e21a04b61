"""``bench``: hand the arguments to the benchmark suite, which lives in the source checkout, not in the wheel."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence


def run(arguments: Sequence[str]) -> int:
    """Run ``python -m benchmarks`` with these arguments; exit code 2 when there is no checkout around."""
    sys.path.insert(0, os.getcwd())
    if importlib.util.find_spec("benchmarks") is None or importlib.util.find_spec("benchmarks.__main__") is None:
        print("bench: no 'benchmarks' package here; run it from the root of a source checkout", file=sys.stderr)
        return 2
    previous = sys.argv
    sys.argv = ["benchmarks", *arguments]
    try:
        runpy.run_module("benchmarks", run_name="__main__", alter_sys=False)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        sys.argv = previous
    return 0
