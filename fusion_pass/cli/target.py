"""Functions that a user names on the command line as MODULE:FUNCTION or FILE.py:FUNCTION."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


class UsageError(Exception):
    """What the user named cannot be used; the message says how it should look."""


def load(target: str) -> Callable[..., Any]:
    """The function of a target. Raises UsageError."""
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise UsageError(f"expected MODULE:FUNCTION or FILE.py:FUNCTION, got {target!r}")
    function = getattr(load_module(place), name, None)
    if not callable(function):
        raise UsageError(f"{place} has no function {name!r}")
    return function  # type: ignore[no-any-return]


def load_module(place: str) -> ModuleType:
    """The module of a name, or of a file that ends in ``.py``. Raises UsageError."""
    try:
        if place.endswith(".py"):
            path = Path(place)
            spec = importlib.util.spec_from_file_location(path.stem, path)
            if spec is None or spec.loader is None or not path.is_file():
                raise UsageError(f"no file {place}")
            module = importlib.util.module_from_spec(spec)
            sys.modules[path.stem] = module
            spec.loader.exec_module(module)
            return module
        sys.path.insert(0, os.getcwd())
        return importlib.import_module(place)
    except ImportError as error:
        raise UsageError(f"cannot import {place}: {error}") from error
