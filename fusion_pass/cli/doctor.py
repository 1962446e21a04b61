"""``doctor``: what is installed, what this machine has, and whether the pass and its ops work here."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import traceback
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

from .. import compat
from ..config import Config
from ..gate import device_note
from ..kernels.reduction import choose_kv_split
from ..version import __version__
from .console import step
from .selftest import check_ops

_PACKAGES = ("torch", "triton", "transformers", "sympy", "rich", "numpy")


def run(arguments: Namespace) -> int:
    """Exit code 0: every self-test passed; 1: one failed."""
    facts = {
        "fusion_pass": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "devices": _devices(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("FUSION_PASS")},
        "config": Config().resolve().to_dict(),
        "gates": _gates(Config().resolve()),
        "backend": "registered" if "fusion_pass" in compat.registered_backends() else "not registered",
    }
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with step("self-tests"):
        tests = {name: _outcome(test) for name, test in SELF_TESTS.items()}
        ops = dict(check_ops(device))
    failed = [name for name, outcome in tests.items() if outcome != "ok"]
    failed += [name for name, op_outcome in ops.items() if not op_outcome.ok]
    if arguments.json:
        outcomes = {name: dataclasses.asdict(outcome) for name, outcome in ops.items()}
        print(json.dumps({**facts, "self_tests": tests, "ops": outcomes, "success": not failed}, indent=2))
    else:
        for name, value in facts.items():
            _print(name, value)
        _print("self_tests", tests)
        _print(f"ops on {device}", {name: str(outcome) for name, outcome in ops.items()})
        print(f"{len(failed)} self-tests failed: {', '.join(failed)}" if failed else "all self-tests passed")
    return 1 if failed else 0


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> list[str]:
    if not torch.cuda.is_available():
        return ["no CUDA device: the ops run their reference implementation"]
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            f"cuda:{index} {properties.name}, sm_{properties.major}{properties.minor}, "
            f"{properties.multi_processor_count} SMs, {properties.total_memory / 2**30:.0f} GiB"
        )
    return found


def _gates(config: Config) -> dict[str, str]:
    """What decides here whether and how a chain is fused, apart from the chain itself; the sizes are an example's."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    off = "every chain (disable)" if config.disable else ", ".join(config.disable_rules) or "nothing"
    gates = {"implementation": device_note(device), "switched off": off}
    if device.type == "cuda":
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        split = choose_kv_split(num_partials=18, rows=128, head_dim=512, bound=config.kv_split, sm_count=sms,
                                capability=torch.cuda.get_device_capability(device))
        gates["KvSplit of 18 partials, 1 token, 128 heads"] = f"{split.kv_split}: {split.reason}"
    return gates


def _outcome(test: Callable[[], None]) -> str:
    try:
        test()
    except Exception as error:
        return "".join(traceback.format_exception_only(error)).strip()
    return "ok"


def _print(name: str, value: Any) -> None:
    if isinstance(value, dict):
        print(f"{name}:" + ("" if value else " none"))
        for key, entry in value.items():
            print(f"  {key}: {entry}")
    elif isinstance(value, list):
        print(f"{name}:" + ("" if value else " none"))
        for entry in value:
            print(f"  {entry}")
    else:
        print(f"{name}: {value}")


def _backend_compiles() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + 1

    x = torch.arange(-2.0, 2.0)
    compiled = torch.compile(function, backend="fusion_pass", options={"inner": "aot_eager"})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), function(x))


def _fp8_linear() -> None:
    from ..models import FP8GroupedLinear

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(128, 256, generator=generator) / 16
    x = torch.randn(4, 2, 256, generator=generator)
    expected = torch.einsum("tgk,grk->tgr", x, weight.reshape(2, 64, 256))
    error = (FP8GroupedLinear.from_linear(weight, 2)(x) - expected).norm() / expected.norm()
    if not error < 0.06:
        raise AssertionError(f"relative error {error:.3f} of the FP8 linear")


SELF_TESTS: dict[str, Callable[[], None]] = {
    "backend compiles a function": _backend_compiles,
    "FP8 grouped linear": _fp8_linear,
}
