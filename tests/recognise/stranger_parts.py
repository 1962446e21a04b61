"""Parts of the DeepSeek-V4 output path in words of many strangers: attention with a sink, rotation back, FP8 blocks,
grouped projection. Every attention takes q [B, T, H, D], kv [B, N, D], visible [B, T, N] (bool), sink [H] and gives
[B, T, H, D] float32; every rotation takes that with cos and sin [T, 32]; a quantisation takes and gives [B, T, H * D]
(dequantised); a projection takes [B, T, H, D] and weight [G, R, H * D / G] and gives [B, T, G, R].
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

HEADS, DIM, GROUPS, RANK, ROPE = 4, 512, 2, 8, 64
NOPE = DIM - ROPE
SCALE = DIM ** -0.5
LOG2E = math.log2(math.e)


def lead(sink):
    return sink.view(1, -1, 1, 1)


def scores_of(q, kv, visible):
    """[B, H, T, N]"""
    return (torch.einsum("bthd,bnd->bhtn", q, kv) * SCALE).masked_fill(~visible[:, None], -torch.inf)


def with_column(scores, sink):
    column = lead(sink).expand(scores.shape[0], -1, scores.shape[2], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


# ------------------------------------------------------------------------------------------------------- attention


def nope_plus_rope(q, kv, visible, sink):
    q_nope, q_pe = q.split([NOPE, ROPE], -1)
    k_nope, k_pe = kv.split([NOPE, ROPE], -1)
    scores = torch.einsum("bthd,bnd->bhtn", q_nope, k_nope) + torch.einsum("bthd,bnd->bhtn", q_pe, k_pe)
    scores = (scores * SCALE).masked_fill(~visible[:, None], -torch.inf)
    return torch.einsum("bhtn,bnd->bthd", with_column(scores, sink), kv)


def nope_then_rope_accumulated(q, kv, visible, sink):
    b, t = q.shape[:2]
    flat = q.transpose(1, 2).reshape(b, HEADS * t, DIM)
    scores = torch.bmm(flat[..., :NOPE], kv[..., :NOPE].mT)
    scores = torch.baddbmm(scores, flat[..., NOPE:], kv[..., NOPE:].mT, beta=SCALE, alpha=SCALE)
    scores = scores.view(b, HEADS, t, -1) + torch.where(visible, 0.0, -1e30)[:, None]
    return (with_column(scores, sink) @ kv[:, None]).transpose(1, 2)


def latent_in_quarters(q, kv, visible, sink):
    scores = sum(torch.einsum("bthd,bnd->bthn", a, b) for a, b in zip(q.chunk(4, -1), kv.chunk(4, -1)))
    scores = torch.where(visible[:, :, None], scores * SCALE, -1e30)
    top = torch.maximum(scores.amax(-1), sink)
    e = torch.exp(scores - top[..., None])
    total = e.sum(-1) + torch.exp(sink - top)
    return torch.einsum("bthn,bnd->bthd", e, kv) / total[..., None]


def scaled_parts(q, kv, visible, sink):
    q = q * SCALE
    scores = torch.matmul(q[..., NOPE:].transpose(1, 2), kv[:, None, :, NOPE:].transpose(2, 3))
    scores = scores + torch.matmul(q[..., :NOPE].transpose(1, 2), kv[:, None, :, :NOPE].transpose(2, 3))
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    return torch.matmul(with_column(scores, sink), kv[:, None]).transpose(1, 2)


def turned_apart(q, kv, visible, sink):
    """Queries' and keys' last channels are changed before (as a rotation does); the values join the keys' parts."""
    q_nope, q_pe = q[..., :NOPE], torch.tanh(q[..., NOPE:])
    k_nope, k_pe = kv[..., :NOPE], torch.tanh(kv[..., NOPE:])
    scores = torch.einsum("bthd,bnd->bthn", q_nope, k_nope) + torch.einsum("bthd,bnd->bthn", q_pe, k_pe)
    scores = (scores * SCALE).masked_fill(~visible[:, :, None], -torch.inf).transpose(1, 2)
    return torch.einsum("bhtn,bnd->bthd", with_column(scores, sink), torch.cat([k_nope, k_pe], -1))


