"""Library ops in graphs: transformers' grouped FP8 product, sparse attention, FlashInfer's merges."""

import engine_ops
import pytest
import torch
import torch.nn.functional as F
from fusion_pass.kernels import reference
from o_path import HALF, HEAD_DIM, Path, assert_close, roles, run

TAIL = ("inverse_rope", "fp8_quant", "bgemm")


def grouped_path(p: Path, op, lengths=None):
    """transformers' FP8GroupedLinear.forward behind its inverse rotation."""
    def fn(o, cos, sin, weight, scales, wo_b):
        even, odd = o[..., -64::2].float(), o[..., -63::2].float()
        c, s = cos.unsqueeze(1), -sin.unsqueeze(1)
        turned = torch.stack((even * c - odd * s, odd * c + even * s), -1).flatten(-2).to(o.dtype)
        x = torch.cat((o[..., :-64], turned), -1).reshape(o.shape[0], p.groups, -1)
        x = x.movedim(-2, 0).reshape(-1, p.width)
        tokens = x.size(0) // p.groups
        per_expert = torch.full((p.groups,), tokens, dtype=torch.int32)
        offsets = torch.arange(1, p.groups + 1, dtype=torch.int32) * tokens
        if lengths is not None:
            offsets = torch.tensor([lengths, x.size(0)], dtype=torch.int32)
        y = op(x, weight, scales, offsets, per_expert, [128, 128])
        return F.linear(y.reshape(p.groups, o.shape[0], -1).movedim(0, -2).flatten(1), wo_b)

    tables = p.cache[p.positions]
    return fn, (p.o, tables[:, :HALF], tables[:, HALF:], p.weight, p.weight_scales, p.wo_b)


def test_finegrained_fp8_with_its_attention():
    """What a layer of transformers' FP8 model computes: the whole chain is one attention and one product."""
    engine_ops.finegrained()
    p = Path()
    tail, (_, cos, sin, weight, scales, wo_b) = grouped_path(p, torch.ops.finegrained_fp8.matmul_grouped)
    gen = torch.Generator().manual_seed(8)
    q = torch.randn(1, p.heads, p.tokens, HEAD_DIM, generator=gen).bfloat16()
    kv = torch.randn(1, 1, 12, HEAD_DIM, generator=gen).bfloat16()
    mask = torch.zeros(1, 1, p.tokens, 12).masked_fill(torch.rand(1, 1, p.tokens, 12, generator=gen) < 0.3,
                                                       float("-inf")).bfloat16()
    sinks = torch.randn(p.heads, generator=gen)

    def fn(q, kv, mask, sinks, cos, sin, weight, scales, wo_b):
        keys = kv.expand(-1, p.heads, -1, -1)
        logits = torch.matmul(q, keys.transpose(2, 3)) * HEAD_DIM ** -0.5 + mask
        logits = torch.cat((logits, sinks.reshape(1, -1, 1, 1).expand(1, -1, q.shape[2], -1)), -1)
        probabilities = torch.softmax(logits - logits.max(-1, keepdim=True).values, -1, dtype=torch.float32)
        o = torch.matmul(probabilities[..., :-1].to(q.dtype), keys).transpose(1, 2).contiguous()
        return tail(o[0], cos, sin, weight, scales, wo_b)

    args = (q, kv, mask, sinks, cos, sin, weight, scales, wo_b)
    got = run(fn, *args)
    assert roles(got) == [("fmha", *TAIL)], got.report
    assert got.report.fused[0].op == "fusion_pass.attention_rope_quant + fusion_pass.fp8_bgemm"
    assert not any("softmax" in op or "finegrained" in op for op in got.ops)
    assert_close(got.out, fn(*args))


