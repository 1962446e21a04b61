"""A PyTorch compiler pass that fuses DeepSeek-V4's attention, inverse RoPE, FP8 quantisation and grouped projection.

    model = torch.compile(model, backend="fusion_pass")

:func:`explain` and :func:`reports` say what was fused and what was not, and why. Importing this package needs neither a
GPU nor Triton.
"""

from __future__ import annotations

from .source_layout import install_finder as _install_finder

_install_finder()

# The finder has to stand before anything imports the sub-packages; and functions whose name is also that of a module
# (rewrite, explain) have to be bound after the module.
# ruff: noqa: E402, I001
from .kernels import ops as _ops  # noqa: F401  (registers torch.ops.fusion_pass.*)
from . import rewrite as _rewrite_module  # noqa: F401
from .backend import register as _register
from .config import Config
from .explain import explain
from .hooks import enabled, install, uninstall
from .patterns.registration import register_pattern, registered_patterns, unregister_pattern
from .programs import rewrite
from .report import FusedChain, GatedChain, NearMiss, Report
from .store import clear_reports, reports
from .version import __version__
from .warming import WarmUp, warmup

_register()

__all__ = [
    "Config",
    "FusedChain",
    "GatedChain",
    "NearMiss",
    "Report",
    "WarmUp",
    "__version__",
    "clear_reports",
    "enabled",
    "explain",
    "install",
    "register_pattern",
    "registered_patterns",
    "reports",
    "rewrite",
    "uninstall",
    "unregister_pattern",
    "warmup",
]