def queries_crossed(q, kv, visible, sink):
    """The queries' parts stand the other way round: attention all the same, with the queries joined accordingly."""
    scores = torch.einsum("bthd,bnd->bhtn", q[..., :ROPE], kv[..., NOPE:]) + torch.einsum(
        "bthd,bnd->bhtn", q[..., ROPE:], kv[..., :NOPE])
    scores = (scores * SCALE).masked_fill(~visible[:, None], -torch.inf)
    return torch.einsum("bhtn,bnd->bthd", with_column(scores, sink), kv)


def head_by_head(q, kv, visible, sink):
    out = []
    for h in range(HEADS):
        scores = torch.bmm(q[:, :, h], kv.transpose(1, 2)).mul(SCALE).masked_fill(~visible, -torch.inf)
        top = scores.amax(-1, keepdim=True).clamp_min(sink[h])
        e = (scores - top).exp()
        out.append(torch.bmm(e, kv) / (e.sum(-1, keepdim=True) + (sink[h] - top).exp()))
    return torch.stack(out, 2)


def head_by_head_written(q, kv, visible, sink):
    out = torch.empty_like(q)
    for h in range(HEADS):
        scores = torch.bmm(q[:, :, h], kv.transpose(1, 2)) * SCALE + torch.where(visible, 0.0, -torch.inf)
        lse = torch.logaddexp(scores.logsumexp(-1, keepdim=True), sink[h])
        out[:, :, h] = torch.exp(scores - lse) @ kv
    return out


def group_by_group(q, kv, visible, sink):
    out = [torch.einsum("bhtn,bnd->bthd", with_column(scores_of(part, kv, visible), s), kv)
           for part, s in zip(q.chunk(GROUPS, 2), sink.chunk(GROUPS))]
    return torch.cat(out, 2)


def batch_and_heads_in_a_loop(q, kv, visible, sink):
    rows = []
    for b in range(q.shape[0]):
        heads = []
        for h, s in enumerate(sink.unbind()):
            scores = (q[b, :, h] @ kv[b].T) * SCALE
            scores = torch.where(visible[b], scores, -torch.inf)
            scores = torch.cat([scores, s.expand(len(scores), 1)], 1)
            heads.append(torch.softmax(scores, 1)[:, :-1] @ kv[b])
        rows.append(torch.stack(heads, 1))
    return torch.stack(rows)


def in_place(q, kv, visible, sink):
    scores = torch.einsum("bthd,bnd->bhtn", q, kv)
    scores.mul_(SCALE).masked_fill_(visible.logical_not()[:, None], -1e30)
    top = torch.maximum(scores.amax(-1, keepdim=True), lead(sink))
    scores.sub_(top).exp_()
    total = scores.sum(-1, keepdim=True).add_(torch.exp(lead(sink) - top))
    scores.div_(total)
    return torch.einsum("bhtn,bnd->bthd", scores, kv)


def buffer_with_slot(q, kv, visible, sink):
    b, t, n = visible.shape
    logits = q.new_empty(b, HEADS, t, n + 1)
    logits[..., 1:] = scores_of(q, kv, visible)
    logits[..., 0] = sink[:, None]
    weights = F.log_softmax(logits, -1).exp()
    return torch.einsum("bhtn,bnd->bthd", weights[..., 1:], kv)


def without_maximum(q, kv, visible, sink):
    e = scores_of(q, kv, visible).exp()
    e = e * torch.reciprocal(e.sum(-1, keepdim=True) + lead(sink).exp())
    return torch.einsum("bhtn,bnd->bthd", e, kv)


def sink_by_softplus(q, kv, visible, sink):
    scores = scores_of(q, kv, visible)
    lse = scores.logsumexp(-1)
    o = torch.einsum("bhtn,bnd->bhtd", (scores - lse[..., None]).exp(), kv)
    return (o * torch.exp(-F.softplus(sink[:, None] - lse))[..., None]).transpose(1, 2)


def sink_by_tanh(q, kv, visible, sink):
    scores = scores_of(q, kv, visible)
    gate = 0.5 * (1 + torch.tanh((scores.logsumexp(-1, keepdim=True) - lead(sink)) / 2))
    return ((scores.softmax(-1) * gate) @ kv.unsqueeze(1)).transpose(1, 2)


