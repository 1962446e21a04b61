# SPDX-License-Identifier: Apache-2.0
"""The in-place contract: allocate, fill, project, in either form."""

import pytest
import torch
from fusion_pass.kernels import reference
from fusion_pass.kernels.ops.contract_ops import outputs_gate

import fusion_pass  # noqa: F401

ops = torch.ops.fusion_pass
HEADS, DIM, GROUPS, ROWS = 4, 512, 2, 128


def operands(tokens=5, seed=0):
    gen = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, HEADS, DIM, generator=gen).bfloat16()
    kv = torch.randn(20, DIM, generator=gen).bfloat16()
    indices = torch.randint(-1, 20, (tokens, 9), generator=gen)
    sink = torch.randn(HEADS, generator=gen)
    angles = torch.randn(tokens, 32, generator=gen)
    weight = torch.randn(GROUPS, ROWS, HEADS // GROUPS * DIM, generator=gen).clamp(-4, 4).to(torch.float8_e4m3fn)
    scales = torch.rand(GROUPS, 1, HEADS // GROUPS * DIM // 128, generator=gen) * 0.01
    return q, kv, indices, sink, angles.cos(), angles.sin(), weight, scales


def layer(q, kv, indices, sink, cos, sin, weight, weight_scales, columns, fused=None, pack=False, rule="fp32"):
    outputs = ops.create_outputs(q, weight, GROUPS, columns, 128, pack, fused)
    whole = len(outputs) == 3
    codes, scales = (outputs[1], outputs[2]) if whole else (None, None)
    ops.attention_into(q, kv, indices, sink, cos, sin, outputs[0], codes, scales, DIM ** -0.5, GROUPS, columns, whole,
                       128, rule)
    return ops.project_outputs(outputs, cos, sin, weight, weight_scales, GROUPS, 128, 128, rule)


def expected(args, rule="fp32"):
    q, kv, indices, sink, cos, sin, weight, weight_scales = args
    codes, scales = reference.attention_gathered_rope_quant(q, kv, indices, sink, cos, sin, DIM ** -0.5, GROUPS, 128,
                                                            rule)
    return reference.fp8_bgemm(codes, scales, weight, weight_scales)


@pytest.mark.parametrize("columns", [8, 16])
@pytest.mark.parametrize("pack, rule", [(False, "fp32"), (True, "ue8m0")])
def test_fused_form(columns, pack, rule):
    args = operands()
    assert torch.equal(layer(*args, columns, None, pack, rule), expected(args, rule))


def test_plain_form_agrees_up_to_its_rounding():
    args = operands()
    found, want = layer(*args, 8, False).double(), expected(args).double()
    # The plain form is rounded to bf16 before the rotation.
    assert float((found - want).abs().max()) < 2e-2 * float(want.abs().max())
    q, kv, indices, sink, cos, sin, weight, weight_scales = args
    o = reference.attention_gathered(q, kv, indices, sink, DIM ** -0.5)
    codes, scales = reference.inverse_rope_quant(o, cos, sin, GROUPS)
    assert torch.equal(layer(*args, 8, False), reference.fp8_bgemm(codes, scales, weight, weight_scales))


def test_plain_weight():
    q, kv, indices, sink, cos, sin, weight, _ = operands()
    plain = weight.to(torch.bfloat16)
    decision = outputs_gate(q, plain, GROUPS)
    assert not decision.fused and "bfloat16" in decision.reason
    found = layer(q, kv, indices, sink, cos, sin, plain, None, 8)
    o = reference.attention_gathered_rope(q, kv, indices, sink, cos, sin, DIM ** -0.5, GROUPS)
    want = torch.einsum("gtk,grk->tgr", o.double(), plain.double())
    assert float((found.double() - want).abs().max()) < 2e-2 * float(want.abs().max())


def test_padding_columns_are_zero():
    q, kv, indices, sink, cos, sin, weight, _ = operands()
    outputs = ops.create_outputs(q, weight, GROUPS, 16)
    outputs[2].fill_(float("nan"))
    ops.attention_into(q, kv, indices, sink, cos, sin, *outputs, DIM ** -0.5, GROUPS, 16, True)
    assert torch.equal(outputs[2][..., 5:], torch.zeros(GROUPS, 8, 11))


def test_the_gate(monkeypatch):
    q, *_, weight, _ = operands()
    assert outputs_gate(q, weight, GROUPS).fused
    assert "3 groups" in outputs_gate(q, weight, 3).reason
    assert "float32" in outputs_gate(q.float(), weight, GROUPS).reason
    assert "multiple" in outputs_gate(q[..., :500], weight, GROUPS).reason
    monkeypatch.setenv("FUSION_PASS_DISABLE", "1")
    assert "FUSION_PASS_DISABLE" in outputs_gate(q, weight, GROUPS).reason
    assert len(ops.create_outputs(q, weight, GROUPS, 8)) == 1


def test_disagreement_is_an_error():
    q, kv, indices, sink, cos, sin, weight, _ = operands()
    output, codes, scales = ops.create_outputs(q, weight, GROUPS, 8)
    plain, = ops.create_outputs(q, weight, GROUPS, 8, fused=False)

    def fill(output, codes, scales, columns, fused):
        ops.attention_into(q, kv, indices, sink, cos, sin, output, codes, scales, DIM ** -0.5, GROUPS, columns, fused)

    with pytest.raises(ValueError, match="neither codes nor scales with fused=False, got codes, scales"):
        fill(output, codes, scales, 8, False)
    with pytest.raises(ValueError, match="codes and scales with fused=True, got neither"):
        fill(plain, None, None, 8, True)
    with pytest.raises(ValueError, match="codes and scales with fused=True, got codes"):
        fill(output, codes, None, 8, True)
    with pytest.raises(ValueError, match="scale_columns"):
        fill(output, codes, scales, 16, True)
    with pytest.raises(ValueError, match="multiple of 4 and at least 5, got 4"):
        ops.create_outputs(q, weight, GROUPS, 4)
    with pytest.raises(ValueError, match="output of shape"):
        fill(plain, codes, scales, 8, True)
    with pytest.raises(ValueError, match="three outputs of the fused form, got 2 tensors"):
        ops.project_outputs([output, codes], cos, sin, weight, None, GROUPS)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("version", [1, 2])
def test_compiled(fused, version):
    args = operands()
    with torch._inductor.config.patch(enable_auto_functionalized_v2=version == 2):
        torch._dynamo.reset()
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(*args, 8, fused), layer(*args, 8, fused))


def test_dynamic_tokens_compile_once():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for tokens in (5, 6, 13):
        args = operands(tokens)
        assert torch.equal(compiled(*args, 16), layer(*args, 16))
    assert counter.frame_count == 1


def test_opcheck():
    # Without the schema test: it compares arguments by allclose, which float8 does not have.
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    q, kv, indices, sink, cos, sin, weight, weight_scales = operands()
    for fused in (True, False):
        # Without the run test: its results are uninitialised memory.
        torch.library.opcheck(ops.create_outputs.default, (q, weight, GROUPS, 8), {"fused": fused},
                              test_utils=tests[:2])
        outputs = ops.create_outputs(q, weight, GROUPS, 8, fused=fused)
        three = (*outputs, None, None)[:3]
        torch.library.opcheck(ops.attention_into.default, (q, kv, indices, sink, cos, sin, *three, DIM ** -0.5, GROUPS,
                                                           8, fused), test_utils=tests)
        ops.attention_into(q, kv, indices, sink, cos, sin, *three, DIM ** -0.5, GROUPS, 8, fused)
        torch.library.opcheck(ops.project_outputs.default, (outputs, cos, sin, weight, weight_scales, GROUPS),
                              test_utils=tests)
