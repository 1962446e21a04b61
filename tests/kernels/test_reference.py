# SPDX-License-Identifier: Apache-2.0
"""The ops (the reference on CPU, the kernels on a GPU) against float64 formulas written token by token."""

import pytest
import torch
from fusion_pass.kernels import reference
from op_cases import (
    DEVICES,
    Maker,
    dense_formula,
    gathered_formula,
    merge_formula,
    relative_error,
    rope_formula,
)

ops = torch.ops.fusion_pass
SCALE = 0.11
# Relative norm error against float64: a few roundings of the output dtype.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)


def dtypes(device):
    return [d for d in TOLERANCE if d != torch.float64 or device.type == "cpu"]


def close(got, want, dtype):
    assert got.dtype == dtype
    assert torch.isfinite(got).all()
    # A GPU's exp2 is approximate and its fp32 products are summed in another order.
    slack = 5 if got.is_cuda and dtype == torch.float32 else 1
    assert relative_error(got, want) < TOLERANCE[dtype] * slack


@pytest.mark.parametrize("mask", ["none", "bool", "float", "min"])
@pytest.mark.parametrize("causal,window", [(False, 0), (True, 0), (True, 4), (False, 4)])
@pytest.mark.parametrize("sink", [True, False])
def test_attention(device, mask, causal, window, sink):
    for dtype in dtypes(device):
        args = Maker(device, dtype).dense(mask=mask, sink=sink)
        got = ops.attention(*args, SCALE, causal, window)
        close(got, dense_formula(*args, SCALE, causal, window), dtype)


@pytest.mark.parametrize("queries,keys", [(1, 7), (3, 3), (5, 2), (127, 65)])
def test_attention_ragged_causal(device, queries, keys):
    """More queries than keys: the first queries see nothing and give zeros."""
    args = Maker(device).dense(batch=1, queries=queries, keys=keys, heads=3, sink=False)
    got = ops.attention(*args, SCALE, True, 0)
    close(got, dense_formula(*args, SCALE, True, 0), torch.float32)
    blind = max(0, queries - keys)
    assert (got[:, :blind] == 0).all()


def test_attention_all_masked(device):
    q, kv, _, sink = Maker(device).dense()
    nothing = torch.zeros(1, q.shape[1], kv.shape[1], dtype=torch.bool, device=device)
    for mask in (nothing, torch.where(nothing, 0.0, float("-inf"))):
        for s in (sink, None):
            assert (ops.attention(q, kv, mask, s, SCALE) == 0).all()
    assert (ops.attention(q, kv[:, :0], None, sink, SCALE) == 0).all()


def test_attention_nan_keys(device):
    """A NaN row reaches exactly the queries that attend it."""
    q, kv, mask, sink = Maker(device).dense(mask="bool")
    mask[..., 3] = False
    mask[:, 2, 3] = True
    want = ops.attention(q, kv, mask, sink, SCALE)
    kv[:, 3] = float("nan")
    got = ops.attention(q, kv, mask, sink, SCALE)
    rest = [0, 1, 3, 4]
    assert torch.equal(got[:, rest], want[:, rest])
    assert got[:, 2].isnan().all()


def test_attention_chunks(monkeypatch):
    """The chunked evaluation of long prefills gives the result of one chunk."""
    args = Maker().dense(queries=37, keys=37, mask="float")
    want = ops.attention(*args, SCALE, True, 9)
    monkeypatch.setattr(reference.softmax, "CHUNK_BYTES", 4 * 37 * 4 * 5)
    torch.testing.assert_close(ops.attention(*args, SCALE, True, 9), want)


@pytest.mark.parametrize("shared", [True, False])
def test_attention_rope(device, shared):
    for dtype in dtypes(device):
        m = Maker(device, dtype)
        args = m.dense(mask="float")
        cos, sin = m.rope(1 if shared else 2, 5)
        got = ops.attention_rope(*args, cos, sin, SCALE, 2)
        o = dense_formula(*args, SCALE).flatten(0, 1)
        spread = [t.expand(2, -1, -1).flatten(0, 1) for t in (cos, sin)]
        close(got, rope_formula(o, *spread, 2), dtype)
        assert got.is_contiguous()


