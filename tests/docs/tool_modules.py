"""The programs in tools/ as modules, for the tests of them and of what they write."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def load_tool(name):
    """``tools/NAME.py`` as a module; what it puts on the import path is taken off again."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module
