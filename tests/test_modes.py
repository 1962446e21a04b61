"""Config(batch_invariant=...) and Config(check_inputs=...) through the backend: arguments of the ops in the graph, per
pass and not per process, and what they promise for the user's own model."""

from __future__ import annotations

import re

import pytest
import torch

import fusion_pass
from fusion_pass import Config

HEADS, CHANNELS, GROUPS, RANK, KEYS = 8, 128, 2, 16, 300


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    fusion_pass.clear_reports()
    yield
    torch._dynamo.reset()
    fusion_pass.clear_reports()


def unrotated(o, cos, sin):
    even, odd = o[..., -64:].unflatten(-1, (-1, 2)).unbind(-1)
    tail = torch.stack([even * cos + odd * sin, odd * cos - even * sin], -1).flatten(-2)
    return torch.cat([o[..., :-64], tail], -1)


def attention(q, kv, indices, sink, cos, sin):
    """Gathered attention and inverse RoPE, regrouped: [T, G, K]."""
    rows = kv[indices.clamp(min=0)]
    score = torch.einsum("thd,tkd->thk", q, rows) * CHANNELS**-0.5
    score = score.masked_fill((indices < 0)[:, None], float("-inf"))
    column = sink.view(1, -1, 1).expand(q.shape[0], -1, 1)
    weights = torch.softmax(torch.cat([score, column], -1), -1)[..., :-1]
    o = unrotated(torch.einsum("thk,tkd->thd", weights, rows), cos[:, None], sin[:, None])
    return o.view(-1, GROUPS, HEADS // GROUPS * CHANNELS)


def plain(q, kv, indices, sink, cos, sin, weight):
    return torch.einsum("tgk,grk->tgr", attention(q, kv, indices, sink, cos, sin), weight)


def model(q, kv, indices, sink, cos, sin, weight):
    """With E4M3 quantisation before the projection."""
    blocks = attention(q, kv, indices, sink, cos, sin).unflatten(-1, (-1, 128))
    scale = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-10) / 448.0
    codes = (blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return torch.einsum("tgk,grk->tgr", (codes.float() * scale).flatten(-2), weight)


def arguments(tokens: int) -> tuple:
    torch.manual_seed(0)
    angle = torch.rand(tokens, 32) * 6
    return (
        torch.randn(tokens, HEADS, CHANNELS), torch.randn(KEYS, CHANNELS), torch.randint(-1, KEYS, (tokens, 40)),
        torch.randn(HEADS), angle.cos(), angle.sin(), torch.randn(GROUPS, RANK, HEADS // GROUPS * CHANNELS),
    )  # fmt: skip


def rewritten(config: Config) -> tuple[str, fusion_pass.Report]:
    found = []

    def keep(gm, _inputs):
        found.append((fusion_pass.rewrite(gm, config), gm))
        return gm

    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=aot_autograd(fw_compiler=keep, inference_compiler=keep))(*arguments(5))
    report, gm = found[0]
    return gm.code, report


@pytest.mark.parametrize("name", ["batch_invariant", "check_inputs"])
def test_mode_is_an_argument_of_the_op(name):
    code, report = rewritten(Config(strict=True, **{name: True}))
    assert re.search(rf"attention_gathered_rope_quant\.default\(.*{name} = True", code), code
    assert not any("no effect" in note for note in report.notes)
    assert ("batch invariant" in report.fused[0].gate) == (name == "batch_invariant")
    code, report = rewritten(Config(strict=True))
    assert name not in code and "batch invariant" not in report.fused[0].gate


def test_two_configurations_in_one_process():
    """The checked function (with the default inner compiler) refuses a wrong index, the other one masks it."""
    args = list(arguments(5))
    args[2] = args[2].clone()
    with torch.no_grad():
        unchecked = torch.compile(plain, backend="fusion_pass", options={"inner": "aot_eager"})
        checked = torch.compile(plain, backend="fusion_pass", options={"check_inputs": True})
        assert torch.equal(unchecked(*args), checked(*args))
        assert len(fusion_pass.reports()) == 2 and all(report.fused for report in fusion_pass.reports())
        wrong = [*args]
        wrong[2] = args[2].clone()
        wrong[2][3, 1] = KEYS + 4
        with pytest.raises(ValueError, match=r"indices\[3, 1\] = 304"):
            checked(*wrong)
        assert torch.isfinite(unchecked(*wrong)).all()


def test_a_token_alone_has_the_bits_it_has_in_a_batch():
    options = {"inner": "eager", "batch_invariant": True}
    fused = torch.compile(model, backend="fusion_pass", options=options, dynamic=False)
    args = arguments(64)
    with torch.no_grad():
        whole = fused(*args)
        assert [chain.op for chain in fusion_pass.reports()[-1].fused] == ["fusion_pass.attention_gathered_rope_quant"]
        for t in (0, 63):
            one = [x[t : t + 1] if at in (0, 2, 4, 5) else x for at, x in enumerate(args)]
            alone = fused(*one)
            # The projection is torch's own product, with its own sums; what stands before it has the same bits
            # (tests/kernels/test_batch_invariance.py).
            assert torch.allclose(alone[0], whole[t], rtol=1e-5, atol=1e-4)
