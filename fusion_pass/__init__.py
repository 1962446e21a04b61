"""A PyTorch compiler pass that fuses DeepSeek-V4's attention, inverse RoPE, FP8 quantisation and grouped projection.

    model = torch.compile(model, backend="fusion_pass")

:func:`explain` and :func:`reports` say what was fused and what was not, and why. Importing this package needs neither a
GPU nor Triton.
"""

from __future__ import annotations

from .source_layout import install_finder as _install_finder

_install_finder()

from .config import Config  # noqa: E402  (the finder has to stand before the sub-packages are imported)
from .report import FusedChain, GatedChain, NearMiss, Report  # noqa: E402
from .version import __version__  # noqa: E402

__all__ = ["Config", "FusedChain", "GatedChain", "NearMiss", "Report", "__version__"]
