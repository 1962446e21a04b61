"""The FP8 grouped linear: its numbers against a plain loop over blocks, and its graph in ordinary ATen."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fusion_pass.models import FP8GroupedLinear, quantize_activation, quantize_weight, replace_grouped_linear


def block_loop(x, module):
    """The definition, block by block in float64: sum over K blocks of (codes . codes) * activation scale * weight
    scale.
    """
    groups, rows, columns = module.weight.shape
    out = torch.zeros(*x.shape[:-1], rows, dtype=torch.float64)
    for g in range(groups):
        for k in range(0, columns, 128):
            block = x[..., g, k : k + 128].float()
            scale = block.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448
            if module.scale_rule == "ue8m0":
                mantissa, exponent = torch.frexp(scale)
                scale = torch.ldexp(torch.ones_like(scale), torch.where(mantissa == 0.5, exponent - 1, exponent))
            codes = (block / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double()
            for r in range(0, rows, 128):
                weight = module.weight[g, r : r + 128, k : k + 128].double()
                weight_scale = module.weight_scale[g, r // 128, k // 128].double()
                out[..., g, r : r + 128] += (codes @ weight.T) * scale.double() * weight_scale
    return out


@pytest.mark.parametrize("scale_rule", ["fp32", "ue8m0"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [128, 72, 200])
def test_equals_the_definition(scale_rule, dtype, rows):
    torch.manual_seed(0)
    module = FP8GroupedLinear.from_linear(torch.randn(2 * rows, 256) / 16, 2, scale_rule)
    x = torch.randn(3, 5, 2, 256).to(dtype)
    y = module(x)
    assert y.shape == (3, 5, 2, rows) and y.dtype == dtype
    expected = block_loop(x, module)
    torch.testing.assert_close(y.double(), expected, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)


def test_power_of_two_scales_never_saturate():
    # Values whose exact scale is a little above a power of two: log2 in float32 rounds these down.
    top = 448 * torch.nextafter(torch.tensor(2.0**-3), torch.tensor(1.0))
    x = torch.full((1, 128), float(top))
    codes, scale = quantize_activation(x, "ue8m0")
    assert scale.item() == 2.0**-2
    assert (codes.float() * scale <= x * (1 + 2**-4)).all() and codes.float().max() < 448
    exact = torch.full((1, 128), 448 * 2.0**-3)
    assert quantize_activation(exact, "ue8m0")[1].item() == 2.0**-3


@pytest.mark.parametrize("scale_rule", ["fp32", "ue8m0"])
def test_zeros_and_empty_input(scale_rule):
    module = FP8GroupedLinear.from_linear(torch.randn(256, 128), 2, scale_rule)
    assert (module(torch.zeros(4, 2, 128)) == 0).all()
    assert module(torch.empty(0, 2, 128)).shape == (0, 2, 128)


def test_weight_blocks_keep_relative_precision():
    weight = torch.randn(2, 200, 256) * torch.logspace(-6, 3, 256)
    codes, scale = quantize_weight(weight)
    assert codes.shape == (2, 200, 256) and scale.shape == (2, 2, 2)
    expanded = scale.repeat_interleave(128, 1)[:, :200].repeat_interleave(128, 2)
    error = (codes.float() * expanded - weight).abs()
    assert (error <= torch.maximum(weight.abs() * 2**-4, expanded * 2**-9)).all()


def test_dtype_moves_leave_codes_alone():
    module = FP8GroupedLinear.from_linear(torch.randn(256, 128), 2)
    codes, scale = module.weight.clone(), module.weight_scale.clone()
    torch.nn.Sequential(module).to(torch.bfloat16).to("meta")
    assert module.weight.dtype == torch.float8_e4m3fn and module.weight.device.type == "meta"
    module = FP8GroupedLinear(codes, scale).double()
    assert torch.equal(module.weight.float(), codes.float()) and module.weight_scale.dtype == torch.float32


def test_graph_is_ordinary_aten():
    module = FP8GroupedLinear.from_linear(torch.randn(256, 256), 2, "fp32")
    graph = make_fx(module)(torch.randn(3, 2, 256, dtype=torch.bfloat16)).graph
    ops = [
        str(node.target).removeprefix("aten.").removesuffix(".default")
        for node in graph.nodes
        if node.op == "call_function"
    ]
    assert all(str(node.target).startswith("aten.") for node in graph.nodes if node.op == "call_function")
    order = [ops.index(op) for op in ("abs", "amax", "clamp_min", "clamp", "bmm")]
    assert order == sorted(order) and ops.count("bmm") == 1


def test_replaces_transformers_modules():
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    linear = modeling.DeepseekV4GroupedLinear(256, 2 * 64, 2)
    model = torch.nn.ModuleDict({"attn": torch.nn.ModuleDict({"o_a_proj": linear}), "other": torch.nn.Linear(2, 2)})
    x = torch.randn(2, 3, 2, 256)
    expected = linear(x)
    assert replace_grouped_linear(model, "fp32") == ["attn.o_a_proj"]
    replaced = model["attn"]["o_a_proj"]
    assert isinstance(replaced, FP8GroupedLinear)
    error = (replaced(x) - expected).norm() / expected.norm()
    assert 1e-3 < error < 0.06, "FP8 differs from the unquantised linear, but by no more than FP8 does"


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match="multiple of 128"):
        quantize_activation(torch.randn(3, 100))
    with pytest.raises(ValueError, match="multiple of 128"):
        quantize_weight(torch.randn(3, 100))
    with pytest.raises(ValueError, match="scale rule"):
        quantize_activation(torch.randn(3, 128), "e8m0")
    with pytest.raises(TypeError, match="from_linear"):
        FP8GroupedLinear(torch.randn(1, 128, 128), torch.ones(1, 1, 1))
    with pytest.raises(ValueError, match="no grouped linear"):
        replace_grouped_linear(torch.nn.Linear(2, 2))
