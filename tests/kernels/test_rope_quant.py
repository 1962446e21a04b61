# SPDX-License-Identifier: Apache-2.0
"""Inverse RoPE and inverse RoPE + quantisation: layouts, scale rules, strides and padding against plain torch."""

import pytest
import torch

pytest.importorskip("triton")

from fusion_pass.kernels.triton import rope_quant  # noqa: E402


def tables(tokens, half, device, dtype=torch.float32):
    angle = torch.linspace(0.1, 40.0, tokens * half, device=device).reshape(tokens, half)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotated(o, cos, sin, groups):
    """Plain torch: rotate back in fp32, regroup to [G, T, K]."""
    x = o.float().clone()
    half = cos.shape[-1]
    tail = x[..., x.shape[-1] - 2 * half :]
    even, odd = tail[..., 0::2].clone(), tail[..., 1::2].clone()
    c, s = cos.float()[:, None], sin.float()[:, None]
    tail[..., 0::2], tail[..., 1::2] = even * c + odd * s, odd * c - even * s
    tokens, heads, dim = o.shape
    return x.reshape(tokens, groups, heads // groups * dim).transpose(0, 1).contiguous()


def quantised(y, block, rule, floor):
    blocks = y.unflatten(-1, (-1, block))
    scale = blocks.abs().amax(-1).clamp(min=floor) / 448
    if rule == "ue8m0":
        scale = torch.exp2(torch.ceil(torch.log2(scale.double()))).float()
    return (blocks / scale[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn).flatten(-2), scale


def unpack(words):
    """int32 [G, W, M] -> exponent bytes [G, 4 * W, M], lowest byte first."""
    return torch.stack([(words >> (8 * i)) & 0xFF for i in range(4)], 2).flatten(1, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens,heads,dim,half,groups", [(1, 4, 512, 32, 2), (5, 4, 128, 16, 4), (6, 2, 192, 32, 1)])
def test_inverse_rope(device, dtype, tokens, heads, dim, half, groups):
    o = torch.randn(tokens, heads, dim, device=device).to(dtype)
    cos, sin = tables(tokens, half, device)
    out = rope_quant.inverse_rope(o, cos, sin, groups)
    assert out.shape == (groups, tokens, heads // groups * dim) and out.dtype == dtype and out.is_contiguous()
    step = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-20}[dtype]
    torch.testing.assert_close(out.float(), rotated(o, cos, sin, groups), rtol=step, atol=1e-6)
    # Channels below the rotated part are copied bit for bit.
    plain = o[..., : dim - 2 * half]
    got = out.reshape(groups, tokens, heads // groups, dim)[..., : dim - 2 * half].transpose(0, 1)
    assert torch.equal(got.reshape(plain.shape), plain)


@pytest.mark.parametrize("rule,pack", [("fp32", False), ("ue8m0", False), ("ue8m0", True)])
@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("tokens", [1, 3, 4, 6])
def test_inverse_rope_quant(device, rule, pack, block, tokens):
    heads, dim, half, groups, floor = 4, 512, 32, 2, 1e-4
    o = torch.randn(tokens, heads, dim, device=device).bfloat16()
    o[0, 1] = 0  # an all-zero row takes the floor
    o[-1, 2, :128] *= 1e4
    cos, sin = tables(tokens, half, device)
    k = heads // groups * dim
    columns = -(-tokens // 4) * 4
    codes = torch.full((groups, tokens, k), float("nan"), dtype=torch.float8_e4m3fn, device=device)
    if pack:
        scales = torch.full((groups, k // (4 * block), columns), -1, dtype=torch.int32, device=device)
    else:
        scales = torch.full((groups, k // block, columns), float("nan"), device=device)
    rope_quant.inverse_rope_quant(o, cos, sin, groups, block, rule, floor, pack, out=(codes, scales))
    # On the CPU: a GPU's torch divides by a Python number through its reciprocal, which is one ulp off.
    expected_codes, expected = quantised(rotated(o.cpu(), cos.cpu(), sin.cpu(), groups), block, rule, floor)
    expected_codes, expected = expected_codes.to(device), expected.to(device)
    if pack:
        exponents = unpack(scales)
        assert (exponents[..., tokens:] == 0).all()
        got = torch.exp2(exponents[..., :tokens].float() - 127)
    else:
        assert (scales[..., tokens:] == 0).all()
        got = scales[..., :tokens]
    torch.testing.assert_close(got.transpose(1, 2), expected, rtol=1e-6, atol=0)
    # Contracted multiply-adds move a value by an ulp of fp32, which may move a code by one step of the grid, rarely.
    difference = codes.float() - expected_codes.float()
    assert (difference.abs() <= expected_codes.float().abs() / 8 + 2**-9).all()
    assert (difference != 0).float().mean() < 1e-3


def test_strided_input_and_tables(device):
    tokens, heads, dim, half, groups = 5, 4, 512, 32, 2
    base = torch.randn(heads, tokens, dim + 16, device=device).bfloat16()
    o = base.transpose(0, 1)[..., :dim]  # [T, H, D], token and head strides of another layout
    cos, sin = tables(tokens, half, device)
    joint = torch.stack([cos, sin], -1)  # interleaved table: stride 2 along the pairs
    codes, scales = rope_quant.inverse_rope_quant(o, joint[..., 0], joint[..., 1], groups)
    expected_codes, expected_scales = rope_quant.inverse_rope_quant(o.contiguous(), cos, sin, groups)
    assert torch.equal(codes.view(torch.uint8), expected_codes.view(torch.uint8))
    assert torch.equal(scales, expected_scales)
    # One position for all tokens, last dimension not contiguous, bf16 tables.
    one_cos, one_sin = cos[:1].bfloat16(), sin[:1].bfloat16()
    odd = torch.randn(tokens, dim, heads, device=device).bfloat16().transpose(1, 2)
    out = rope_quant.inverse_rope(odd, one_cos, one_sin, groups)
    full = one_cos.expand(tokens, half), one_sin.expand(tokens, half)
    torch.testing.assert_close(out.float(), rotated(odd, *full, groups), rtol=2**-7, atol=1e-6)


def test_power_of_two_scale_is_exact_on_powers(device):
    """amax = 448 * 2**k must give 2**k, not 2**(k+1) (log2-based code gets some of these wrong), one ulp more the
    next."""
    exponents = torch.arange(-8, 8, device=device)
    rows = 448 * torch.exp2(exponents.float())
    rows = torch.stack([rows, torch.nextafter(rows, rows * 2)], 0).flatten()
    o = rows[:, None, None].expand(-1, 1, 128).contiguous()
    cos, sin = torch.ones(o.shape[0], 32, device=device), torch.zeros(o.shape[0], 32, device=device)
    _, scales = rope_quant.inverse_rope_quant(o, cos, sin, 1, 128, "ue8m0")
    expected = torch.cat([torch.exp2(exponents.float()), torch.exp2(exponents.float() + 1)])
    assert torch.equal(scales[0, 0, : o.shape[0]], expected)


def test_codes_saturate_at_infinity(device):
    o = torch.ones(1, 1, 128, device=device)
    o[0, 0, 3] = -float("inf")
    cos, sin = torch.ones(1, 32, device=device), torch.zeros(1, 32, device=device)
    codes, _ = rope_quant.inverse_rope_quant(o, cos, sin, 1, 128, "ue8m0")
    assert codes.float()[0, 0, 3] == -448 and (codes.float()[0, 0, :3] == 0).all()


def test_no_tokens(device):
    o = torch.empty(0, 4, 512, device=device).bfloat16()
    table = torch.empty(0, 32, device=device)
    codes, scales = rope_quant.inverse_rope_quant(o, table, table, 2, 128, "ue8m0", 1e-12, True)
    assert codes.shape == (2, 0, 1024) and scales.shape == (2, 2, 0)
    assert rope_quant.inverse_rope(o, table, table, 2).shape == (2, 0, 1024)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 63, 257])
@pytest.mark.parametrize("tile", [(1, 4, 512), (2, 1, 512), (4, 2, 512), (8, 4, 512), (8, 1, 128), (16, 8, 256)])
def test_every_tile_gives_the_same(device, tokens, tile):
    o = torch.randn(tokens, 128, 512, device=device).bfloat16()
    cos, sin = tables(tokens, 32, device)
    codes, scales = rope_quant.inverse_rope_quant(o, cos, sin, 16, tile=tile)
    expected_codes, expected_scales = rope_quant.inverse_rope_quant(o, cos, sin, 16, tile=(1, 1, 512))
    assert torch.equal(codes.view(torch.uint8), expected_codes.view(torch.uint8))
    assert torch.equal(scales, expected_scales)
