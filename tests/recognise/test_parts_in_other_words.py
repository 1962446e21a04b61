"""Each part of the chain in words that the corpus does not use: rotation with a sign vector, as 2x2 matrices, by fused
multiply-add; scales from norms, extrema and frexp; projections over heads and channels; sinks in other places."""

import pytest
import torch
from torch.nn import functional as F

import fusion_pass

TOKENS, HEADS, DIM, GROUPS, RANK, KEYS, ROPE = 6, 8, 512, 2, 64, 24, 64


def inputs():
    g = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=g)

    angle = normal(TOKENS, ROPE // 2)
    return (normal(1, TOKENS, HEADS, DIM).bfloat16(), normal(1, KEYS, DIM).bfloat16(), normal(HEADS), angle.cos(),
            angle.sin(), (normal(GROUPS, RANK, HEADS * DIM // GROUPS) / 45).bfloat16())


def scores_of(q, kv):
    return torch.einsum("bshd,bnd->bhsn", q.float(), kv.float()) * DIM ** -0.5


def sink_column(q, kv, sink):
    column = sink.view(1, -1, 1, 1).expand(1, -1, TOKENS, 1)
    p = torch.cat([scores_of(q, kv), column], -1).softmax(-1)[..., :-1]
    return torch.einsum("bhsn,bnd->bshd", p, kv.float()).to(q.dtype)


def sink_by_sigmoid(q, kv, sink):
    scores = scores_of(q, kv)
    lse = scores.logsumexp(-1)
    o = torch.matmul((scores - lse[..., None]).exp(), kv.float().unsqueeze(1))
    return (o * torch.sigmoid(lse - sink.view(1, -1, 1))[..., None]).transpose(1, 2).to(q.dtype)


def sink_as_bias_of_a_zero_row(q, kv, sink):
    kv = F.pad(kv, (0, 0, 0, 1))
    bias = torch.zeros(1, HEADS, 1, KEYS + 1)
    bias[..., -1] = sink.view(1, HEADS, 1)
    return torch.einsum("bhsn,bnd->bshd", (scores_of(q, kv) + bias).softmax(-1), kv.float()).to(q.dtype)


def chunks_of_keys(q, kv, sink):
    top, total = sink.view(1, HEADS, 1).expand(1, HEADS, TOKENS), torch.ones(1, HEADS, TOKENS)
    o = torch.zeros(1, HEADS, TOKENS, DIM)
    for part in kv.split(8, 1):
        scores = scores_of(q, part)
        new = torch.maximum(top, scores.amax(-1))
        p = (scores - new[..., None]).exp()
        total = total * (top - new).exp() + p.sum(-1)
        o = o * (top - new).exp()[..., None] + torch.einsum("bhsn,bnd->bhsd", p, part.float())
        top = new
    return (o / total[..., None]).transpose(1, 2).to(q.dtype)


def joined(o, turned):
    return torch.cat([o[..., :-ROPE], turned.to(o.dtype)], -1)


def by_sign_vector(o, cos, sin):
    tail = o[..., -ROPE:].float()
    signs = torch.tensor([1.0, -1.0]).repeat(ROPE // 2)
    swapped = tail.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return joined(o, tail * cos.repeat_interleave(2, -1)[:, None] + swapped * (sin.repeat_interleave(2, -1)[:, None]
                                                                              * signs))


def forward_by_sign_vector(o, cos, sin):
    tail = o[..., -ROPE:].float()
    signs = torch.tensor([-1.0, 1.0]).repeat(ROPE // 2)
    swapped = tail.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return joined(o, tail * cos.repeat_interleave(2, -1)[:, None] + swapped * (sin.repeat_interleave(2, -1)[:, None]
                                                                              * signs))


def by_matrices(o, cos, sin):
    matrix = torch.stack([torch.stack([cos, sin], -1), torch.stack([-sin, cos], -1)], -1)
    pairs = o[..., -ROPE:].float().unflatten(-1, (-1, 2))
    return joined(o, torch.einsum("bshpi,spij->bshpj", pairs, matrix).flatten(-2))


def by_addcmul(o, cos, sin):
    tail = o[..., -ROPE:].float()
    even, odd, cos, sin = tail[..., 0::2], tail[..., 1::2], cos[None, :, None], sin[None, :, None]
    out = o.clone()
    out[..., -ROPE::2] = torch.addcmul(even * cos, odd, sin).to(o.dtype)
    out[..., 1 - ROPE::2] = torch.addcmul(odd * cos, even, sin, value=-1).to(o.dtype)
    return out


def unquantised(x):
    return x


def dequantised(blocks, scale, like):
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2).to(like.dtype)


def scale_by_frexp(x):
    blocks = x.float().unflatten(-1, (-1, 128))
    mantissa, exponent = torch.frexp(blocks.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448.0)
    scale = torch.ldexp(torch.ones_like(mantissa), torch.where(mantissa == 0.5, exponent - 1, exponent))
    return dequantised(blocks, scale, x)


def scale_by_norm(x):
    blocks = x.float().unflatten(-1, (-1, 128))
    return dequantised(blocks, torch.linalg.vector_norm(blocks, float("inf"), -1, keepdim=True).clamp_min(1e-10)
                       * (1 / 448), x)


def scale_by_two_extrema(x):
    blocks = x.float().unflatten(-1, (-1, 128))
    top = torch.maximum(blocks.amax(-1, keepdim=True), -blocks.amin(-1, keepdim=True))
    return dequantised(blocks, top.clamp_min(1e-4) / 448, x)


def scale_by_aminmax(x):
    blocks = x.float().unflatten(-1, (-1, 128))
    low, high = torch.aminmax(blocks, dim=-1, keepdim=True)
    return dequantised(blocks, torch.maximum(high, -low).clamp_min(1e-4) / 448, x)


def grouped(o, weight):
    return torch.einsum("bsgk,grk->bsgr", o.reshape(1, TOKENS, GROUPS, -1), weight)


def over_heads_and_channels(o, weight):
    return torch.einsum("bsghd,grhd->bsgr", o.unflatten(2, (GROUPS, -1)), weight.unflatten(2, (-1, DIM)))


def block_diagonal(o, weight):
    return F.linear(o.flatten(2), torch.block_diag(*weight)).unflatten(-1, (GROUPS, RANK))


def compiled(attention, rotation, quantisation, projection):
    def fn(q, kv, sink, cos, sin, weight):
        o = rotation(attention(q, kv, sink), cos, sin)
        return projection(quantisation(o.flatten(2)).reshape(o.shape), weight)

    torch._dynamo.reset()
    before = len(fusion_pass.reports())
    values = inputs()
    with torch.no_grad():
        found = torch.compile(fn, backend="fusion_pass", options={"inner": "aot_eager", "strict": True})(*values)
        wanted = fn(*values)
    report, = fusion_pass.reports()[before:]
    return report, ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


@pytest.mark.parametrize("attention, rotation, quantisation, projection", [
    (sink_by_sigmoid, by_addcmul, unquantised, over_heads_and_channels),
    (sink_as_bias_of_a_zero_row, by_sign_vector, unquantised, block_diagonal),
    (chunks_of_keys, by_matrices, unquantised, grouped),
    (sink_column, by_addcmul, scale_by_frexp, grouped),
    (sink_column, by_sign_vector, scale_by_norm, over_heads_and_channels),
    (sink_by_sigmoid, by_matrices, scale_by_two_extrema, grouped),
    (sink_column, by_addcmul, scale_by_aminmax, over_heads_and_channels),
], ids=lambda part: part.__name__)
def test_fused(attention, rotation, quantisation, projection):
    report, error = compiled(attention, rotation, quantisation, projection)
    quant = () if quantisation is unquantised else ("fp8_quant",)
    assert [c.roles for c in report.fused] == [("fmha", "inverse_rope", *quant, "bgemm")], report
    assert error < 2e-2         # one code of E4M3 more or less is 6 % of a single value


def test_the_other_sign_is_the_forward_rotation():
    report, error = compiled(sink_column, forward_by_sign_vector, unquantised, grouped)
    assert not report.fused and error == 0
    assert "expected o[448]*cos[0] + o[449]*sin[0]" in report.near_misses[0].reason, report
