"""What looks like a part of the chain and is none: each differs from a spelling in ``stranger_parts`` in one thing."""

from __future__ import annotations

import torch
from stranger_parts import (
    DIM,
    E4M3,
    GROUPS,
    HEADS,
    NOPE,
    RANK,
    ROPE,
    SCALE,
    complex_of,
    lead,
    pairs_of,
    put_back,
    scores_of,
    wide,
    with_column,
)
from torch.nn import functional as F


def of_scores(scores):
    """An attention with other scores [B, H, T, N]."""
    def attention(q, kv, visible, sink):
        found = (scores(q, kv) * SCALE).masked_fill(~visible[:, None], -torch.inf)
        return torch.einsum("bhtn,bnd->bthd", with_column(found, sink), kv)
    attention.__name__ = scores.__name__
    return attention


def product(q, k):
    return torch.einsum("bthd,bnd->bhtn", q, k)


# ------------------------------------------------------------------------------------------------------- attention


@of_scores
def rope_counted_twice(q, kv):
    return product(q, kv) + product(q[..., NOPE:], kv[..., NOPE:])


@of_scores
def one_channel_counted_twice(q, kv):
    return product(q[..., :NOPE + 1], kv[..., :NOPE + 1]) + product(q[..., NOPE:], kv[..., NOPE:])


@of_scores
def one_channel_left_out(q, kv):
    return product(q[..., :NOPE - 1], kv[..., :NOPE - 1]) + product(q[..., NOPE:], kv[..., NOPE:])


@of_scores
def parts_scaled_apart(q, kv):
    return product(q[..., :NOPE], kv[..., :NOPE]) + product(q[..., NOPE:], kv[..., NOPE:]) * 1.5


@of_scores
def rope_subtracted(q, kv):
    return product(q[..., :NOPE], kv[..., :NOPE]) - product(q[..., NOPE:], kv[..., NOPE:])


@of_scores
def half_the_channels(q, kv):
    return product(q[..., :128], kv[..., :128]) + product(q[..., 128:256], kv[..., 128:256])


@of_scores
def rope_of_the_next_key(q, kv):
    return product(q[..., :NOPE], kv[..., :NOPE]) + product(q[..., NOPE:], kv[..., NOPE:].roll(1, 1))


@of_scores
def scores_clamped(q, kv):
    return product(q, kv).clamp(-30, 30)


@of_scores
def scores_capped(q, kv):
    return 30 * torch.tanh(product(q, kv) / 30)


def keys_turned_values_not(q, kv, visible, sink):
    k_pe = torch.tanh(kv[..., NOPE:])
    scores = product(q[..., :NOPE], kv[..., :NOPE]) + product(q[..., NOPE:], k_pe)
    return torch.einsum("bhtn,bnd->bthd", with_column((scores * SCALE).masked_fill(~visible[:, None], -1e30), sink),
                        kv)


def values_joined_the_other_way(q, kv, visible, sink):
    k_nope, k_pe = kv[..., :NOPE], torch.tanh(kv[..., NOPE:])
    scores = product(q[..., :NOPE], k_nope) + product(q[..., NOPE:], k_pe)
    return torch.einsum("bhtn,bnd->bthd", with_column((scores * SCALE).masked_fill(~visible[:, None], -1e30), sink),
                        torch.cat([k_pe, k_nope], -1))


def per_head(change):
    """A loop over heads, in which ``change`` gives the (sink, visible) that a head uses."""
    def attention(q, kv, visible, sink):
        out = []
        for h in range(HEADS):
            own, seen = change(h, sink, visible)
            scores = (q[:, :, h] @ kv.mT * SCALE).masked_fill(~seen, -1e30)
            top = torch.maximum(scores.amax(-1, keepdim=True), own)
            e = (scores - top).exp()
            out.append(e @ kv / (e.sum(-1, keepdim=True) + (own - top).exp()))
        return torch.stack(out, 2)
    attention.__name__ = change.__name__
    return attention


@per_head
def sink_of_the_next_head(h, sink, visible):
    return sink[(h + 1) % HEADS], visible


@per_head
def one_sink_for_all_heads_but_one(h, sink, visible):
    return sink[min(h, 1)], visible


@per_head
def last_head_sees_everything(h, sink, visible):
    return sink[h], visible if h < HEADS - 1 else torch.ones_like(visible)


@per_head
def last_head_sees_the_opposite(h, sink, visible):
    return sink[h], visible if h < HEADS - 1 else visible.logical_not()


def denominator(total):
    """A softmax by hand with ``total(e, sink, top)`` below the line."""
    def attention(q, kv, visible, sink):
        scores = scores_of(q, kv, visible)
        top = torch.maximum(scores.amax(-1, keepdim=True), lead(sink))
        e = torch.exp(scores - top)
        return torch.einsum("bhtn,bnd->bthd", e / total(e, lead(sink), top), kv)
    attention.__name__ = total.__name__
    return attention