@pytest.mark.parametrize("name", ["matmul_grouped", "w8a8_block_fp8_matmul_grouped"])
@pytest.mark.parametrize("e8m0", [False, True])
def test_finegrained_fp8(name, e8m0):
    engine_ops.finegrained(name)
    p = Path()
    if e8m0:
        p.weight_scales = torch.randint(118, 123, p.weight_scales.shape, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    fn, args = grouped_path(p, getattr(torch.ops.finegrained_fp8, name))
    got = run(fn, *args)
    assert roles(got) == [TAIL], got.report
    chain, = got.report.fused
    assert (chain.quant, chain.group) == ("fp32", 128)
    assert not any("finegrained" in op for op in got.ops)
    assert_close(got.out, fn(*args))


def test_finegrained_fp8_dynamic():
    engine_ops.finegrained()
    p = Path(tokens=6)
    fn, args = grouped_path(p, torch.ops.finegrained_fp8.matmul_grouped)
    for tensor in args[:3]:
        torch._dynamo.mark_dynamic(tensor, 0)
    got = run(fn, *args)
    assert roles(got) == [TAIL], got.report
    assert_close(got.out, fn(*args))


def test_finegrained_fp8_unequal_groups_stay():
    engine_ops.finegrained()
    p = Path()
    fn, args = grouped_path(p, torch.ops.finegrained_fp8.matmul_grouped, lengths=3)
    plain = run(fn, *args, disable=True)
    got = run(fn, *args)
    assert not got.report.fused and got.ops == plain.ops
    assert torch.equal(got.out, plain.out)


def test_finegrained_fp8_in_an_expert_layer_stays():
    """The same op in a mixture of experts: no rotation before it, so nothing of the chain is there."""
    engine_ops.finegrained()
    p = Path()

    def fn(x, weight, scales):
        per_expert = torch.full((p.groups,), 5, dtype=torch.int32)
        offsets = torch.arange(1, p.groups + 1, dtype=torch.int32) * 5
        return torch.ops.finegrained_fp8.matmul_grouped(x, weight, scales, offsets, per_expert, [128, 128]) * 2

    args = (torch.randn(10, p.width).bfloat16(), p.weight, p.weight_scales)
    plain = run(fn, *args, disable=True)
    got = run(fn, *args)
    assert not got.report and got.ops == plain.ops


def sparse_path(p: Path, op, batch: int = 1):
    gen = torch.Generator().manual_seed(5)
    q = torch.randn(batch, p.tokens, p.heads, HEAD_DIM, generator=gen).bfloat16()
    kv = torch.randn(batch, 20, HEAD_DIM, generator=gen).bfloat16()
    sink = torch.randn(p.heads, generator=gen)
    picked = torch.stack([torch.randperm(20, generator=gen)[:9] for _ in range(batch * p.tokens)])
    picked = picked.view(batch, p.tokens, 9).masked_fill(torch.arange(9) > 6, -1).int()
    angles = torch.arange(p.tokens)[:, None] * 0.3 ** torch.linspace(0, 6, HALF)
    freqs = torch.polar(torch.ones_like(angles), angles)
    weight = torch.randn(p.groups, p.rows, p.width, generator=gen).bfloat16() * 0.02

    def fn(q, kv, sink, picked, freqs, weight):
        o = op(q, kv, sink, picked, HEAD_DIM ** -0.5)
        tail = torch.view_as_complex(o[..., -64:].float().unflatten(-1, (-1, 2))) * freqs.conj().view(1, -1, 1, HALF)
        o = torch.cat((o[..., :-64], torch.view_as_real(tail).flatten(-2).to(o.dtype)), -1)
        return torch.einsum("bsgd,grd->bsgr", o.view(*o.shape[:2], p.groups, -1), weight)

    return fn, (q, kv, sink, picked, freqs, weight)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ["someones_model.sparse_attn", "auto_deploy.torch_deepseek_v4_sparse_attention"])
def test_sparse_attention_whole_chain(name, batch):
    engine_ops.sparse_attention()
    namespace, op = name.split(".")
    fn, args = sparse_path(Path(), getattr(getattr(torch.ops, namespace), op), batch)
    got = run(fn, *args)
    assert roles(got) == [("fmha", "inverse_rope", "bgemm")], got.report
    assert not any("sparse_att" in o for o in got.ops)
    assert_close(got.out, fn(*args))


def test_sparse_attention_with_other_arguments_stays():
    """Only the name agrees: nothing is claimed about the op, the tail is fused behind it."""
    engine_ops.define("elsewhere::sparse_attn", "(Tensor q, Tensor k, Tensor sink, Tensor idx, float scale) -> Tensor",
                      engine_ops._sparse_attn, lambda q, *others: torch.empty_like(q))
    fn, args = sparse_path(Path(), torch.ops.elsewhere.sparse_attn)
    got = run(fn, *args)
    assert roles(got) == [("inverse_rope", "bgemm")], got.report
    assert "elsewhere.sparse_attn.default" in got.ops
    assert_close(got.out, fn(*args))