def kv_repeated(q, kv, visible, sink):
    k = kv[:, :, None].repeat_interleave(HEADS, 2).permute(0, 2, 1, 3)
    bias = torch.zeros_like(visible, dtype=q.dtype).masked_fill(~visible, torch.finfo(q.dtype).min)[:, None]
    scores = q.permute(0, 2, 1, 3) @ k.mT / math.sqrt(DIM) + bias
    return (with_column(scores, sink) @ k).permute(0, 2, 1, 3)


def base_two_tiles(q, kv, visible, sink):
    b, t, n = visible.shape
    top = torch.full((b, HEADS, t), -1e30)
    total, acc = torch.zeros_like(top), q.new_zeros(b, HEADS, t, DIM)
    for start in range(0, n, 8):
        tile = kv[:, start:start + 8]
        s = torch.einsum("bthd,bnd->bhtn", q, tile) * (SCALE * LOG2E)
        s = torch.where(visible[:, None, :, start:start + 8], s, -1e30)
        new = torch.max(top, s.max(-1).values)
        p = torch.exp2(s - new.unsqueeze(-1))
        shrink = torch.pow(2.0, top - new)
        total = torch.addcmul(p.sum(-1), total, shrink)
        acc = acc * shrink.unsqueeze(-1) + p @ tile.unsqueeze(1)
        top = new
    new = torch.maximum(top, (sink * LOG2E)[:, None])
    shrink = torch.exp2(top - new)
    acc = acc * (shrink / (total * shrink + torch.exp2((sink * LOG2E)[:, None] - new)))[..., None]
    return acc.transpose(1, 2)


def by_broadcast_sums(q, kv, visible, sink):
    scores = (q[:, :, :, None, :] * kv[:, None, None]).sum(-1) * SCALE
    scores = scores.masked_fill(~visible[:, :, None], -torch.inf).transpose(1, 2)
    return (with_column(scores, sink)[..., None] * kv[:, None, None]).sum(-2).transpose(1, 2)


def one_batched_product(q, kv, visible, sink):
    b, t = q.shape[:2]
    scores = torch.tensordot(q.flatten(0, 2), kv.flatten(0, 1), dims=([1], [1])).view(b, t, HEADS, b, -1)
    scores = scores.diagonal(dim1=0, dim2=3).permute(3, 1, 0, 2) * SCALE
    scores = scores - 1e30 * (~visible)[:, None]
    return torch.einsum("bhtn,bnd->bthd", with_column(scores, sink), kv)


def fused_then_gate(q, kv, visible, sink):
    k = kv.unsqueeze(1).expand(-1, HEADS, -1, -1)
    o = F.scaled_dot_product_attention(q.transpose(1, 2), k, k, attn_mask=visible[:, None], scale=SCALE)
    lse = scores_of(q, kv, visible).logsumexp(-1, keepdim=True)
    return (o / (1 + torch.exp(lead(sink) - lse))).transpose(1, 2)


def mapped_over_heads(q, kv, visible, sink):
    def one(q, sink):
        s = torch.where(visible, q @ kv.mT * SCALE, -1e30)
        top = torch.maximum(s.amax(-1, keepdim=True), sink)
        e = torch.exp(s - top)
        return e @ kv / (e.sum(-1, keepdim=True) + torch.exp(sink - top))
    return torch.vmap(one, in_dims=(2, 0), out_dims=2)(q, sink)


def two_branches(q, kv, visible, sink):
    half = kv.shape[1] // 2
    a, b = scores_of(q, kv[:, :half], visible[..., :half]), scores_of(q, kv[:, half:], visible[..., half:])
    top = torch.stack([a.amax(-1), b.amax(-1), sink[:, None].expand(a.shape[:-1])]).amax(0)[..., None]
    ea, eb = torch.exp(a - top), torch.exp(b - top)
    total = ea.sum(-1, keepdim=True) + eb.sum(-1, keepdim=True) + torch.exp(lead(sink) - top)
    o = torch.einsum("bhtn,bnd->bhtd", ea, kv[:, :half]) + torch.einsum("bhtn,bnd->bhtd", eb, kv[:, half:])
    return (o / total).permute(0, 2, 1, 3)


ATTENTION = [nope_plus_rope, nope_then_rope_accumulated, latent_in_quarters, scaled_parts, turned_apart,
             queries_crossed, head_by_head, head_by_head_written, group_by_group, batch_and_heads_in_a_loop,
             in_place, buffer_with_slot, without_maximum, sink_by_softplus, sink_by_tanh, kv_repeated,
             base_two_tiles, by_broadcast_sums, one_batched_product, fused_then_gate, mapped_over_heads,
             two_branches]


