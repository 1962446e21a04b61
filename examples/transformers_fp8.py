"""transformers' DeepSeek-V4 with random weights, its output projection as FP8 checkpoints compute it.

    python -m fusion_pass explain examples/transformers_fp8.py:example
"""

import torch

from fusion_pass.models import random_deepseek_v4, replace_grouped_linear


def example():
    """A small model with all three kinds of attention layer, and a prompt of 24 tokens, for ``explain``."""
    torch.manual_seed(0)
    model = random_deepseek_v4()
    replace_grouped_linear(model, scale_rule="ue8m0")
    input_ids = torch.randint(0, model.config.vocab_size, (1, 24))
    return model, (input_ids,), {"use_cache": False}
