"""Entry point of ``python -m fusion_pass`` and of the console script ``fusion-pass``."""

from __future__ import annotations

import sys

from .cli.main import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
