# SPDX-License-Identifier: Apache-2.0
"""Extremes through the ops, by whichever kernel takes them and by the portable ones: 70,000 tokens (64-bit offsets), no
keys at all, and rows of NaN and infinity that no query attends."""

import pytest
import torch
from fusion_pass.kernels import reference
from fusion_pass.kernels.ops import SPECS, dispatch
from op_cases import DEVICES, Maker, gathered_formula, relative_error, rope_formula

MANY, SCALE = 70_000, 512**-0.5
PICK = [0, 1, 16_383, 16_384, 32_768, 65_535, 65_536, MANY - 1]


def call(name: str, args: tuple, kernels: str = "any", **more) -> tuple[torch.Tensor, ...]:
    """Op ``name``; kernels "portable": the Triton launcher into poisoned outputs, even where another comes first."""
    if kernels == "any":
        result = getattr(torch.ops.fusion_pass, name)(*args, **more)
        return result if isinstance(result, tuple) else (result,)
    args = SPECS[name].complete(args, more)
    outs = SPECS[name].empty(*args)
    for out in outs:
        out.view(torch.uint8).fill_(0x7F)
    dispatch.load_providers()
    portable = next(known for known in dispatch._launchers[name] if known.name == "triton")
    assert portable.refuses(*args) is None
    portable.launch(outs, *args)
    return outs


def free() -> None:
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["any", "portable"])
def test_many_tokens_gathered(kernels):
    """The FP8 chain at 70,000 tokens: queries, codes and pool beyond 2^31 elements, pool rows at the far end."""
    m = Maker("cuda", torch.bfloat16)
    q = torch.empty(MANY, 128, 512, dtype=torch.bfloat16, device="cuda").normal_(generator=m.generator)
    pool = torch.zeros(4_300_000, 512, dtype=torch.bfloat16, device="cuda")
    pool[-64:].normal_(generator=m.generator)
    indices = m.integers(pool.shape[0] - 64, pool.shape[0], (MANY, 16))
    rope, sink = m.rope(MANY), m.normal(128, dtype=torch.float32)
    assert min(q.numel(), pool.numel()) > 2**31
    quant = (128, "ue8m0", 1e-10, False)
    codes, scales = call("attention_gathered_rope_quant", (q, pool, indices, sink, *rope, SCALE, 16, *quant), kernels)
    assert codes.numel() > 2**31
    want = rope_formula(gathered_formula(q[PICK], pool, indices[PICK], sink, SCALE), *(t[PICK] for t in rope), 16)
    picked = reference.dequantise(codes[:, PICK], scales[..., PICK].contiguous())
    assert relative_error(picked, want) < 0.04
    del q, pool
    free()
    _, _, weight, factors = m.bgemm(16, 1, 128, 4096)
    (out,) = call("fp8_bgemm", (codes, scales, weight, factors), kernels)
    exact = reference.fp8_bgemm(
        codes[:, PICK], scales[..., PICK].contiguous(), weight, factors, out_dtype=torch.float64
    )
    assert relative_error(out[PICK], exact) < 4e-3
    del codes, scales, out
    free()


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["any", "portable"])
def test_many_tokens_dense_and_paged(kernels):
    m = Maker("cuda", torch.bfloat16)
    q = torch.empty(1, MANY, 64, 512, dtype=torch.bfloat16, device="cuda").normal_(generator=m.generator)
    kv, rope, sink = m.normal(1, MANY, 512), m.rope(1, MANY), m.normal(64, dtype=torch.float32)
    assert q.numel() > 2**31
    (out,) = call("attention_rope", (q, kv, None, sink, *rope, SCALE, 8), kernels, causal=True, window=100)
    columns = torch.arange(99, -1, -1, device="cuda")
    near = torch.tensor(PICK, device="cuda")[:, None] - columns
    want = gathered_formula(q[0, PICK], kv[0], near.clamp(min=-1), sink, SCALE)
    assert relative_error(out[:, PICK], rope_formula(want, *(t[0, PICK] for t in rope), 8)) < 4e-3
    pages, indices = m.pages(64, 8), m.integers(-1, 512, (MANY, 24))
    (out,) = call("attention_paged_fp8", (q[0], pages, indices, sink, SCALE, 8), kernels)
    rows = reference.decode_pages(pages, 8, torch.float64)
    assert relative_error(out[PICK], gathered_formula(q[0, PICK], rows, indices[PICK], sink, SCALE)) < 4e-3
    del q, out
    free()


@pytest.mark.gpu
def test_many_tokens_merge_and_epilogue():
    m = Maker("cuda", torch.bfloat16)
    partials = torch.empty(2, MANY, 32, 512, device="cuda").normal_(generator=m.generator)
    lse, rope = m.normal(2, MANY, 32, dtype=torch.float32), m.rope(MANY)
    assert partials.numel() > 2**31
    out, _ = call("merge_partials", (partials, lse, None, None))
    weights = torch.softmax(lse[:, PICK].double(), 0)
    want = (partials[:, PICK].double() * weights.unsqueeze(-1)).sum(0)
    assert relative_error(out[PICK], want) < 1e-6
    codes, scales = call("merge_partials_rope_quant", (partials, lse, None, None, *rope, 4))
    rotated = rope_formula(want, *(t[PICK] for t in rope), 4)
    assert relative_error(reference.dequantise(codes[:, PICK], scales[..., PICK].contiguous()), rotated) < 0.04
    del partials, codes
    free()
    o = torch.empty(MANY, 64, 512, dtype=torch.bfloat16, device="cuda").normal_(generator=m.generator)
    codes, scales = call("inverse_rope_quant", (o, *rope, 8))
    rotated = rope_formula(o[PICK], *(t[PICK] for t in rope), 8)
    assert relative_error(reference.dequantise(codes[:, PICK], scales[..., PICK].contiguous()), rotated) < 0.04
    (out,) = call("inverse_rope", (o, *rope, 8))
    assert relative_error(out[:, PICK], rotated) < 4e-3
    del o, out, codes
    free()


