"""Find ``fusion_pass.kernels`` and ``fusion_pass.patterns`` in a source checkout.

A wheel has both inside the package. In a checkout they are top-level folders beside it, and they must be reached only
as ``fusion_pass.kernels`` and ``fusion_pass.patterns``: a second copy under the name ``kernels`` would register every
op twice.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

_PACKAGE = Path(__file__).resolve().parent
_NAMES = ("kernels", "patterns")


class CheckoutFinder:
    """Meta-path finder for the sub-packages of one checkout.

    It stands before other finders: with a wheel or an editable install of another checkout present, the sub-packages
    must come from the checkout that ``fusion_pass`` itself came from.
    """

    def __init__(self, folders: dict[str, Path]) -> None:
        self.folders = folders

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        folder = self.folders.get(fullname)
        if folder is None:
            return None
        return importlib.util.spec_from_file_location(
            fullname, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )


def install_finder() -> None:
    """Put the finder in place when this package runs from a checkout; do nothing in a wheel. Safe to call again."""
    folders = {}
    for name in _NAMES:
        beside = _PACKAGE.parent / name
        if not (_PACKAGE / name).is_dir() and (beside / "__init__.py").is_file():
            folders[f"{__package__}.{name}"] = beside
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__qualname__ != CheckoutFinder.__qualname__]
    if folders:
        sys.meta_path.insert(0, CheckoutFinder(folders))