def test_sparse_attention_disabled_is_opaque():
    engine_ops.sparse_attention()
    fn, args = sparse_path(Path(), torch.ops.someones_model.sparse_attn)
    got = run(fn, *args, disable_rules=("sparse_attn",))
    assert roles(got) == [("inverse_rope", "bgemm")], got.report
    assert "someones_model.sparse_attn.default" in got.ops
    assert_close(got.out, fn(*args))


def auto_deploy_path(p: Path, ratio: int, batch: int = 1):
    """AutoDeploy's model, from the attention to the all-reduce."""
    ad = torch.ops.auto_deploy
    _, (q, kv, sink, picked, _, weight) = sparse_path(p, None, batch)
    angles = torch.randn(batch, p.tokens, HALF, generator=torch.Generator().manual_seed(4))
    empty, positions = torch.zeros(0), torch.arange(p.tokens).expand(batch, -1)

    def fn(q, kv, sink, picked, cos, sin, wo_a, wo_b):
        o = ad.torch_deepseek_v4_sparse_attention_v2(
            q, kv, sink, picked, empty, empty, empty, empty, empty, positions, HEAD_DIM ** -0.5, enable_sharding=True,
            layer_type="mla", window_size=128, compress_ratio=ratio)
        nope, pe = torch.split(o, [HEAD_DIM - 2 * HALF, 2 * HALF], -1)
        o = ad.deepseek_v4_fused_rope_concat(nope, pe, cos, sin, True)
        o = ad.view(o, [*o.shape[:2], p.groups, p.width], tp_scaled_dim=2, layer_type="mla")
        wo_a = ad.view(wo_a, [p.groups, p.rows, p.width], tp_scaled_dim=0, layer_type="mla", tp_min_local_shape=p.rows)
        y = ad.torch_grouped_linear(o, wo_a, None, tp_mode="colwise", layer_type="mla", tp_min_local_shape=p.rows)
        return ad.all_reduce(F.linear(y, wo_b), layer_type="mla")

    return fn, (q, kv, sink, picked, angles.cos(), angles.sin(), weight.flatten(0, 1), p.wo_b)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("ratio, wanted", [(0, ("fmha", "inverse_rope", "bgemm")), (4, ("inverse_rope", "bgemm"))])
def test_auto_deploy_output_path(ratio, wanted, batch):
    """The whole chain where all keys are handed over; behind an attention that compresses keys inside, the tail."""
    engine_ops.auto_deploy()
    fn, args = auto_deploy_path(Path(), ratio, batch)
    got = run(fn, *args)
    assert roles(got) == [wanted], got.report
    assert any("torch_deepseek_v4_sparse_attention_v2" in op for op in got.ops) == bool(ratio)
    assert not any("rope_concat" in op or "grouped_linear" in op for op in got.ops), got.ops
    assert "auto_deploy.all_reduce.default" in got.ops
    assert_close(got.out, fn(*args))


def merge_path(p: Path, states: bool):
    gen = torch.Generator().manual_seed(6)
    v = torch.randn(p.tokens, 2, p.heads, HEAD_DIM, generator=gen).bfloat16()
    s = torch.randn(p.tokens, 2, p.heads, generator=gen) * 2
    weight = torch.randn(p.groups, p.rows, p.width, generator=gen).bfloat16() * 0.02

    def fn(v, s, positions, cache, weight):
        if states:
            o, _ = torch.ops.flashinfer.merge_states(v, s)
        else:
            o, _ = torch.ops.flashinfer.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
        tables = cache[positions]
        o = reference.rotate_inverse(o.float(), tables[:, :HALF], tables[:, HALF:]).to(o.dtype)
        return torch.einsum("tgd,grd->tgr", o.view(o.shape[0], p.groups, -1), weight)

    return fn, (v, s, p.positions, p.cache, weight)


@pytest.mark.parametrize("states", [True, False])
def test_flashinfer_merges(states):
    """Merge and tail as one op."""
    engine_ops.flashinfer()
    fn, args = merge_path(Path(), states)
    got = run(fn, *args)
    assert roles(got) == [("kv_merge", "inverse_rope", "bgemm")], got.report
    assert got.report.fused[0].op == "fusion_pass.merge_partials_rope"
    assert not any("flashinfer" in op for op in got.ops)
    assert_close(got.out, fn(*args))