# -------------------------------------------------------------------------------------------------------- rotation


def pairs_of(x):
    return x.unflatten(-1, (-1, 2))


def complex_of(x):
    return torch.view_as_complex(pairs_of(x.float()).contiguous())


def put_back(o, tail):
    return torch.cat([o[..., :NOPE], tail.to(o.dtype)], -1)


def wide(table):
    """[T, 32] -> [T, 1, 64]"""
    return table.repeat_interleave(2, -1)[:, None]


def conjugate_twice(o, cos, sin):
    turned = (complex_of(o[..., NOPE:]).conj() * torch.complex(cos, sin)[:, None]).conj()
    return put_back(o, torch.view_as_real(turned.resolve_conj()).flatten(-2))


def product_of_complex(o, cos, sin):
    even, odd = o[..., NOPE::2], o[..., NOPE + 1::2]
    z = torch.complex(even, odd) * torch.complex(cos, -sin)[:, None]
    return put_back(o, torch.stack([z.real, z.imag], -1).flatten(-2))


def complex_over_whole_head(o, cos, sin):
    still = torch.ones(len(cos), NOPE // 2, dtype=torch.complex64)
    freqs = torch.cat([still, torch.complex(cos, sin)], -1)
    z = torch.view_as_complex(o.float().reshape(*o.shape[:-1], -1, 2)) * freqs.conj()[None, :, None]
    return torch.view_as_real(z).flatten(-2).type_as(o)


def polar_over_whole_head(o, cos, sin):
    angle = F.pad(torch.atan2(sin, cos), (NOPE // 2, 0))
    z = complex_of(o) * torch.polar(torch.ones_like(angle), -angle)[:, None]
    return torch.view_as_real(z).flatten(3)


def tables_over_all_channels(o, cos, sin):
    cos = F.pad(cos.repeat_interleave(2, -1), (NOPE, 0), value=1.0)[:, None]
    sin = F.pad(sin.repeat_interleave(2, -1), (NOPE, 0))[:, None]
    other = torch.stack([o[..., 1::2], -o[..., 0::2]], -1).flatten(-2)
    return o * cos + other * sin


def tables_joined_over_all_channels(o, cos, sin):
    ones, zeros = torch.ones(len(cos), NOPE), torch.zeros(len(cos), NOPE)
    cos = torch.cat([ones, torch.stack([cos, cos], -1).flatten(1)], -1)
    sin = torch.cat([zeros, torch.stack([sin, -sin], -1).flatten(1)], -1)
    flipped = pairs_of(o).flip(-1).flatten(-2)
    return torch.addcmul(o * cos[:, None], flipped, sin[:, None])


def chosen_by_channel(o, cos, sin):
    cos, sin = (F.pad(t.repeat_interleave(2, -1), (NOPE, 0))[:, None] for t in (cos, sin))
    even = torch.arange(DIM) % 2 == 0
    other = torch.where(even, o.roll(-1, -1), -o.roll(1, -1))
    return torch.where(torch.arange(DIM) < NOPE, o, o * cos + other * sin)


def partner_by_index(o, cos, sin):
    lane = torch.arange(ROPE)
    tail = o[..., NOPE:]
    return put_back(o, tail * wide(cos) + tail[..., lane ^ 1] * wide(sin) * (1 - 2 * (lane % 2)))


def partner_by_index_select(o, cos, sin):
    lane = torch.arange(ROPE)
    partner = torch.where(lane % 2 == 0, lane + 1, lane - 1)
    sign = torch.where(lane % 2 == 0, 1.0, -1.0)
    tail = o.narrow(-1, NOPE, ROPE)
    return put_back(o, tail * wide(cos) + tail.index_select(-1, partner) * (sign * wide(sin)))


def partner_taken_along(o, cos, sin):
    lane = torch.arange(DIM).view(1, 1, 1, -1)
    other = torch.take_along_dim(o, torch.where(lane % 2 == 0, lane + 1, lane - 1).expand_as(o), -1)
    even = o[..., NOPE::2] * cos[:, None] + other[..., NOPE::2] * sin[:, None]
    odd = o[..., NOPE + 1::2] * cos[:, None] - other[..., NOPE + 1::2] * sin[:, None]
    out = o.clone()
    out[..., NOPE::2], out[..., NOPE + 1::2] = even, odd
    return out


def put_by_index(o, cos, sin):
    even = torch.arange(NOPE, DIM, 2)
    a, b, cos, sin = o[..., even], o[..., even + 1], cos[:, None], sin[:, None]
    out = o.clone()
    out[..., even] = a * cos + b * sin
    out[..., even + 1] = b * cos - a * sin
    return out


def index_copied(o, cos, sin):
    a, b = pairs_of(o[..., NOPE:]).unbind(-1)
    a, b = a * cos[:, None] + b * sin[:, None], b * cos[:, None] - a * sin[:, None]
    out = o.index_copy(-1, torch.arange(NOPE, DIM, 2), a)
    return out.index_copy(-1, torch.arange(NOPE + 1, DIM, 2), b)


def seen_as_complex_numbers(o, cos, sin):
    z = o[..., NOPE:].float().contiguous().view(torch.complex64) * torch.complex(cos, -sin).unsqueeze(1)
    return put_back(o, z.view(torch.float32))


def transposed_matrix(o, cos, sin):
    forward = torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)      # [T, 32, 2, 2]
    tail = (forward.mT[None, :, None] @ pairs_of(o[..., NOPE:]).unsqueeze(-1)).squeeze(-1)
    return put_back(o, tail.flatten(-2))


def big_matrix(o, cos, sin):
    """One 64 x 64 matrix per token."""
    matrix = torch.zeros(len(cos), ROPE, ROPE)
    even = torch.arange(0, ROPE, 2)
    matrix[:, even, even], matrix[:, even + 1, even + 1] = cos, cos
    matrix[:, even + 1, even], matrix[:, even, even + 1] = sin, -sin
    return put_back(o, torch.einsum("bthi,tij->bthj", o[..., NOPE:], matrix))


def rows_in_another_order(o, cos, sin):
    """Table rows that the source picks by constants, in an order of its own."""
    order = torch.tensor([3, 1, 4, 0, 2])
    return in_place_multiply_add(o, cos[order][order], sin[order][order])


def rows_rolled(o, cos, sin):
    return product_of_complex(o, cos.roll(1, 0), sin.roll(1, 0))


def sines_rolled(o, cos, sin):
    """Sines of other angles than the cosines: no rotation any more, but what the op computes from these tables."""
    return product_of_complex(o, cos, sin.roll(1, -1))


def diagonal_matrices(o, cos, sin):
    """The same, as a sum of three diagonals."""
    off = torch.diag_embed(torch.stack([sin, torch.zeros_like(sin)], -1).flatten(1)[:, :-1], offset=-1)
    matrix = torch.diag_embed(cos.repeat_interleave(2, -1)) + off - off.mT
    return put_back(o, (o[..., NOPE:].unsqueeze(-2) @ matrix[:, None]).squeeze(-2))


def swapped_by_matrix(o, cos, sin):
    swap = torch.kron(torch.eye(ROPE // 2), torch.tensor([[0.0, -1.0], [1.0, 0.0]]))
    tail = o[..., NOPE:]
    return put_back(o, tail * wide(cos) + (tail @ swap) * wide(sin))


def in_place_multiply_add(o, cos, sin):
    tail = o[..., NOPE:]
    even, odd = tail[..., 0::2].clone(), tail[..., 1::2].clone()
    tail.mul_(wide(cos))
    tail[..., 0::2].addcmul_(odd, sin[:, None])
    tail[..., 1::2].addcmul_(even, sin[:, None], value=-1)
    return o


def scaled_difference(o, cos, sin):
    a, b = o[..., NOPE:].reshape(*o.shape[:-1], -1, 2).unbind(-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return put_back(o, torch.dstack([(a * cos + b * sin).flatten(), torch.sub(b * cos, a * sin, alpha=1).flatten()]
                                    ).view(*o.shape[:-1], ROPE))


ROTATION = [conjugate_twice, product_of_complex, complex_over_whole_head, polar_over_whole_head,
            tables_over_all_channels, tables_joined_over_all_channels, chosen_by_channel, partner_by_index,
            partner_by_index_select, partner_taken_along, put_by_index, index_copied, seen_as_complex_numbers,
            transposed_matrix, big_matrix, rows_in_another_order, rows_rolled,
            diagonal_matrices, swapped_by_matrix, in_place_multiply_add,
            scaled_difference]


# ----------------------------------------------------------------------------------------------------- quantisation

E4M3 = torch.float8_e4m3fn


def plain_fp32(x):
    blocks = x.float().reshape(*x.shape[:-1], -1, 128)
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-10) / torch.finfo(E4M3).max
    return ((blocks / scale).clamp(-448, 448).to(E4M3).float() * scale).view(x.shape)


def reciprocal_fp32(x):
    blocks = x.view(*x.shape[:-1], -1, 128)
    inverse = 448.0 / torch.max(blocks.abs(), -1, keepdim=True).values.clamp_min(1e-4)
    return ((blocks * inverse).to(E4M3).float() / inverse).view(x.shape)


def reciprocal_taken(x):
    blocks = x.unflatten(-1, (-1, 128))
    scale = torch.maximum(blocks.abs().amax(-1, True), torch.tensor(1e-4)) * (1 / 448)
    codes = (blocks * scale.reciprocal()).clamp(-448.0, 448.0).to(E4M3)
    return codes.float().mul(scale).flatten(-2)


def floor_by_where(x):
    blocks = x.unflatten(-1, (-1, 128))
    amax = blocks.abs().amax(-1, True)
    scale = torch.where(amax < 1e-4, torch.full_like(amax, 1e-4), amax) / 448
    return ((blocks / scale).to(E4M3).float() * scale).flatten(-2)


def floor_on_scale(x):
    blocks = x.unflatten(-1, (-1, 128))
    scale = torch.clamp_min(blocks.abs().amax(-1, True) / 448, 1e-12)
    return ((blocks / scale).to(E4M3).float() * scale).flatten(-2)


def through_squares(x):
    blocks = x.unflatten(-1, (-1, 128))
    scale = blocks.square().amax(-1, True).sqrt().clamp_min(1e-4) / 448
    return ((blocks / scale).to(E4M3).float() * scale).flatten(-2)


def power_by_log2(x):
    blocks = x.unflatten(-1, (-1, 128))
    scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(-1, True).clamp_min(1e-4) / 448)))
    return ((blocks / scale).to(E4M3).float() * scale).flatten(-2)


def power_by_pow(x):
    blocks = x.unflatten(-1, (-1, 128))
    exponent = (blocks.abs().amax(-1, True).clamp_min(1e-4) / 448).log2().ceil()
    return ((blocks * 2.0 ** -exponent).to(E4M3).float() * 2.0 ** exponent).flatten(-2)


def power_by_bits(x):
    blocks = x.unflatten(-1, (-1, 128))
    bits = (blocks.abs().amax(-1, True).clamp_min(1e-4) * (1 / 448)).view(torch.int32)
    scale = ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return ((blocks / scale).to(E4M3).float() * scale).flatten(-2)


def power_by_exponent_field(x):
    blocks = x.unflatten(-1, (-1, 128))
    bits = (blocks.abs().amax(-1, True).clamp_min(1e-4) / 448).view(torch.int32)
    exponent = ((bits >> 23) & 0xFF) - 127 + ((bits & 0x7FFFFF) != 0).int()
    scale = torch.ldexp(torch.ones((), device=x.device), exponent)
    return ((blocks / scale).to(E4M3).float() * scale).flatten(-2)


def power_in_e8m0(x):
    blocks = x.unflatten(-1, (-1, 128))
    scale = torch.exp2((blocks.abs().amax(-1, True).clamp_min(1e-4) / 448).log2().ceil()).to(torch.float8_e8m0fnu)
    return ((blocks / scale.float()).to(E4M3).float() * scale.float()).flatten(-2)


def power_stored_as_byte(x):
    blocks = x.unflatten(-1, (-1, 128))
    byte = ((blocks.abs().amax(-1, True).clamp_min(1e-4) / 448).log2().ceil() + 127).to(torch.uint8)
    scale = torch.exp2(byte.float() - 127)
    return ((blocks / scale).to(E4M3).float() * scale).flatten(-2)


def after_a_transpose(x):
    rows = x.unflatten(-1, (GROUPS, -1)).permute(2, 0, 1, 3)
    blocks = rows.reshape(GROUPS, -1, rows.shape[-1] // 128, 128)
    scale = blocks.abs().amax(3).clamp_min(1e-4) / 448
    codes = (blocks / scale[..., None]).to(E4M3).flatten(2)
    back = codes.float() * scale.repeat_interleave(128, 2)
    return back.view(rows.shape).permute(1, 2, 0, 3).flatten(2)


def block_by_block(x):
    out = []
    for block in x.split(128, -1):
        scale = block.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448
        out.append((block / scale).to(E4M3).float() * scale)
    return torch.cat(out, -1)


QUANTISATION = [plain_fp32, reciprocal_fp32, reciprocal_taken, floor_by_where, floor_on_scale, through_squares,
                power_by_log2, power_by_pow, power_by_bits, power_by_exponent_field, power_in_e8m0,
                power_stored_as_byte, after_a_transpose, block_by_block]


# ------------------------------------------------------------------------------------------------------- projection


def by_einsum(o, w):
    return torch.einsum("btgk,grk->btgr", o.reshape(*o.shape[:2], GROUPS, -1), w)


def by_bmm(o, w):
    b, t = o.shape[:2]
    x = o.view(b * t, GROUPS, -1).transpose(0, 1)
    return torch.bmm(x, w.transpose(1, 2)).transpose(0, 1).view(b, t, GROUPS, -1)


def by_broadcast_matmul(o, w):
    x = o.flatten(2).unflatten(-1, (GROUPS, 1, -1))
    return torch.matmul(x, w.mT).squeeze(-2)


def by_tensordot_loop(o, w):
    return torch.stack([torch.tensordot(part.flatten(2), one, dims=([2], [1]))
                        for part, one in zip(o.chunk(GROUPS, 2), w)], 2)


def by_stored_transpose(o, w):
    turned = w.reshape(-1, w.shape[-1]).t().contiguous()       # [K, G * R]
    x = o.flatten(2).unflatten(-1, (GROUPS, -1))
    return torch.stack([x[:, :, g] @ turned[:, g * RANK:(g + 1) * RANK] for g in range(GROUPS)], 2)


def by_one_matrix(o, w):
    matrix = w.reshape(GROUPS * RANK, -1)                       # [G * R, K]
    parts = [F.linear(x, m) for x, m in zip(o.flatten(2).chunk(GROUPS, -1), matrix.split(RANK))]
    return torch.cat(parts, -1).unflatten(-1, (GROUPS, RANK))


def by_grouped_convolution(o, w):
    b, t = o.shape[:2]
    x = o.reshape(b, t, -1).transpose(1, 2)
    return F.conv1d(x, w.reshape(GROUPS * RANK, -1, 1), groups=GROUPS).transpose(1, 2).unflatten(-1, (GROUPS, RANK))


def by_pointwise_convolution(o, w):
    x = o.flatten(0, 1).reshape(-1, HEADS * DIM, 1, 1)
    y = F.conv2d(x, w.reshape(GROUPS * RANK, -1, 1, 1), groups=GROUPS)
    return y.view(*o.shape[:2], GROUPS, RANK)


def by_sum_of_products(o, w):
    return (o.reshape(*o.shape[:2], GROUPS, 1, -1) * w).sum(-1)


def by_baddbmm(o, w):
    x = o.flatten(0, 1).unflatten(1, (GROUPS, -1)).flatten(2).transpose(0, 1)
    y = torch.baddbmm(torch.zeros(GROUPS, x.shape[1], RANK), x, w.mT)
    return y.transpose(0, 1).unflatten(0, o.shape[:2])


def head_by_head_summed(o, w):
    x, w = o.unflatten(2, (GROUPS, -1)), w.unflatten(2, (-1, DIM))
    return sum(torch.einsum("btgd,grd->btgr", x[:, :, :, h], w[:, :, h]) for h in range(HEADS // GROUPS))


def mapped_over_groups(o, w):
    x = o.flatten(2).unflatten(-1, (GROUPS, -1))
    return torch.vmap(F.linear, in_dims=(2, 0), out_dims=2)(x, w)


PROJECTION = [by_einsum, by_bmm, by_broadcast_matmul, by_tensordot_loop, by_stored_transpose, by_one_matrix,
              by_grouped_convolution, by_pointwise_convolution, by_sum_of_products, by_baddbmm, head_by_head_summed,
              mapped_over_groups]