def subtracted_mask(weights):
    """Masks that are subtracted, with a large factor, from the scores."""
    def attention(q, kv, visible, sink):
        scores = product(q, kv) * SCALE - 1e30 * (~visible)[:, None]
        return torch.einsum("bhtn,bnd->bthd", weights(scores, sink), kv)
    attention.__name__ = weights.__name__
    return attention


@subtracted_mask
def subtracted_mask_and_the_sink_twice(scores, sink):
    column = lead(sink).expand(scores.shape[0], -1, scores.shape[2], 2)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-2]


@denominator
def sink_added_twice(e, sink, top):
    return e.sum(-1, keepdim=True) + 2 * torch.exp(sink - top)


@denominator
def sink_not_exponentiated(e, sink, top):
    return e.sum(-1, keepdim=True) + sink


@denominator
def sink_without_its_maximum(e, sink, top):
    return e.sum(-1, keepdim=True) + torch.exp(sink)


@denominator
def weights_summed_over_heads(e, sink, top):
    return e.sum(1, keepdim=True) + torch.exp(sink - top)


@denominator
def sink_of_one_token_only(e, sink, top):
    first = (torch.arange(e.shape[2]) == 0).float().view(1, 1, -1, 1)
    return e.sum(-1, keepdim=True) + torch.exp(sink - top) * first


@denominator
def softmax_off_by_one(e, sink, top):
    return 1 + e.sum(-1, keepdim=True) + torch.exp(sink - top)


def gate_of_the_wrong_sign(q, kv, visible, sink):
    scores = scores_of(q, kv, visible)
    lse = scores.logsumexp(-1, keepdim=True)
    return ((scores.softmax(-1) * torch.sigmoid(lead(sink) - lse)) @ kv.unsqueeze(1)).transpose(1, 2)


def masked_with_zero(q, kv, visible, sink):
    scores = torch.where(visible[:, None], product(q, kv) * SCALE, 0.0)
    return torch.einsum("bhtn,bnd->bthd", with_column(scores, sink), kv)


def masked_after_the_softmax(q, kv, visible, sink):
    weights = with_column(product(q, kv) * SCALE, sink) * visible[:, None]
    return torch.einsum("bhtn,bnd->bthd", weights, kv)


def running_sum_not_rescaled(q, kv, visible, sink):
    top, total = lead(sink).expand(*q.shape[:1], -1, q.shape[1], 1), 1.0
    acc = torch.zeros_like(q).transpose(1, 2)
    for part, seen in zip(kv.split(6, 1), visible.split(6, 2)):
        scores = scores_of(q, part, seen)
        new = torch.maximum(top, scores.amax(-1, keepdim=True))
        p = torch.exp(scores - new)
        total = total + p.sum(-1, keepdim=True)
        acc, top = acc * torch.exp(top - new) + p @ part.unsqueeze(1), new
    return (acc / total).transpose(1, 2)


ATTENTION = [rope_counted_twice, one_channel_counted_twice, one_channel_left_out, parts_scaled_apart,
             rope_subtracted, half_the_channels, rope_of_the_next_key, scores_clamped,
             scores_capped, keys_turned_values_not, values_joined_the_other_way, sink_of_the_next_head,
             one_sink_for_all_heads_but_one, last_head_sees_everything, last_head_sees_the_opposite,
             subtracted_mask_and_the_sink_twice, sink_added_twice,
             sink_not_exponentiated, sink_without_its_maximum, weights_summed_over_heads, sink_of_one_token_only,
             softmax_off_by_one, gate_of_the_wrong_sign, masked_with_zero, masked_after_the_softmax,
             running_sum_not_rescaled]


# -------------------------------------------------------------------------------------------------------- rotation


def whole(cos, sin, still=1.0, turned=0.0, front=False):
    """Tables over all channels: ``still`` and ``turned`` for those that are not rotated."""
    pads = (0, NOPE) if front else (NOPE, 0)
    return (F.pad(cos.repeat_interleave(2, -1), pads, value=still)[:, None],
            F.pad(sin.repeat_interleave(2, -1), pads, value=turned)[:, None])


def over_all_channels(o, cos, sin):
    return o * cos + torch.stack([o[..., 1::2], -o[..., 0::2]], -1).flatten(-2) * sin


def still_channels_halved(o, cos, sin):
    return over_all_channels(o, *whole(cos, sin, still=0.5))


def still_channels_turned_a_little(o, cos, sin):
    return over_all_channels(o, *whole(cos, sin, turned=1e-3))


def first_channels_turned(o, cos, sin):
    return over_all_channels(o, *whole(cos, sin, front=True))