@pytest.mark.parametrize("pools", ["one", "lengths", "two"])
@pytest.mark.parametrize("tokens", [1, 3, 5, 127])
def test_gathered(device, pools, tokens):
    for dtype in dtypes(device):
        m = Maker(device, dtype)
        args = m.gathered(tokens=tokens)
        second = m.second_pool(tokens=tokens)
        extra = {"one": (), "lengths": second[:1], "two": second}[pools]
        o = gathered_formula(*args, SCALE, *extra)
        close(ops.attention_gathered(*args, SCALE, *extra), o, dtype)
        cos, sin = m.rope(tokens)
        got = ops.attention_gathered_rope(*args, cos, sin, SCALE, 2, *extra)
        close(got, rope_formula(o, cos, sin, 2), dtype)


def test_gathered_out_of_range_and_nan(device):
    """Indices past the pool are masked like -1; NaN in unused rows stays unseen."""
    q, kv, indices, sink = Maker(device).gathered()
    used = torch.zeros(len(kv), dtype=torch.bool, device=device)
    used[indices[indices >= 0].long()] = True
    used[0] = False
    indices[indices == 0] = -1
    want = ops.attention_gathered(q, kv, indices, sink, SCALE)
    kv[~used] = float("nan")
    wild = torch.where(indices < 0, torch.tensor(2**31 - 1, device=device, dtype=torch.int32), indices)
    for idx in (indices, wild, torch.where(indices < 0, -(2**40), indices.long())):
        assert torch.equal(ops.attention_gathered(q, kv, idx, sink, SCALE), want)


def test_gathered_all_masked(device):
    q, kv, indices, sink = Maker(device).gathered()
    nothing = torch.full_like(indices, -1)
    cos, sin = Maker(device).rope(5)
    for s in (sink, None):
        assert (ops.attention_gathered(q, kv, nothing, s, SCALE) == 0).all()
        codes, scales = ops.attention_gathered_rope_quant(q, kv, nothing, s, cos, sin, SCALE, 2)
        assert (codes.float() == 0).all() and torch.isfinite(scales).all() and (scales[..., :5] > 0).all()
    zero = torch.zeros(5, dtype=torch.int64, device=device)
    assert (ops.attention_gathered(q, kv, indices, None, SCALE, zero) == 0).all()
    assert (ops.attention_gathered(q, kv[:0], indices, None, SCALE) == 0).all()


@pytest.mark.parametrize("splits", [1, 2, 3, 7])
def test_partials_then_merge(device, splits):
    m = Maker(device)
    q, kv, indices, sink = m.gathered(tokens=3, columns=200)
    pools = m.second_pool(tokens=3, columns=70)
    pools[0].fill_(130)  # the splits beyond column 130 of the first pool are empty
    partials, lse = ops.attention_partials(q, kv, indices, SCALE, splits, *pools)
    assert partials.shape == (splits, 3, 4, 128) and not partials.isnan().any()
    merged, _ = ops.merge_partials(partials, lse, None, sink)
    close(merged, gathered_formula(q, kv, indices, sink, SCALE, *pools), torch.float32)
    empty = lse == float("-inf")
    assert (partials[empty] == 0).all()


@pytest.mark.parametrize("splits", [1, 2, 5, 18])
def test_merge(device, splits):
    m = Maker(device)
    partials, lse = m.partials(splits)
    sink = m.normal(4)
    for s in (sink, None):
        got, stats = ops.merge_partials(partials, lse, None, s)
        close(got, merge_formula(partials, lse, s), torch.float32)
        assert stats.shape == (0,)
    got, stats = ops.merge_partials(partials, lse, None, sink, return_stats=True)
    total = torch.cat((lse.double(), sink.double().expand(1, 3, 4))).logsumexp(0)
    torch.testing.assert_close(stats[..., 0].double() + stats[..., 1].double().log(), total, rtol=1e-5, atol=1e-5)
    cos, sin = m.rope(3)
    rotated = ops.merge_partials_rope(partials, lse, None, sink, cos, sin, 2)
    close(rotated, rope_formula(merge_formula(partials, lse, sink), cos, sin, 2), torch.float32)


