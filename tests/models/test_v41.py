"""DeepSeek-V4.1: scales in blocks of 32 (activations 1x32, weights 32x32), layers that compress by 1 and 2, no norm per
query head. transformers' V4 layers with those three things changed."""

import pytest
import torch

pytest.importorskip("transformers", minversion="5.8")

import fusion_pass  # noqa: E402
from fusion_pass.models import random_deepseek_v4, replace_grouped_linear  # noqa: E402

ROLES = ("fmha", "inverse_rope", "fp8_quant", "bgemm")


def v41(scale_rule="ue8m0", dtype=torch.float32):
    """A layer that compresses by 2 and one that compresses by 1."""
    kinds = ["compressed_sparse_attention", "heavily_compressed_attention"]
    model = random_deepseek_v4("tiny", layer_types=kinds, dtype=dtype, compress_rates=dict(zip(kinds, (2, 1))),
                               rms_norm_eps=1e-20)
    for layer in model.model.layers:
        layer.self_attn.q_b_norm = torch.nn.Identity()
    assert len(replace_grouped_linear(model, scale_rule, block=32)) == 2
    return model


def compiled(model, ids, **options):
    torch._dynamo.reset()
    known = len(fusion_pass.reports())
    run = torch.compile(model, backend="fusion_pass", fullgraph=True, options={"strict": True, **options})
    with torch.no_grad():
        return run(ids, use_cache=False).logits, fusion_pass.reports()[known:]


@pytest.mark.parametrize("scale_rule", ["ue8m0", pytest.param("fp32", marks=pytest.mark.slow)])
def test_both_kinds_of_layers(scale_rule):
    model = v41(scale_rule)
    attention = model.model.layers[0].self_attn
    groups, rows, width = attention.o_a_proj.weight.shape
    assert attention.o_a_proj.weight_scale.shape == (groups, rows // 32, width // 32)
    ids = torch.randint(0, 500, (1, 40), generator=torch.Generator().manual_seed(0))
    logits, (report,) = compiled(model, ids, inner="aot_eager")
    assert [chain.roles for chain in report.fused] == [ROLES] * 2 and not report.near_misses, str(report)
    for chain in report.fused:
        assert (chain.quant, chain.group) == (scale_rule, 32) and "fp8_bgemm" in chain.op
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits
    # Codes on a rounding border may fall to either side.
    assert float((logits - wanted).norm() / wanted.norm()) < 2e-2