def forward_over_all_channels(o, cos, sin):
    return over_all_channels(o, *whole(cos, -sin))


def one_still_channel_doubled(o, cos, sin):
    cos, sin = whole(cos, sin)
    return over_all_channels(o, torch.where(torch.arange(DIM) == 100, 2.0, cos), sin)


def one_still_channel_doubled_for_one_token(o, cos, sin):
    cos, sin = whole(cos, sin)
    cos = cos.clone()
    cos[3, :, 100] *= 2
    return over_all_channels(o, cos, sin)


def complex_forward(o, cos, sin):
    freqs = torch.cat([torch.ones(len(cos), NOPE // 2, dtype=torch.complex64), torch.complex(cos, sin)], -1)
    return torch.view_as_real(complex_of(o) * freqs[:, None]).flatten(-2)


def still_channels_by_a_quarter(o, cos, sin):
    freqs = torch.cat([torch.full((len(cos), NOPE // 2), 1j, dtype=torch.complex64), torch.complex(cos, -sin)], -1)
    return torch.view_as_real(complex_of(o) * freqs[:, None]).flatten(-2)


def chosen_one_channel_late(o, cos, sin):
    turned = over_all_channels(o, *whole(cos, sin))
    return torch.where(torch.arange(DIM) < NOPE + 1, o, turned)


def partner(number):
    """The partner of every lane is ``number(lane)``."""
    def rotation(o, cos, sin):
        lane = torch.arange(ROPE)
        tail = o[..., NOPE:]
        return put_back(o, tail * wide(cos) + tail[..., number(lane)] * wide(sin) * (1 - 2 * (lane % 2)))
    rotation.__name__ = number.__name__
    return rotation


@partner
def partner_two_lanes_off(lane):
    return lane ^ 2


@partner
def partner_half_a_rotation_off(lane):
    return (lane + ROPE // 2) % ROPE


@partner
def partner_itself(lane):
    return lane


def signs_exchanged(o, cos, sin):
    lane = torch.arange(ROPE)
    tail = o[..., NOPE:]
    return put_back(o, tail * wide(cos) + tail[..., lane ^ 1] * wide(sin) * (2 * (lane % 2) - 1))


def both_signs_plus(o, cos, sin):
    tail = o[..., NOPE:]
    return put_back(o, tail * wide(cos) + pairs_of(tail).flip(-1).flatten(-2) * wide(sin))


def lanes_put_into_each_other(o, cos, sin):
    even = torch.arange(NOPE, DIM, 2)
    a, b, cos, sin = o[..., even], o[..., even + 1], cos[:, None], sin[:, None]
    out = o.clone()
    out[..., even + 1] = a * cos + b * sin
    out[..., even] = b * cos - a * sin
    return out


def one_pair_left_out(o, cos, sin):
    even = torch.arange(NOPE, DIM - 2, 2)
    a, b, cos, sin = o[..., even], o[..., even + 1], cos[:, None, :-1], sin[:, None, :-1]
    out = o.clone()
    out[..., even] = a * cos + b * sin
    out[..., even + 1] = b * cos - a * sin
    return out


def matrix_not_transposed(o, cos, sin):
    matrix = torch.zeros(len(cos), ROPE, ROPE)
    even = torch.arange(0, ROPE, 2)
    matrix[:, even, even], matrix[:, even + 1, even + 1] = cos, cos
    matrix[:, even + 1, even], matrix[:, even, even + 1] = -sin, sin
    return put_back(o, torch.einsum("bthi,tij->bthj", o[..., NOPE:], matrix))


def swapped_by_permutation(o, cos, sin):
    swap = torch.kron(torch.eye(ROPE // 2), torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    tail = o[..., NOPE:]
    return put_back(o, tail * wide(cos) + (tail @ swap) * wide(sin))


ROTATION = [still_channels_halved, still_channels_turned_a_little, first_channels_turned, forward_over_all_channels,
            one_still_channel_doubled, one_still_channel_doubled_for_one_token, complex_forward,
            still_channels_by_a_quarter, chosen_one_channel_late, partner_two_lanes_off, partner_half_a_rotation_off,
            partner_itself, signs_exchanged, both_signs_plus, lanes_put_into_each_other, one_pair_left_out,
            matrix_not_transposed, swapped_by_permutation]


# ----------------------------------------------------------------------------------------------------- quantisation


def scaled(scale, width=128):
    """Blocks of ``width`` with the scale that ``scale(blocks)`` gives."""
    def quantisation(x):
        blocks = x.unflatten(-1, (-1, width))
        s = scale(blocks)
        return ((blocks / s).clamp(-448, 448).to(E4M3).float() * s).flatten(-2)
    quantisation.__name__ = scale.__name__
    return quantisation


def top(blocks):
    return blocks.abs().amax(-1, True).clamp_min(1e-4)


def power(exponent):
    return torch.exp2(exponent)


@scaled
def limit_of_fnuz(blocks):
    return top(blocks) / 240


@scaled
def floor_added(blocks):
    return (blocks.abs().amax(-1, True) + 1e-4) / 448


@scaled
def largest_and_not_largest_magnitude(blocks):
    return blocks.amax(-1, True).clamp_min(1e-4) / 448


@scaled
def mean_magnitude(blocks):
    return blocks.abs().mean(-1, True).clamp_min(1e-4) / 448


@scaled
def power_below(blocks):
    return power((top(blocks) / 448).log2().floor())


@scaled
def power_nearest(blocks):
    return power((top(blocks) / 448).log2().round())


@scaled
def power_of_the_maximum(blocks):
    return power(top(blocks).log2().ceil()) / 448


@scaled
def scale_of_the_next_block(blocks):
    return (top(blocks) / 448).roll(1, -2)


@scaled
def one_scale_per_row(blocks):
    return top(blocks).amax(-2, True) / 448


@scaled
def scale_of_the_first_token(blocks):
    return (top(blocks) / 448)[:, :1].expand(-1, blocks.shape[1], -1, -1)


half_blocks = scaled(lambda blocks: top(blocks) / 448, 64)
double_blocks = scaled(lambda blocks: top(blocks) / 448, 256)
half_blocks.__name__, double_blocks.__name__ = "half_blocks", "double_blocks"


def interleaved_blocks(x):
    blocks = x.unflatten(-1, (128, -1)).transpose(-1, -2)
    s = top(blocks) / 448
    return ((blocks / s).to(E4M3).float() * s).transpose(-1, -2).flatten(-2)


def dequantised_by_another_scale(x):
    blocks = x.unflatten(-1, (-1, 128))
    s = top(blocks) / 448
    return ((blocks / s).to(E4M3).float() * (s * 1.0625)).flatten(-2)


def other_format(x):
    blocks = x.unflatten(-1, (-1, 128))
    s = top(blocks) / 57344
    return ((blocks / s).to(torch.float8_e5m2).float() * s).flatten(-2)


def integers(x):
    blocks = x.unflatten(-1, (-1, 128))
    s = top(blocks) / 127
    return ((blocks / s).round().clamp(-127, 127).to(torch.int8).float() * s).flatten(-2)


def clamped_at_half(x):
    blocks = x.unflatten(-1, (-1, 128))
    s = top(blocks) / 448
    return ((blocks / s).clamp(-224, 224).to(E4M3).float() * s).flatten(-2)


QUANTISATION = [limit_of_fnuz, floor_added, largest_and_not_largest_magnitude, mean_magnitude, power_below,
                power_nearest, power_of_the_maximum, scale_of_the_next_block, one_scale_per_row,
                scale_of_the_first_token, half_blocks, double_blocks, interleaved_blocks, dequantised_by_another_scale,
                other_format, integers, clamped_at_half]


# ------------------------------------------------------------------------------------------------------- projection


def every_second_head(o, w):
    x = o.unflatten(2, (-1, GROUPS)).transpose(2, 3).flatten(3)
    return torch.einsum("btgk,grk->btgr", x, w)


def heads_and_tokens_mixed(o, w):
    x = o.transpose(1, 2).reshape(*o.shape[:2], GROUPS, -1)
    return torch.einsum("btgk,grk->btgr", x, w)


def of_an_activation(o, w):
    return torch.einsum("btgk,grk->btgr", F.silu(o).reshape(*o.shape[:2], GROUPS, -1), w)


def with_a_residual(o, w):
    x = o.reshape(*o.shape[:2], GROUPS, -1)
    return torch.einsum("btgk,grk->btgr", x + x.roll(1, 1), w)


def normalised_heads(o, w):
    return torch.einsum("btgk,grk->btgr", F.rms_norm(o, (DIM,)).reshape(*o.shape[:2], GROUPS, -1), w)


def convolution_over_tokens(o, w):
    b, t = o.shape[:2]
    kernel = w.reshape(GROUPS * RANK, -1, 1).expand(-1, -1, 3) / 3
    y = F.conv1d(o.reshape(b, t, -1).transpose(1, 2), kernel, padding=1, groups=GROUPS)
    return y.transpose(1, 2).unflatten(-1, (GROUPS, RANK))


def one_head_twice(o, w):
    x, w = o.unflatten(2, (GROUPS, -1)), w.unflatten(2, (-1, DIM))
    return sum(torch.einsum("btgd,grd->btgr", x[:, :, :, min(h, 0)], w[:, :, h]) for h in range(HEADS // GROUPS))


PROJECTION = [every_second_head, heads_and_tokens_mixed, of_an_activation, with_a_residual, normalised_heads,
              convolution_over_tokens, one_head_twice]
