"""What stands in the graph after the pass, per role and per level."""

import chains
import expecttest
import pytest
import torch
from chains import aot, attention, chain, inputs, merged, opaque, project, quantise, quantised_chain, raw, rotate
from printer import text

import fusion_pass
from fusion_pass import Config

STRICT = Config(strict=True)


def rewritten(gm):
    fusion_pass.rewrite(gm, STRICT)
    return text(gm)


class Expected(expecttest.TestCase):
    def test_attention_and_rotation(self):
        graph = rewritten(aot(chain, inputs()))
        self.assertExpectedInline(graph, """\
%0 = fusion_pass.attention_rope(in0, in1, in2, in3, in4, in5, 0.08839, 2) : bf16[2, 5, 256]
%1 = matmul(%0, in6) : bf16[2, 5, 8]
return %1""")

    def test_quantisation(self):
        graph = rewritten(aot(quantised_chain, inputs()))
        self.assertExpectedInline(graph, """\
%0 = fusion_pass.attention_rope_quant(in0, in1, in2, in3, in4, in5, 0.08839, 2, 128, fp32, 1e-10, False)
    : e4m3[2, 5, 256], f32[2, 2, 8]
%1 = %0[0]
%2 = %0[1]
%3 = mul(%1, %2)
%4 = matmul(%3, in6) : f32[2, 5, 8]
return %4""")

    def test_rotation_alone(self):
        q, _, _, _, cos, sin, weight = inputs()
        graph = rewritten(aot(opaque, (q, cos, sin, weight)))
        self.assertExpectedInline(graph, """\
%0 = fusion_pass.inverse_rope(in0, in1, in2, 2) : bf16[2, 5, 256]
%1 = matmul(%0, in3) : bf16[2, 5, 8]
return %1""")

    def test_merge_of_partials(self):
        graph = rewritten(aot(merged, chains.merge_inputs()))
        self.assertExpectedInline(graph, """\
%0 = fusion_pass.merge_partials_rope(in2, in0, None, in1, in3, in4, 2) : f32[2, 5, 256]
%1 = matmul(%0, in5) : f32[2, 5, 8]
return %1""")

    def test_batch_of_three(self):
        graph = rewritten(aot(chain, inputs(batch=3)))
        self.assertExpectedInline(graph, """\
%0 = fusion_pass.attention_rope(in0, in1, in2, in3, in4, in5, 0.08839, 2) : bf16[2, 15, 256]
%1 = matmul(%0, in6) : bf16[2, 15, 8]
return %1""")

    def test_decode(self):
        graph = rewritten(aot(chain, inputs(batch=3, tokens=1, keys=33)))
        self.assertExpectedInline(graph, """\
%0 = fusion_pass.attention_rope(in0, in1, in2, in3, in4, in5, 0.08839, 2) : bf16[2, 3, 256]
%1 = matmul(%0, in6) : bf16[2, 3, 8]
return %1""")

    def test_cached_prefill(self):
        graph = rewritten(aot(with_cache, (*inputs(keys=7), torch.randn(1, 9, chains.DIM).bfloat16())))
        self.assertExpectedInline(graph, """\
%0 = cat(in0, in1, 1)
%1 = constant_pad_nd(in2, 9, 0, 0)
%2 = fusion_pass.attention_rope(in3, %0, %1, in4, in5, in6, 0.08839, 2) : bf16[2, 5, 256]
%3 = matmul(%2, in7) : bf16[2, 5, 8]
return %3, %0""")

    def test_dynamic_tokens(self):
        graph = rewritten(aot(chain, inputs(), dynamic=True))
        self.assertExpectedInline(graph, """\
%0 = fusion_pass.attention_rope(in1, in2, in4, in5, in6, in7, 0.08839, 2) : bf16[2, T, 256]
%1 = matmul(%0, in8) : bf16[2, T, 8]
return %1""")

    def test_raw_make_fx(self):
        graph = rewritten(raw(chain, inputs()))
        self.assertExpectedInline(graph, """\
%0 = fusion_pass.attention_rope(in0, in1, in2, in3, in4, in5, 0.08839, 2) : bf16[2, 5, 256]
%1 = matmul(%0, in6) : bf16[2, 5, 8]
return %1""")

    def test_two_layers(self):
        back = torch.randn(chains.GROUPS * chains.RANK, 512).bfloat16()
        graph = rewritten(aot(two_layers, (*inputs(), back)))
        self.assertExpectedInline(graph, """\
%0 = fusion_pass.attention_rope(in0, in1, in2, in3, in4, in5, 0.08839, 2) : bf16[2, 5, 256]
%1 = matmul(%0, in6) : bf16[2, 5, 8]
%2 = matmul(%1, in7) : bf16[5, 512]
%3 = fusion_pass.attention_rope(%2, in1, in2, in3, in4, in5, 0.08839, 2) : bf16[2, 5, 256]
%4 = matmul(%3, in6) : bf16[2, 5, 8]
return %4""")