@pytest.mark.parametrize("stat_scale", [1.0, 0.6931471805599453, 0.044])
def test_merge_unnormalised(device, stat_scale):
    """(max, sum) form: the same partials as rows times sum, with the maximum in scaled units."""
    m = Maker(device)
    normalised, lse = m.partials(6)
    total = torch.rand(lse.shape, device=device, generator=m.generator) + 0.5
    top = (lse - total.log()) / stat_scale
    sink = m.normal(4)
    got, stats = ops.merge_partials(normalised * total.unsqueeze(-1), top, total, sink, stat_scale, return_stats=True)
    close(got, merge_formula(normalised, lse, sink), torch.float32)
    want = torch.cat((lse.double(), sink.double().expand(1, 3, 4))).logsumexp(0)
    back = stats[..., 0].double() * stat_scale + stats[..., 1].double().log()
    torch.testing.assert_close(back, want, rtol=1e-5, atol=1e-5)


def test_merge_nothing(device):
    partials, lse = Maker(device).partials(3)
    lse.fill_(float("-inf"))
    got, stats = ops.merge_partials(partials, lse, None, None, return_stats=True)
    assert (got == 0).all() and (stats[..., 1] == 0).all() and (stats[..., 0] == float("-inf")).all()


def exact_power_of_two(x: float) -> float:
    """Smallest power of two >= x, by integers."""
    mantissa, exponent = torch.frexp(torch.tensor(x, dtype=torch.float64))
    return 2.0 ** (exponent.item() - (1 if mantissa.item() == 0.5 else 0))


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("rule", ["fp32", "ue8m0"])
@pytest.mark.parametrize("tokens", [1, 3, 5, 127])
def test_quantisation(device, block, rule, tokens):
    m = Maker(device)
    o, (cos, sin) = m.normal(tokens, 4, 128, std=3.0), m.rope(tokens)
    o[0, 0] = 0
    codes, scales = ops.inverse_rope_quant(o, cos, sin, 2, block, rule, 1e-10)
    columns = (tokens + 3) // 4 * 4
    assert codes.shape == (2, tokens, 256) and codes.dtype == torch.float8_e4m3fn and codes.is_contiguous()
    assert scales.shape == (2, 256 // block, columns) and scales.dtype == torch.float32 and scales.is_contiguous()
    assert (scales[..., tokens:] == 0).all()
    x = ops.inverse_rope(o, cos, sin, 2).unflatten(-1, (-1, block))
    want = x.abs().amax(-1).clamp(min=1e-10) / 448
    if rule == "ue8m0":
        want = torch.tensor([exact_power_of_two(v) for v in want.flatten().tolist()], device=device).view(want.shape)
        assert torch.equal(scales[..., :tokens].transpose(1, 2), want.float())
    else:
        torch.testing.assert_close(scales[..., :tokens].transpose(1, 2), want, rtol=1e-6, atol=0)
    back = reference.dequantise(codes, scales, block).unflatten(-1, (-1, block))
    step = torch.maximum(x.abs() / 16, scales[..., :tokens].transpose(1, 2).unsqueeze(-1) * 2.0**-10)
    assert ((back - x).abs() <= step * 1.001).all()


@pytest.mark.parametrize("tokens", [1, 4, 6])
def test_packed_scales(device, tokens):
    """Packed exponents hold the same scales, four per word, the lowest block in the low byte."""
    m = Maker(device)
    o, (cos, sin) = m.normal(tokens, 4, 128), m.rope(tokens)
    codes, scales = ops.inverse_rope_quant(o, cos, sin, 2, 32, "ue8m0")
    packed_codes, words = ops.inverse_rope_quant(o, cos, sin, 2, 32, "ue8m0", pack_scales=True)
    assert torch.equal(codes.view(torch.uint8), packed_codes.view(torch.uint8))
    assert words.dtype == torch.int32 and words.shape == (2, 2, (tokens + 3) // 4 * 4)
    assert (words[..., tokens:] == 0).all()
    for b in range(8):
        exponent = (words[:, b // 4] >> (8 * (b % 4))) & 0xFF
        assert torch.equal(torch.exp2(exponent[:, :tokens].float() - 127), scales[:, b, :tokens])


def test_ue8m0_exact_powers(device):
    """amax = 448 * 2^k gives exactly 2^k, the next float above gives 2^(k+1)."""
    k = torch.arange(-20, 20, device=device)
    exact = (448 * torch.exp2(k.double())).float()
    above = torch.nextafter(exact, torch.tensor(float("inf"), device=device))
    cos, sin = torch.ones(len(k), 32, device=device), torch.zeros(len(k), 32, device=device)
    for amax, power in ((exact, k), (above, k + 1)):
        o = torch.zeros(len(k), 1, 128, device=device)
        o[:, 0, 5] = amax
        _, scales = ops.inverse_rope_quant(o, cos, sin, 1, 128, "ue8m0")
        assert torch.equal(scales[0, 0, : len(k)], torch.exp2(power.double()).float())


@pytest.mark.parametrize("block,weight_block,packed,stored", [
    (128, 128, False, "fp32"), (128, 128, True, "e8m0"), (32, 32, True, "uint8"), (128, 32, False, "e8m0"),
    (32, 128, False, "fp32"),
])  # fmt: skip
@pytest.mark.parametrize("tokens,rows", [(1, 128), (5, 192), (127, 130)])
def test_bgemm(device, block, weight_block, packed, stored, tokens, rows):
    args = Maker(device).bgemm(2, tokens, rows, 512, block, weight_block, packed, stored)
    codes, scales, weight, factors = args
    x = reference.dequantise(codes, scales, block, torch.float64)
    value = factors if stored == "fp32" else torch.exp2(factors.view(torch.uint8).double() - 127)
    want = torch.empty(tokens, 2, rows, dtype=torch.float64, device=device)
    for r in range(rows):
        row = weight[:, r].double().unflatten(-1, (-1, weight_block)) * value[:, r // weight_block].double().unsqueeze(
            -1
        )
        want[:, :, r] = torch.einsum("gtk,gk->tg", x, row.flatten(-2))
    for dtype in (torch.bfloat16, torch.float32):
        got = ops.fp8_bgemm(*args, block, weight_block, dtype)
        assert got.shape == (tokens, 2, rows) and got.is_contiguous()
        # E4M3 tensor cores add the products of one step with fewer bits than fp32.
        allowed = 3e-4 if got.is_cuda and dtype == torch.float32 else TOLERANCE[dtype]
        assert got.dtype == dtype and relative_error(got, want) < allowed


def test_quantised_variants_agree(device):
    """All producers of codes equal the standalone epilogue on the unrounded result (fp32 in, so no rounding)."""
    m = Maker(device)
    args, gathered = m.dense(batch=1), m.gathered()
    cos, sin = m.rope(5)
    o = ops.attention(*args, SCALE)
    pairs = [(ops.attention_rope_quant(*args, cos[None], sin[None], SCALE, 2), o[0])]
    o = ops.attention_gathered(*gathered, SCALE)
    pairs.append((ops.attention_gathered_rope_quant(*gathered, cos, sin, SCALE, 2), o))
    partials, lse = m.partials(4, tokens=5)
    merged, _ = ops.merge_partials(partials, lse, None, gathered[3])
    pairs.append((ops.merge_partials_rope_quant(partials, lse, None, gathered[3], cos, sin, 2), merged))
    for (codes, scales), rows in pairs:
        want_codes, want_scales = ops.inverse_rope_quant(rows, cos, sin, 2)
        torch.testing.assert_close(scales, want_scales, rtol=1e-5, atol=0)
        differing = (codes.float() != want_codes.float()).float().mean().item()
        assert differing <= (0.0 if device.type == "cpu" else 0.01)
