"""Set-up that must come before the first import of Triton.

Without a GPU the Triton kernels run in Triton's CPU interpreter. Triton looks at the variable when a function is
decorated, its own library functions included, so it has to be set before anything imports Triton: here, not beside the
kernel tests, which may be collected after tests that compile with Inductor.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(config, items):
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA GPU")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


def pytest_terminal_summary(terminalreporter):
    import sys

    fuzzing = sys.modules.get("fuzzing")  # only when a fuzz test ran
    if fuzzing is not None:
        fuzzing.report(terminalreporter.write_line)