def with_cache(q, kv, mask, sink, cos, sin, weight, cache):
    """New keys behind cached ones; the mask covers the new ones only."""
    everything = torch.cat([cache, kv], 1)
    mask = torch.nn.functional.pad(mask, (cache.shape[1], 0))
    return chain(q, everything, mask, sink, cos, sin, weight), everything


def two_layers(q, kv, mask, sink, cos, sin, weight, back):
    y = chain(q, kv, mask, sink, cos, sin, weight)
    q = (y.flatten(-2) @ back).unflatten(-1, (chains.HEADS, chains.DIM))
    return chain(q, kv, mask, sink, cos, sin, weight)


LEVELS = {
    "aot": lambda fn, args: aot(fn, args), "raw": lambda fn, args: raw(fn, args),
    "export": lambda fn, args: torch.export.export(Called(fn), args, strict=False),
    "export, decomposed": lambda fn, args: torch.export.export(Called(fn), args, strict=False).run_decompositions(),
}


class Called(torch.nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, *args):
        return self.fn(*args)


def run(program, args):
    out = (program if isinstance(program, torch.fx.GraphModule) else program.module())(*args)
    return out[0] if isinstance(out, (tuple, list)) else out


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("batch, tokens, keys", [(1, 5, 7), (3, 5, 7), (3, 1, 33), (1, 1, 2)])
@pytest.mark.parametrize("fn, roles", [
    (chain, ("fmha", "inverse_rope", "bgemm")), (quantised_chain, ("fmha", "inverse_rope", "fp8_quant", "bgemm"))])
@torch.no_grad()
def test_every_level(fn, roles, batch, tokens, keys, level):
    args = inputs(batch, tokens, keys)
    program = LEVELS[level](fn, args)
    report = fusion_pass.rewrite(program, STRICT)
    assert [c.roles for c in report.fused] == [roles], str(report)
    if not isinstance(program, torch.fx.GraphModule) or level != "aot":
        out, wanted = run(program, args), fn(*args)
        assert ((out - wanted).float().norm() / wanted.float().norm()) < 2e-2


# ------------------------------------------------------------------------------------------------- negatives


def forward_rotation(q, kv, mask, sink, cos, sin, weight):
    return project(rotate(attention(q, kv, mask, sink), cos, -sin), weight)


def neox_pairs(q, kv, mask, sink, cos, sin, weight):
    o = attention(q, kv, mask, sink)
    first, second = o[..., -chains.ROPE:].float().chunk(2, -1)
    c, s = cos.unsqueeze(2), sin.unsqueeze(2)
    turned = torch.cat([first * c + second * s, second * c - first * s], -1).to(o.dtype)
    return project(torch.cat([o[..., :-chains.ROPE], turned], -1), weight)


def other_positions(q, kv, mask, sink, cos, sin, weight):
    """Every head has its own position."""
    cos, sin = (torch.stack([t.roll(h, 1) for h in range(chains.HEADS)], 2) for t in (cos, sin))
    o = attention(q, kv, mask, sink)
    even, odd = o[..., -chains.ROPE::2].float(), o[..., -chains.ROPE + 1::2].float()
    turned = torch.stack([even * cos + odd * sin, odd * cos - even * sin], -1).flatten(-2).to(o.dtype)
    return project(torch.cat([o[..., :-chains.ROPE], turned], -1), weight)


def swapped_tables(q, kv, mask, sink, cos, sin, weight):
    o = rotate(attention(q, kv, mask, sink), cos, sin)
    even, odd = o[..., -chains.ROPE::2], o[..., -chains.ROPE + 1::2]
    return project(torch.cat([o[..., :-chains.ROPE], torch.stack([odd, even], -1).flatten(-2)], -1), weight)


def block_of_64(q, kv, mask, sink, cos, sin, weight):
    o = rotate(attention(q, kv, mask, sink), cos, sin)
    return project(quantise(o.reshape(*o.shape[:2], chains.GROUPS, 256), 64), weight)


