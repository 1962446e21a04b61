"""Engine ops in graphs: every row of the table, as the engines call it."""

import engine_ops
import pytest
import torch
import torch.nn.functional as F
from fusion_pass.patterns import opaque_engines as engines
from fusion_pass.patterns.written_out import NotExpanded
from o_path import HALF, HEAD_DIM, NOPE, ROPE, Path, assert_close, roles, run

TAIL = ("inverse_rope", "fp8_quant", "bgemm")


def vllm_path(p: Path, o_of, packed: bool = False, weight=None, scales=None):
    inner = p.width // 512 if packed else p.width // 128
    weight = p.weight if weight is None else weight
    scales = p.weight_scales if scales is None else scales

    def fn(hidden, positions, cache, weight, scales, wo_b):
        o = o_of(hidden, positions)
        tokens = o.shape[0]
        codes, factors = torch.ops.vllm.fused_inv_rope_fp8_quant_kernel(
            o, positions, cache, p.heads // p.groups, 128, 4, NOPE, HALF, packed, 448.0, (tokens + 3) // 4 * 4, tokens,
            p.groups, p.width, inner, True)
        z = torch.empty(tokens, p.groups, p.rows, dtype=torch.bfloat16)
        torch.ops.vllm.deepseek_v4_fp8_einsum(codes.transpose(0, 1), factors.transpose(0, 1), weight, scales, z,
                                              "bhr,hdr->bhd", [1, 128, 128])
        return F.linear(z.flatten(1), wo_b)

    return fn, (p.hidden, p.positions, p.cache, weight, scales, p.wo_b)


def padded_attention(p: Path, pad: int = 8):
    def attention(hidden, positions):
        out = torch.empty(hidden.shape[0], p.heads + pad, HEAD_DIM, dtype=torch.bfloat16)
        torch.ops.vllm.deepseek_v4_attention(hidden, positions, out, "layers.0")
        return out[:, :p.heads]
    return attention


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("packed", [False, True], ids=["fp32", "packed"])
def test_vllm_tail_behind_opaque_attention(version, packed):
    engine_ops.vllm()
    p = Path()
    fn, args = vllm_path(p, padded_attention(p), packed)
    with torch._inductor.config.patch(enable_auto_functionalized_v2=version == 2):
        got = run(fn, *args)
    assert roles(got) == [TAIL], got.report
    chain, = got.report.fused
    assert (chain.quant, chain.group) == ("ue8m0", 128)
    assert chain.op == "fusion_pass.inverse_rope_quant + fusion_pass.fp8_bgemm"
    assert not any("fused_inv_rope" in op or "fp8_einsum" in op for op in got.ops)
    assert any("deepseek_v4_attention" in op for op in got.ops), "the attention stays as it was"
    assert not any("convert_element_type" in op or "_to_copy" in op for op in got.ops), "the op rounds by itself"
    assert_close(got.out, fn(*args))


