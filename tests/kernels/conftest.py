# SPDX-License-Identifier: Apache-2.0
"""Kernel tests run on the GPU when there is one, else the same kernels run in Triton's CPU interpreter.

Tests of the ops themselves (reference on the CPU, kernels on a GPU) are parametrised by ``op_cases.DEVICES`` instead;
their GPU half is selected with ``-m gpu``. Compile checks need real Triton and run in a subprocess.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads this when a kernel is decorated, so it must be set before the first kernel module is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def _loop_bounds_of_any_numpy() -> None:
    """Let Triton 3.6's interpreter run ``range(0, n)`` with a run-time ``n`` under NumPy 2.4.

    It turns a one-element array into an int in a way that NumPy deprecated and then removed; later Triton versions do
    what this replacement does.
    """
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    original = getattr(interpreter, "_patch_lang_tensor", None)
    if original is None or not hasattr(interpreter, "_LangPatchScope"):
        return

    def patched(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


_loop_bounds_of_any_numpy()

import fusion_pass.kernels.ops  # noqa: E402, F401  (registers the ops)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
