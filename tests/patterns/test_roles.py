"""A role means one thing: its reference, the kernels' reference, and what the recogniser compares with agree."""

import pytest
import torch
from fusion_pass.kernels import reference
from fusion_pass.patterns import fmha as fmha_module
from fusion_pass.patterns.bgemm import bgemm, dequantise_weight
from fusion_pass.patterns.fp8_quant import block_scale, dequantise, fp8_quant, pack_exponents, unpack_exponents
from fusion_pass.patterns.inverse_rope import inverse_rope
from fusion_pass.patterns.kv_merge import kv_merge
from fusion_pass.patterns.roles import ROLES, role
from o_path import HALF


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_inverse_rope(dtype):
    o, angles = normal(5, 4, 512, dtype=dtype), normal(5, HALF, seed=1)
    want = reference.inverse_rope(o, angles.cos(), angles.sin(), 1)[0].view(5, 4, 512)
    assert torch.equal(inverse_rope(o, angles.cos(), angles.sin()), want)
    four = inverse_rope(o.view(1, 5, 4, 512), angles.cos(), angles.sin())
    assert torch.equal(four[0], want), "leading dimensions are free"


def test_inverse_rope_undoes_the_complex_rotation():
    o, angles = normal(3, 2, 512), normal(3, HALF, seed=1)
    pairs = torch.view_as_complex(o[..., -64:].unflatten(-1, (-1, 2)))
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)).flatten(-2)
    back = inverse_rope(torch.cat((o[..., :-64], turned), -1), angles.cos(), angles.sin())
    torch.testing.assert_close(back, o)


@pytest.mark.parametrize("rule", ["fp32", "ue8m0"])
@pytest.mark.parametrize("block", [128, 32])
@pytest.mark.parametrize("spread", [1.0, 1e-11, 500.0])
def test_fp8_quant(rule, block, spread):
    x = normal(2, 6, 512) * spread
    codes, scales = fp8_quant(x, block, rule, 1e-10)
    want, stored = reference.quantise(x, block, rule, 1e-10)
    assert torch.equal(codes.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(scales, stored[..., :6].transpose(1, 2))
    assert torch.equal(dequantise(codes, scales, block), reference.dequantise(want, stored, block))


def test_power_of_two_scale_is_the_next_one_up():
    scale = torch.tensor([2.0 ** e for e in range(-40, 20)], dtype=torch.float64)
    near = torch.cat((scale * (1 - 1e-6), scale, scale * (1 + 1e-6)))
    found = block_scale(near * 448, "ue8m0", 1e-30)
    want = torch.cat((scale, scale, scale * 2))
    assert torch.equal(found, want)
    with pytest.raises(ValueError, match="expected a scale rule"):
        block_scale(scale, "e8m0", 0.0)


@pytest.mark.parametrize("blocks", [4, 6, 8])
def test_packed_exponents(blocks):
    scales = 2.0 ** torch.randint(-20, 20, (2, 3, blocks), generator=torch.Generator().manual_seed(0)).float()
    words = pack_exponents(scales)
    assert words.dtype == torch.int32 and words.shape == (2, 3, (blocks + 3) // 4)
    assert torch.equal(unpack_exponents(words, blocks), scales)
    assert int(words[0, 0, 0] & 0xFF) == int(scales[0, 0, 0].log2()) + 127


def test_packed_exponents_as_the_kernels_keep_them():
    x = normal(2, 8, 512)
    _, words = reference.quantise(x, 128, "ue8m0", 1e-10, True)
    assert torch.equal(pack_exponents(fp8_quant(x, 128, "ue8m0", 1e-10)[1]), words.transpose(1, 2))


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float8_e8m0fnu])
def test_bgemm_of_dequantised_operands(scale_dtype):
    x, weight = normal(2, 5, 512), normal(2, 192, 512, seed=1).clamp(-4, 4).to(torch.float8_e4m3fn)
    factors = (2.0 ** torch.randint(-8, -2, (2, 2, 4), generator=torch.Generator().manual_seed(2))).to(scale_dtype)
    codes, stored = reference.quantise(x)
    want = reference.fp8_bgemm(codes, stored, weight, factors, 128, 128, torch.float32)
    values = reference.dequantise(codes, stored).transpose(0, 1)
    torch.testing.assert_close(bgemm(values, dequantise_weight(weight, factors)), want)
    torch.testing.assert_close(bgemm(values, dequantise_weight(weight, factors)),
                               torch.einsum("tgk,grk->tgr", values, dequantise_weight(weight, factors)))


@pytest.mark.parametrize("sink", [False, True])
def test_kv_merge(sink):
    partials, lse = normal(3, 5, 4, 512), normal(3, 5, 4, seed=1) * 3
    lse[1, 2] = float("-inf")
    sinks = normal(4, seed=2) if sink else None
    want, _ = reference.merge_partials(partials, lse, None, sinks)
    torch.testing.assert_close(kv_merge(partials, lse, sinks), want)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("kind", ["none", "bool", "additive"])
def test_fmha(sink, kind):
    q, kv = normal(2, 3, 4, 128), normal(2, 9, 128, seed=1)
    visible = torch.rand(2, 3, 9, generator=torch.Generator().manual_seed(3)) < 0.6
    visible[..., 0] = True
    mask = {"none": None, "bool": visible,
            "additive": torch.zeros(2, 3, 9).masked_fill(~visible, float("-inf"))}[kind]
    sinks = normal(4, seed=2) if sink else None
    want = reference.attention(q, kv, mask, sinks, 0.1)
    torch.testing.assert_close(fmha_module.fmha(q, kv, mask, sinks, 0.1), want)


def test_fmha_gathered():
    q, kv, sinks = normal(1, 5, 4, 128), normal(1, 9, 128, seed=1), normal(4, seed=2)
    indices = torch.randint(-1, 9, (1, 5, 6), generator=torch.Generator().manual_seed(3))
    want = reference.attention_gathered(q[0], kv[0], indices[0], sinks, 0.1)
    torch.testing.assert_close(fmha_module.gathered(q, kv, indices, sinks, 0.1)[0], want)


def test_every_role_of_a_report_has_a_reference():
    from fusion_pass.report import ROLES as NAMES
    assert tuple(ROLES) == NAMES
    for one in ROLES.values():
        for dtype in (torch.float32, torch.bfloat16):
            for arguments in one.samples(dtype, torch.Generator().manual_seed(0)):
                assert len(arguments) == len(one.parameters)
                one.reference(*arguments)
    with pytest.raises(ValueError, match="nearest is 'inverse_rope'"):
        role("inverse_rop")