def rotated_output_returned(q, kv, mask, sink, cos, sin, weight):
    o = rotate(attention(q, kv, mask, sink), cos, sin)
    return project(o, weight), o


NEVER = [(forward_rotation, "forward rotation"), (neox_pairs, "half a rotation apart"), (other_positions, ""),
         (swapped_tables, ""), (block_of_64, "block of 32"), (rotated_output_returned, "escapes")]


@pytest.mark.parametrize("fn, reason", NEVER, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("level", ["aot", "raw"])
def test_never_fused(fn, reason, level):
    gm = LEVELS[level](fn, inputs())
    before = gm.code
    report = fusion_pass.rewrite(gm, STRICT)
    assert not report.fused and gm.code == before, str(report)
    assert reason in " ".join(miss.reason for miss in report.near_misses)


def probabilities_returned(q, kv, mask, sink, cos, sin, weight):
    kept = []

    def softmax(x, dim):
        kept.append(torch.softmax(x, dim))
        return kept[-1]
    return project(rotate(attention(q, kv, mask, sink, softmax), cos, sin), weight), kept[0]


def output_returned(q, kv, mask, sink, cos, sin, weight):
    o = attention(q, kv, mask, sink)
    return project(rotate(o, cos, sin), weight), o


@torch.no_grad()
def test_a_returned_output_keeps_the_attention():
    """Only the rotation is fused behind it: nothing is computed twice."""
    gm = aot(output_returned, inputs())
    report = fusion_pass.rewrite(gm, STRICT)
    assert all("fmha" not in c.roles for c in report.fused), str(report)
    assert "fusion_pass.attention" not in text(gm)
    assert any("escapes" in m.reason for m in report.near_misses), str(report)


@torch.no_grad()
def test_returned_probabilities_keep_their_value():
    """Whoever reads them still gets them, and the report says what that costs."""
    gm = raw(probabilities_returned, inputs())
    wanted = gm(*inputs())
    report = fusion_pass.rewrite(gm, STRICT)
    for value, expected in zip(gm(*inputs()), wanted):
        assert ((value - expected).float().norm() / expected.float().norm()) < 2e-2
    assert all("read by others" in c.gate for c in report.fused if "fmha" in c.roles), str(report)


def in_place(q, kv, mask, sink, cos, sin, weight):
    o = attention(q, kv, mask, sink)
    even, odd = o[..., -chains.ROPE::2].float(), o[..., -chains.ROPE + 1::2].float()
    c, s = cos.unsqueeze(2), sin.unsqueeze(2)
    o[..., -chains.ROPE:].copy_(torch.stack([even * c + odd * s, odd * c - even * s], -1).flatten(-2))
    return project(o, weight)


def test_mutation():
    """Fused where the tracer made it functional; a raw in-place graph is left alone."""
    assert len(fusion_pass.rewrite(aot(in_place, inputs()), STRICT).fused) == 1
    assert len(fusion_pass.rewrite(raw(in_place, inputs()), STRICT).fused) == 1
    gm = raw(in_place, inputs(), functional=False)
    before = gm.code
    report = fusion_pass.rewrite(gm, STRICT)
    assert not report.fused and gm.code == before


def test_dropout_in_training():
    def fn(*args):
        return project(rotate(attention(*args[:4], softmax=lambda x, dim: torch.nn.functional.dropout(
            torch.softmax(x, dim), 0.5, True)), *args[4:6]), args[6])

    report = fusion_pass.rewrite(aot(fn, inputs()), STRICT)
    assert all("fmha" not in c.roles for c in report.fused), str(report)


def test_dropout_in_evaluation():
    def fn(*args):
        return project(rotate(attention(*args[:4], softmax=lambda x, dim: torch.nn.functional.dropout(
            torch.softmax(x, dim), 0.5, False)), *args[4:6]), args[6])

    report = fusion_pass.rewrite(aot(fn, inputs()), STRICT)
    assert [c.roles for c in report.fused] == [("fmha", "inverse_rope", "bgemm")]


def test_autograd():
    args = [a.float().requires_grad_() if a.is_floating_point() else a for a in inputs()]
    torch._dynamo.reset()
    before = len(fusion_pass.reports())
    out = torch.compile(chain, backend="fusion_pass", options={"inner": "aot_eager", "strict": True})(*args)
    out.sum().backward()
    found = args[0].grad.clone()
    args[0].grad = None
    chain(*args).sum().backward()
    torch.testing.assert_close(found, args[0].grad)
    for report in fusion_pass.reports()[before:]:
        assert not report.fused and any("training" in note for note in report.notes)
