# SPDX-License-Identifier: Apache-2.0
"""Devices of the op tests: the CPU always, a CUDA GPU where there is one (select with ``-m gpu``)."""

import fusion_pass.kernels.ops  # noqa: F401  (registers the ops)
import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return torch.device(request.param)