def without_keys(m: Maker, tokens: int):
    """(op, arguments, options) of attention with nothing to attend, each in another way."""
    q, kv, indices, sink = m.gathered(tokens, 16, 512, 30, 9)
    none, rope = torch.full_like(indices, -1), m.rope(tokens)
    wide = tuple(t[None] for t in rope)
    nothing = torch.zeros(1, tokens, 30, dtype=torch.bool, device=m.device)
    minus = torch.zeros(1, tokens, 30, device=m.device, dtype=m.dtype).masked_fill(~nothing, float("-inf"))
    zero = torch.zeros(tokens, dtype=torch.int32, device=m.device)
    pages = m.pages()
    for rest in ((sink,), (None,)):
        yield "attention_gathered", (q, kv, none, *rest), rope, {}
        yield "attention_gathered", (q, kv[:0], indices, *rest), rope, {}
        yield "attention_gathered", (q, kv, indices[:, :0], *rest), rope, {}
        yield "attention_gathered", (q, kv, indices, *rest), rope, {"lengths": zero}
        yield "attention_paged_fp8", (q, pages, none, *rest), rope, {"page_size": 8}
        yield "attention", (q[None], kv[None, :0], None, *rest), wide, {}
        yield "attention", (q[None], kv[None], nothing, *rest), wide, {}
        yield "attention", (q[None], kv[None], minus, *rest), wide, {}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_no_keys(device, tokens):
    """Zeros, with a sink and without; codes 0 and scales of the floor, padding columns zero."""
    m = Maker(device, torch.bfloat16)
    for name, head, rope, more in without_keys(m, tokens):
        more = dict(more)
        page = (more.pop("page_size"),) if "page_size" in more else ()
        (out,) = call(name, (*head, SCALE, *page), **more)
        assert (out == 0).all(), name
        (out,) = call(f"{name}_rope", (*head, *rope, SCALE, 2, *page), **more)
        assert (out == 0).all(), name
        for rule, pack in (("fp32", False), ("ue8m0", False), ("ue8m0", True)):
            quant = (128, rule, 1e-4, pack)
            codes, scales = call(f"{name}_rope_quant", (*head, *rope, SCALE, 2, *page, *quant), **more)
            assert (codes.view(torch.uint8) & 0x7F == 0).all(), name
            assert (scales[..., tokens:] == 0).all()
            used = scales[..., :tokens]
            if pack:
                assert (used == used.flatten()[0]).all() and (used & 0xFF > 0).all() and (used & 0xFF < 255).all()
            else:
                assert torch.isfinite(used).all() and (used > 0).all() and (used == used.flatten()[0]).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("tokens", [1, 5, 140])
def test_bad_rows_do_not_leak(device, bad, tokens):
    """Rows of NaN and infinity behind -1, behind a token's length, behind False and -inf, after the last causal key and
    before the window: bit for bit what zeros there give."""
    m = Maker(device, torch.bfloat16)
    heads = 16 if device == "cuda" else 4
    q, kv, indices, sink = m.gathered(tokens, heads, 512, 160, 20)
    indices = torch.where(indices % 4 == 3, -1, indices)  # every fourth row is listed behind the lengths only
    lengths = m.integers(1, 20, (tokens,))
    behind = torch.arange(20, device=device) >= lengths[:, None]
    indices = torch.where(behind, 3, indices)
    poisoned = kv.clone()
    poisoned[3::4] = bad
    clean = kv.clone()
    clean[3::4] = 0
    keep = torch.ones(1, tokens, 160, dtype=torch.bool, device=device)
    keep[..., 3::4] = False
    forms = [
        ("attention_gathered", lambda rows: (q, rows, indices, sink, SCALE), {"lengths": lengths}),
        ("attention", lambda rows: (q[None], rows[None], keep, sink, SCALE), {}),
        ("attention", lambda rows: (q[None], rows[None], keep, None, SCALE), {}),
        ("attention", lambda rows: (q[None], rows[None], masked(keep), sink, SCALE), {}),
    ]
    for name, args, more in forms:
        (got,), (want,) = call(name, args(poisoned), **more), call(name, args(clean), **more)
        assert torch.isfinite(got).all() and torch.equal(got, want), name
    if tokens <= 140:
        # Keys 0 .. 9 lie before every window, the last ones behind every query's own position.
        early, zeros = kv.clone(), kv.clone()
        first = 160 - tokens - 15
        early[:first], zeros[:first] = bad, 0
        args = [(q[None], rows[None], None, sink, SCALE) for rows in (early, zeros)]
        (got,), (want,) = (call("attention", a, causal=True, window=15) for a in args)
        assert torch.isfinite(got).all() and torch.equal(got, want)


def masked(keep: torch.Tensor) -> torch.Tensor:
    return torch.zeros(keep.shape, device=keep.device, dtype=torch.bfloat16).masked_fill(~keep, float("-inf"))
