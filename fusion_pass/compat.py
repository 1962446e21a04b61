"""Every difference between torch versions (2.11 to 2.15) that the rest of the package would otherwise have to know.

Features are detected, not deduced from version numbers: nightlies and vendors' builds mix them.
"""

from __future__ import annotations

from typing import Any


def inductor_config() -> Any:
    """The module ``torch._inductor.config`` (imported late: it is slow, and needless for ``rewrite`` and
    ``explain``).
    """
    import torch._inductor.config as config

    return config
