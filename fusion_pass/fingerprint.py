"""What the pass's result depends on, as one string: Inductor puts it into the key of its cache.

An equal key with another pass behind it would silently reuse wrong code, so everything counts: the sources of this
package and of its kernels, the resolved configuration (and with it the environment), the versions of torch and Triton,
and the architectures of the machine's GPUs (the gate asks for them).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import sys
from pathlib import Path

import torch

from .config import Config
from .version import __version__


def fingerprint(config: Config, kind: str) -> str:
    """A string that changes with anything that can change the result of the pass ``kind`` under ``config``."""
    parts = (
        kind,
        __version__,
        config.resolve().cache_key(),
        sources(),
        registered_patterns(),
        *_versions(),
        *_architectures(),
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@functools.cache
def sources() -> str:
    """Hash of all Python sources of the package, its kernels and its patterns."""
    digest = hashlib.sha256()
    for name in ("fusion_pass", "fusion_pass.kernels", "fusion_pass.patterns"):
        spec = importlib.util.find_spec(name)
        for folder in spec.submodule_search_locations or () if spec else ():
            for path in sorted(Path(folder).rglob("*.py")):
                digest.update(path.relative_to(folder).as_posix().encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def registered_patterns() -> str:
    """Identity of the patterns that the user registered in this process."""
    patterns = sys.modules.get("fusion_pass.patterns")
    identity = getattr(patterns, "registry_fingerprint", None)
    return str(identity()) if identity is not None else ""


@functools.cache
def _versions() -> tuple[str, ...]:
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    return (f"torch {torch.__version__}", f"triton {triton}")


def _architectures() -> tuple[str, ...]:
    if not torch.cuda.is_available():
        return ("no cuda",)
    return tuple(
        f"{torch.cuda.get_device_name(index)} {torch.cuda.get_device_capability(index)}"
        for index in range(torch.cuda.device_count())
    )
