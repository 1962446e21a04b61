"""bf16 models with FP8 weights at hand: as written without the option, in FP8 (and said so) with it."""

import copy

import pytest
import torch

pytest.importorskip("transformers", minversion="5.8")

import fusion_pass  # noqa: E402
from fusion_pass.models import (  # noqa: E402
    FP8GroupedLinear,
    GroupedLinearWithFP8,
    attach_fp8_weights,
    quantize_weight,
    random_deepseek_v4,
)

BF16 = ("fmha", "inverse_rope", "bgemm")
FP8 = ("fmha", "inverse_rope", "fp8_quant", "bgemm")
NAME = "model.layers.0.self_attn.o_a_proj"


@pytest.fixture(scope="module")
def plain():
    return random_deepseek_v4("tiny", layer_types=["sliding_attention"], dtype=torch.float32)


@pytest.fixture(autouse=True)
def no_grad():
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def ids():
    return torch.randint(0, 500, (1, 24), generator=torch.Generator().manual_seed(0))


def compiled(model, **options):
    known = len(fusion_pass.reports())
    run = torch.compile(model, backend="fusion_pass", fullgraph=True,
                        options={"inner": "aot_eager", "strict": True, **options})
    logits = run(ids(), use_cache=False).logits
    report, = fusion_pass.reports()[known:]
    return logits, report


def relative(value, wanted):
    return ((value.double() - wanted.double()).norm() / wanted.double().norm()).item()


def test_fp8_on_request_only(plain):
    model = copy.deepcopy(plain)
    assert attach_fp8_weights(model) == [NAME]
    assert set(model.state_dict()) == set(plain.state_dict()), "checkpoints stay what they were"
    wanted = plain(ids(), use_cache=False).logits
    assert torch.equal(model(ids(), use_cache=False).logits, wanted)

    logits, report = compiled(model)
    assert [chain.roles for chain in report.fused] == [BF16] and "numbers changed" not in str(report)
    assert relative(logits, wanted) < 1e-5

    torch._dynamo.reset()
    logits, report = compiled(model, o_proj="fp8")
    chain, = report.fused
    assert chain.roles == FP8 and (chain.quant, chain.group) == ("ue8m0", 128) and "fp8_bgemm" in chain.op
    assert "numbers changed" in chain.gate and any("numbers changed" in note for note in report.notes)
    reference = copy.deepcopy(plain)
    linear = reference.get_submodule(NAME)
    parent = reference.get_submodule(NAME.rpartition(".")[0])
    parent.o_a_proj = FP8GroupedLinear.from_linear(linear.weight, linear.n_groups, "ue8m0")
    in_fp8 = reference(ids(), use_cache=False).logits
    assert relative(in_fp8, wanted) > 1e-3, "FP8 is another computation"
    # Codes on a rounding border may fall to either side.
    assert relative(logits, in_fp8) < 0.3 * relative(in_fp8, wanted)


def test_without_weights_the_report_says_how_to_attach_them(plain):
    logits, report = compiled(plain, o_proj="fp8")
    assert [chain.roles for chain in report.fused] == [BF16]
    assert any("attach_fp8_weights" in note for note in report.notes), report
    assert relative(logits, plain(ids(), use_cache=False).logits) < 1e-5


@pytest.mark.slow
def test_verified_against_the_fp8_form(plain):
    model = copy.deepcopy(plain)
    attach_fp8_weights(model, scale_rule="fp32")
    _, report = compiled(model, o_proj="fp8", verify="first")
    assert [chain.roles for chain in report.fused] == [FP8] and report.fused[0].quant == "fp32", report


def test_switched_off_rule_computes_as_written(plain):
    model = copy.deepcopy(plain)
    attach_fp8_weights(model)
    logits, report = compiled(model, o_proj="fp8", disable_rules="fp8_quant")
    assert not report.fused and report.gated
    assert relative(logits, plain(ids(), use_cache=False).logits) < 1e-5


def test_weights_of_a_checkpoint_are_taken(plain):
    model = copy.deepcopy(plain)
    linear = model.get_submodule(NAME)
    stacked = linear.weight.reshape(2, -1, linear.weight.shape[-1])
    codes, scales = quantize_weight(stacked, "ue8m0")
    attach_fp8_weights(model, {NAME: (codes, scales.to(torch.float8_e8m0fnu))})
    both = model.get_submodule(NAME)
    assert isinstance(both, GroupedLinearWithFP8) and both.weight_fp8 is codes
    model.to(torch.bfloat16).to("cpu")
    assert both.weight.dtype == torch.bfloat16 and both.weight_fp8.dtype == torch.float8_e4m3fn
    assert both.weight_fp8_scale.dtype == torch.float8_e8m0fnu


def test_dequantised_checkpoint_is_requantised_exactly():
    """official convert.py: bf16 weights that are E4M3 codes times power-of-two scales."""
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    codes, scales = quantize_weight(weight, "ue8m0")
    values = codes.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(values.bfloat16().float(), values)
    again, new_scales = quantize_weight(values.bfloat16(), "ue8m0")
    new_values = again.float() * new_scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(new_values, values)


def test_op_and_errors(plain):
    gen = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 2, 128, generator=gen), torch.randn(2, 16, 128, generator=gen)
    codes, scales = quantize_weight(weight)
    torch.library.opcheck(torch.ops.fusion_pass.grouped_linear_with_fp8.default, (x, weight, codes, scales),
                          test_utils=("test_faketensor", "test_aot_dispatch_dynamic"))
    parameter = torch.nn.Parameter(weight.flatten(0, 1))
    with pytest.raises(TypeError, match="float8_e4m3fn codes"):
        GroupedLinearWithFP8(parameter, 2, weight, scales)
    with pytest.raises(ValueError, match="shapes"):
        GroupedLinearWithFP8(parameter, 2, codes, scales[:1])
    with pytest.raises(ValueError, match="scale rule"):
        GroupedLinearWithFP8(parameter, 2, codes, scales, "e8m0")
    with pytest.raises(ValueError, match="no grouped linear named nowhere"):
        attach_fp8_weights(copy.deepcopy(plain), {"nowhere": (codes, scales)})