def test_vllm_two_dimensional_e8m0_weight():
    engine_ops.vllm()
    p = Path()
    exponents = torch.randint(118, 123, p.weight_scales.shape, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    fn, args = vllm_path(p, padded_attention(p), False, p.weight.flatten(0, 1), exponents.flatten(0, 1))
    got = run(fn, *args)
    assert roles(got) == [TAIL], got.report
    assert_close(got.out, fn(*args))


def test_vllm_dynamic_tokens():
    engine_ops.vllm()
    p = Path(tokens=6)
    fn, args = vllm_path(p, padded_attention(p))
    for tensor in args[:2]:
        torch._dynamo.mark_dynamic(tensor, 0)
    got = run(fn, *args)
    assert roles(got) == [TAIL], got.report
    assert_close(got.out, fn(*args))


@pytest.mark.parametrize("disable", ["vllm::deepseek_v4_fp8_einsum", "fused_inv_rope_fp8_quant_kernel", "bgemm"])
def test_vllm_disabled_rule_leaves_the_graph(disable):
    engine_ops.vllm()
    p = Path()
    fn, args = vllm_path(p, padded_attention(p))
    plain = run(fn, *args, disable=True)
    got = run(fn, *args, disable_rules=(disable,))
    assert not got.report.fused
    assert got.ops == plain.ops
    assert torch.equal(got.out, plain.out)


def test_vllm_codes_read_elsewhere_are_not_fused():
    engine_ops.vllm()
    p = Path()
    inner, args = vllm_path(p, padded_attention(p))

    def fn(*args):
        o = padded_attention(p)(args[0], args[1])
        codes, factors = torch.ops.vllm.fused_inv_rope_fp8_quant_kernel(
            o, args[1], args[2], p.heads // p.groups, 128, 4, NOPE, HALF, False, 448.0, 8, 5, p.groups, p.width,
            p.width // 128, True)
        z = torch.empty(5, p.groups, p.rows, dtype=torch.bfloat16)
        torch.ops.vllm.deepseek_v4_fp8_einsum(codes.transpose(0, 1), factors.transpose(0, 1), args[3], args[4], z,
                                              "bhr,hdr->bhd", [1, 128, 128])
        return F.linear(z.flatten(1), args[5]), codes.float() + 1

    plain = run(fn, *args, disable=True)
    got = run(fn, *args)
    assert not got.report.fused
    assert got.ops == plain.ops
    assert any("escapes the chain" in miss.reason for miss in got.report.near_misses), got.report


@pytest.mark.parametrize("recipe, equation", [([1, 1, 128], "bhr,hdr->bhd"), ([1, 128, 128], "bhr,hrd->bhd")])
def test_vllm_other_einsums_stay(recipe, equation):
    engine_ops.vllm()
    p = Path()
    attention = padded_attention(p)

    def fn(hidden, positions, cache, weight, scales):
        codes, factors = torch.ops.vllm.fused_inv_rope_fp8_quant_kernel(
            attention(hidden, positions), positions, cache, p.heads // p.groups, 128, 4, NOPE, HALF, False, 448.0, 8, 5,
            p.groups, p.width, p.width // 128, True)
        z = torch.empty(5, p.groups, p.rows, dtype=torch.bfloat16)
        torch.ops.vllm.deepseek_v4_fp8_einsum(codes.transpose(0, 1), factors.transpose(0, 1), weight, scales, z,
                                              equation, recipe)
        return z

    args = (p.hidden, p.positions, p.cache, p.weight, p.weight_scales)
    plain = run(fn, *args, disable=True)
    got = run(fn, *args)
    assert not got.report.fused and got.ops == plain.ops
    assert any("left as it was" in note and "einsum" in note for note in got.report.notes)


def trt_path(p: Path, is_neox: bool = False):
    def fn(o, positions, cache, weight, scales, wo_b):
        codes, factors = torch.ops.trtllm.fused_inv_rope_fp8_quant_vllm_port(
            o, positions, cache, p.groups, p.heads // p.groups, NOPE, ROPE, 128, is_neox)
        o_lora = torch.empty(o.shape[0], p.groups, p.rows, dtype=torch.bfloat16)
        torch.ops.trtllm.cute_dsl_fp8_bmm_blackwell(codes, weight, factors, scales, o_lora.transpose(0, 1))
        return F.linear(o_lora.flatten(1), wo_b)

    return fn, (p.o * 1, p.positions, p.cache, p.weight, p.weight_scales, p.wo_b)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("tokens", [1, 5, 8])
def test_trtllm_standalone_tail(version, tokens):
    engine_ops.trtllm()
    p = Path(tokens=tokens)
    fn, args = trt_path(p)
    with torch._inductor.config.patch(enable_auto_functionalized_v2=version == 2):
        got = run(fn, *args)
    assert roles(got) == [TAIL], got.report
    chain, = got.report.fused
    assert (chain.quant, chain.group) == ("fp32", 128)
    assert not any("trtllm" in op for op in got.ops)
    assert_close(got.out, fn(*args))


def test_trtllm_neox_halves_stay():
    engine_ops.trtllm()
    fn, args = trt_path(Path(), is_neox=True)
    plain = run(fn, *args, disable=True)
    got = run(fn, *args)
    assert not got.report.fused and got.ops == plain.ops
    assert any("is_neox" in note for note in got.report.notes)


def mla_rope_path(p: Path, inverse: bool = True, is_neox: bool = False, flat: bool = True):
    weight = torch.randn(p.groups, p.rows, p.width, generator=torch.Generator().manual_seed(3)).bfloat16() * 0.02

    def fn(o, positions, cache, weight):
        latent = o * 1.5
        latent = latent.view(o.shape[0], -1) if flat else latent
        torch.ops.trtllm.mla_rope_inplace(latent, positions, cache, p.heads, NOPE, ROPE, inverse, is_neox)
        x = latent.view(o.shape[0], p.groups, -1)
        return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)

    return fn, (p.o, p.positions, p.cache, weight)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("flat", [True, False])
def test_trtllm_in_place_rope(version, flat):
    engine_ops.trtllm()
    fn, args = mla_rope_path(Path(), flat=flat)
    with torch._inductor.config.patch(enable_auto_functionalized_v2=version == 2):
        got = run(fn, *args)
    assert roles(got) == [("inverse_rope", "bgemm")], got.report
    assert not any("mla_rope" in op for op in got.ops)
    assert_close(got.out, fn(*args))


@pytest.mark.parametrize("inverse, is_neox", [(False, False), (True, True)])
def test_trtllm_other_rotations_stay(inverse, is_neox):
    engine_ops.trtllm()
    fn, args = mla_rope_path(Path(), inverse, is_neox)
    plain = run(fn, *args, disable=True)
    got = run(fn, *args)
    assert not got.report.fused and got.ops == plain.ops
    assert torch.equal(got.out, plain.out)


def test_sglang_quantisation():
    engine_ops.sglang()
    p = Path()

    def fn(o, positions, weight):
        x = p.rotated(o).view(o.shape[0], p.groups, -1)
        tokens = o.shape[0]
        codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
        words = torch.empty(p.groups, p.width // 512, (tokens + 3) // 4 * 4, dtype=torch.int32)
        torch.ops.sglang.fp8_wo_a_group_major_quant_ue8m0(x, codes, words)
        exponents = torch.stack([(words >> shift) & 255 for shift in (0, 8, 16, 24)], 2).flatten(1, 2)
        factors = (exponents << 23).view(torch.float32)[..., :tokens].permute(2, 0, 1)
        values = codes.float().unflatten(-1, (-1, 128)) * factors.unsqueeze(-1)
        return torch.einsum("tgk,grk->tgr", values.flatten(-2), weight)

    weight = torch.randn(p.groups, p.rows, p.width, generator=torch.Generator().manual_seed(3)) * 0.02
    got = run(fn, p.o, p.positions, weight)
    assert roles(got) == [TAIL], got.report
    assert got.report.fused[0].quant == "ue8m0"
    assert not any("sglang" in op for op in got.ops)
    assert_close(got.out, fn(p.o, p.positions, weight))


def test_vllm_einsum_behind_a_quantisation_in_torch():
    """The op for the product alone, everything before it in ordinary torch with raw scales."""
    engine_ops.vllm()
    p = Path()
    attention = padded_attention(p)

    def fn(hidden, positions, cache, weight, scales):
        o = p.rotated(attention(hidden, positions)).view(5, p.groups, -1).transpose(0, 1)
        blocks = o.float().unflatten(-1, (-1, 128))
        factors = blocks.abs().amax(-1).clamp(min=1e-10) / 448
        codes = (blocks / factors.unsqueeze(-1)).clamp(-448, 448).to(torch.float8_e4m3fn).flatten(-2)
        z = torch.empty(5, p.groups, p.rows, dtype=torch.bfloat16)
        torch.ops.vllm.deepseek_v4_fp8_einsum(codes.transpose(0, 1), factors.transpose(0, 1), weight, scales, z,
                                              "bhr,hdr->bhd", [1, 128, 128])
        return z

    args = (p.hidden, p.positions, p.cache, p.weight, p.weight_scales)
    got = run(fn, *args)
    assert roles(got) == [TAIL], got.report
    assert not any("fp8_einsum" in op for op in got.ops)
    assert_close(got.out, fn(*args))


@pytest.mark.parametrize("wrong", [False, True])
def test_vllm_validated_against_the_written_out_form(wrong):
    engine_ops.vllm()
    p = Path()
    fn, args = vllm_path(p, padded_attention(p))
    if wrong:
        from fusion_pass.kernels.ops.registry import SPECS
        right = SPECS["fp8_bgemm"].reference
        object.__setattr__(SPECS["fp8_bgemm"], "reference", lambda *a: right(*a) * 1.5)
    try:
        got = run(fn, *args, verify="first")
    finally:
        if wrong:
            object.__setattr__(SPECS["fp8_bgemm"], "reference", right)
    assert_close(got.out, fn(*args))
    if wrong:
        assert not got.report.fused and "validation" in got.report.near_misses[0].reason, got.report
    else:
        assert roles(got) == [TAIL], got.report


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("more", [(64,), (NOPE, True), (NOPE, True, False)], ids=["0.22", "0.25", "0.33"])
def test_vllm_signatures_of_the_releases(more, packed):
    """15, 16 and 17 arguments; the first release passes where the rotation starts inside its block."""
    p = Path()
    start, *flags = more
    arguments = (p.o, p.positions, p.cache, p.heads // p.groups, 128, 4, start, HALF, packed, 448.0, 8, 5, p.groups,
                 p.width, p.width // (512 if packed else 128), *flags)
    codes, scales = engines.vllm_fused_inv_rope_fp8_quant(*arguments)
    want_codes, want_scales = engine_ops._vllm_rope_quant(*arguments)
    assert torch.equal(codes.view(torch.uint8), want_codes.view(torch.uint8))
    assert torch.equal(scales, want_scales)


def test_vllm_signature_without_quantisation():
    p = Path()
    arguments = [p.o, p.positions, p.cache, p.heads // p.groups, 128, 4, NOPE, HALF, False, 448.0, 8, 5, p.groups,
                 p.width, 16, False]
    rotated, none = engines.vllm_fused_inv_rope_fp8_quant(*arguments)
    assert torch.equal(rotated, p.rotated(p.o).view(5, p.groups, -1).transpose(0, 1)) and none.numel() == 0
    with pytest.raises(NotExpanded, match="permuted_output"):
        engines.vllm_fused_inv_rope_fp8_quant(*arguments[:-1], True, True)
    arguments[6] = 0
    with pytest.raises(NotExpanded, match="rotated channels"):
        engines.vllm_fused_inv_rope_fp8_quant(*arguments)
