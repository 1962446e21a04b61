"""The width of a quantisation block, where dequantised values are all that is read: with power-of-two scales the values
of blocks of 32 and 128 differ only where a block's values are far apart."""

import pytest
import torch

import fusion_pass
from fusion_pass.models import quantize_activation

HEADS, GROUPS, DIM = 8, 2, 512


def tail(block, rule):
    def fn(o, cos, sin, weight):
        even, odd = o[..., -64::2].float(), o[..., -63::2].float()
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        turned = torch.stack((even * c + odd * s, odd * c - even * s), -1).flatten(-2)
        x = torch.cat((o[..., :-64].float(), turned), -1).view(o.shape[0], GROUPS, -1)
        codes, scales = quantize_activation(x, rule, block=block)
        values = codes.float().unflatten(-1, (-1, block)) * scales.unsqueeze(-1)
        return torch.einsum("tgk,grk->tgr", values.flatten(-2), weight)

    return fn


@pytest.mark.parametrize("rule", ["fp32", "ue8m0"])
@pytest.mark.parametrize("block", [32, 128])
def test_block_width_is_read_from_the_values(block, rule):
    torch._dynamo.reset()       # else the other width has made this one a symbol
    gen = torch.Generator().manual_seed(0)
    o, angles = torch.randn(5, HEADS, DIM, generator=gen), torch.randn(5, 32, generator=gen)
    weight = torch.randn(GROUPS, 16, HEADS // GROUPS * DIM, generator=gen)
    with torch.no_grad():
        report = fusion_pass.explain(tail(block, rule))(o, angles.cos(), angles.sin(), weight)
    chain, = report.fused
    assert chain.roles == ("inverse_rope", "fp8_quant", "bgemm") and (chain.quant, chain.group) == (rule, block)
