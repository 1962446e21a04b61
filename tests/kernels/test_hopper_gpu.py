# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels on an sm_90 GPU: every form against formulas in float64, outputs poisoned beforehand, and chains
of early launched kernels in CUDA graphs against the same calls one by one."""

import pytest
import torch
from op_cases import Maker, gathered_formula, relative_error, rope_formula
from test_gpu import SCALE, outputs, sampled, two_pools

pytest.importorskip("triton")

from fusion_pass.kernels import reference  # noqa: E402
from fusion_pass.kernels.reference.paged import decode_pages  # noqa: E402
from fusion_pass.kernels.tuning import bgemm as tuning  # noqa: E402

pytestmark = pytest.mark.gpu
FORMS = [row[i] for row in tuning.HOPPER_STREAMING for i in (1, 2)] + [form for form, *_ in tuning.HOPPER_WAVES]


@pytest.fixture(autouse=True)
def hopper():
    from fusion_pass.kernels.gluon.gate import hopper_reason

    if reason := hopper_reason(torch.device("cuda")):
        pytest.skip(reason)


@pytest.mark.parametrize("heads", [128, 64, 16])
@pytest.mark.parametrize("tokens", [1, 3, 8, 33, 66, 140, 300])
def test_attention(tokens, heads):
    """Split and unsplit calls, one and several jobs per multiprocessor; NaN rows that nothing visible points at."""
    from fusion_pass.kernels.gluon import launchers

    first, second, rope = two_pools(tokens, heads)
    q, kv, indices, sink = first
    pick = sampled(tokens)
    want = gathered_formula(q[pick], kv, indices[pick], sink, SCALE, None, second[1], second[2][pick], second[3][pick])
    groups = max(1, heads // 8)
    rotated = rope_formula(want, *(t[pick] for t in rope), groups)
    args, outs = outputs("attention_gathered", (*first, SCALE, *second))
    launchers._launch_gathered(outs, *args)
    assert torch.isfinite(outs[0]).all() and relative_error(outs[0][pick], want) < 4e-3
    args, outs = outputs("attention_gathered_rope", (*first, *rope, SCALE, groups, *second))
    launchers._launch_gathered_rope(outs, *args)
    assert torch.isfinite(outs[0]).all() and relative_error(outs[0][:, pick], rotated) < 4e-3
    for rule, pack in (("fp32", False), ("ue8m0", True)):
        quant = (SCALE, groups, 128, rule, 1e-10, pack)
        args, outs = outputs("attention_gathered_rope_quant", (*first, *rope, *quant, *second))
        launchers._launch_gathered_quant(outs, *args)
        codes, scales = outs
        assert (scales[..., tokens:] == 0).all()
        values = reference.dequantise(codes, scales)
        assert torch.isfinite(values).all() and relative_error(values[:, pick], rotated) < 0.04


def paged_pools(m, tokens, heads, sizes, paddings, count=40):
    """q, sink, rope and two caches whose first row and second page are NaN and unlisted; as the ops take them, and the
    same as bf16 pools for the gathered ops."""
    pools, caches = [], []
    for size, padding, columns in zip(sizes, paddings, (128, 700)):
        data = m.pages(count * 64 // size, size, padding)
        data[0, :576], data[1] = 0xFF, 0xFF
        data[0, size * 576 : size * 576 + 8] = 0xFF
        indices = m.integers(-1, len(data) * size + 3, (tokens, columns))
        indices[(indices == 0) | (indices // size == 1)] = -1
        lengths = m.integers(0, columns + 1, (tokens,))
        indices[0] = -1
        if tokens > 2:
            indices[2, :64], lengths[1] = -1, 0
        caches.append((data, indices, lengths, size))
        pools.append((decode_pages(data, size, torch.bfloat16), indices, lengths))
    q, sink = m.normal(tokens, heads, 512), m.normal(heads, dtype=torch.float32)
    return q, sink, m.rope(tokens), caches, pools


@pytest.mark.parametrize(
    ("sizes", "paddings"),
    [((64, 64), (64, 0)), ((64, 2), (64, 48)), ((64, 8), (64, 40))],
    ids=["pages_of_64", "pages_of_64_and_2", "not_aligned"],
)
@pytest.mark.parametrize("heads", [128, 64])
@pytest.mark.parametrize("tokens", [1, 3, 8, 33, 66, 140, 300])
def test_pages(monkeypatch, tokens, heads, sizes, paddings):
    """Both caches, ragged lists and lengths, against the same keys as bf16 pools: the kernel that decodes them itself
    gives the same bits. The last case is not aligned and is decoded in front of the attention."""
    from fusion_pass.kernels.gluon import attention, launchers

    q, sink, rope, ((a, i, n, size), (b, j, k, more)), (first, second) = paged_pools(
        Maker("cuda", torch.bfloat16), tokens, heads, sizes, paddings
    )
    aligned = attention.pages_aligned(a) and attention.pages_aligned(b)
    assert aligned == (paddings != (64, 40))
    plan = attention.plan  # of bf16 rows, for both: another number of shares gives other bits
    monkeypatch.setattr(attention, "plan", lambda *args, **_: plan(*args, cut=aligned))
    pools, groups = (n, b, j, k, more), heads // 8
    for name, paged, gathered, extra in (
        ("", launchers._launch_paged, launchers._launch_gathered, (SCALE,)),
        ("_rope", launchers._launch_paged_rope, launchers._launch_gathered_rope, (*rope, SCALE, groups)),
        ("_rope_quant", launchers._launch_paged_quant, launchers._launch_gathered_quant, (*rope, SCALE, groups)),
    ):
        rule = (128, "ue8m0", 1e-10, True) if "quant" in name else ()
        args, got = outputs(f"attention_paged_fp8{name}", (q, a, i, sink, *extra, size, *rule, *pools))
        paged(got, *args)
        args, want = outputs(f"attention_gathered{name}", (q, *first[:2], sink, *extra, *rule, first[2], *second))
        gathered(want, *args)
        for x, y in zip(got, want, strict=True):
            if aligned:
                assert torch.equal(x.view(torch.uint8), y.view(torch.uint8)), name
        if "quant" in name:
            got, want = [reference.dequantise(*got)], [reference.dequantise(*want)]
        assert torch.isfinite(got[0]).all() and relative_error(got[0], want[0]) < (0.03 if "quant" in name else 4e-3)


def test_decoded_values():
    """Every code under exponents over the whole range: with one key per token the output is the decoded row."""
    from fusion_pass.kernels.gluon import launchers

    m = Maker("cuda", torch.bfloat16)
    data = m.pages(16, 64, 64)
    values = data[:, : 64 * 576].view(16, 64, 576)
    values[..., :448] = torch.arange(448, device="cuda").remainder(256).to(torch.uint8)
    nan = (values[..., :448] & 0x7F) == 0x7F
    values[..., :448][nan] = 0x7E
    exponents = torch.arange(16 * 64, device="cuda").remainder(247).to(torch.uint8)
    data[:, 64 * 576 : 64 * 584] = exponents.view(16, 64, 1).expand(16, 64, 8).reshape(16, 512)
    tokens = 16 * 64
    indices = torch.full((tokens, 128), -1, dtype=torch.int32, device="cuda")
    indices[torch.arange(tokens), torch.arange(tokens) % 128] = torch.arange(tokens, dtype=torch.int32, device="cuda")
    q = torch.zeros(tokens, 64, 512, dtype=torch.bfloat16, device="cuda")
    args, (got,) = outputs("attention_paged_fp8", (q, data, indices, None, SCALE, 64))
    launchers._launch_paged((got,), *args)
    rows = decode_pages(data, 64, torch.bfloat16)
    # the tensor cores' sums lose the sign of zero and, below bf16's normal range, the value
    normal = rows.abs() >= torch.finfo(torch.bfloat16).tiny
    assert torch.equal(got[:, 0][normal], rows[normal])
    assert (got[:, 0][~normal].abs() <= torch.finfo(torch.bfloat16).tiny).all()
    values[5, 7, 300] = 0x7F  # a NaN code is NaN
    launchers._launch_paged((got,), *args)
    assert torch.isnan(got[5 * 64 + 7]).all() and torch.isfinite(got[: 5 * 64 + 7]).all()


@pytest.mark.parametrize(("packed", "stored"), [(False, "fp32"), (True, "e8m0"), (False, "bytes")])
@pytest.mark.parametrize("groups", [16, 8])
@pytest.mark.parametrize("tokens", [1, 7, 16, 17, 33, 64, 65, 128, 129, 300, 1030])
def test_product(tokens, groups, packed, stored):
    """The form of the table for each number of tokens and both shapes, all storages of scales."""
    from fusion_pass.kernels.gluon import launchers

    case = Maker("cuda").bgemm(groups, tokens, 1024, 4096, packed=packed, stored=stored)
    args, outs = outputs("fp8_bgemm", case)
    launchers._launch_bgemm(outs, *args)
    assert relative_error(outs[0], reference.fp8_bgemm(*case, out_dtype=torch.float64)) < 3e-3


@pytest.mark.parametrize("form", dict.fromkeys(FORMS), ids=str)
def test_forms(form):
    """Every form at token counts that fill, cut and exceed its tiles, and where K is no multiple of its unrolled loop's
    turn of eight blocks."""
    from fusion_pass.kernels.gluon import bgemm

    for tokens in sorted({1, form.tokens - 1, form.tokens, form.tokens + 1, 300}):
        for width in (4096, 1536):
            codes, scales, *weight = Maker("cuda").bgemm(8, tokens, 1024, width)
            case = (codes, scales / 8, *weight)  # within the range of float16
            want = reference.fp8_bgemm(*case, out_dtype=torch.float64)
            for dtype in (torch.bfloat16, torch.float16):
                out = torch.full((tokens, 8, 1024), float("nan"), dtype=dtype, device="cuda")
                bgemm.launch(*case, out, form=form)
                assert relative_error(out, want) < 3e-3, (tokens, width, dtype)


@pytest.mark.parametrize("padding", [None, 40, 64], ids=["rows", "pages decoded first", "pages"])
@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16, 33, 64])
def test_early_launches(tokens, padding):
    """Two layers in one CUDA graph, replayed back to back: every kernel waits for what it reads, and none overwrites
    what a kernel before it still reads."""
    ops, m = torch.ops.fusion_pass, Maker("cuda", torch.bfloat16)
    first, second, rope = two_pools(tokens, 128)
    weights = [Maker("cuda", seed=s).bgemm(16, 1, 1024, 4096)[2:] for s in (1, 2)]
    sizes = (SCALE, 16)
    if padding is not None:  # 40 bytes behind each page: not aligned
        cache, columns = m.pages(64, 64, padding), m.integers(-1, 4096, (tokens, 1152))

    def layer(q, weight):
        if padding is not None:
            codes, scales = ops.attention_paged_fp8_rope_quant(q, cache, columns, first[3], *rope, *sizes, 64)
        else:
            more = dict(zip(("lengths", "extra_kv", "extra_indices", "extra_lengths"), second))
            codes, scales = ops.attention_gathered_rope_quant(q, *first[1:], *rope, *sizes, **more)
        return ops.fp8_bgemm(codes, scales, *weight)

    q = first[0].clone()
    want = [layer(q, w) for w in weights]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [layer(q, w) for w in weights]
    for round_ in range(3):
        q.copy_(first[0] * (1 + round_))
        torch.cuda.synchronize()
        want = []
        for w in weights:
            want.append(layer(q, w))
            torch.cuda.synchronize()
        for _ in range(10):
            for out in got:
                out.fill_(float("nan"))
            graph.replay()
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(("tokens", "heads", "splits"), [
    (1, 128, 18), (3, 128, 7), (8, 128, 6), (16, 128, 4), (33, 128, 2), (60, 64, 2), (40, 16, 3),
    (67, 128, 18), (70, 128, 4), (90, 128, 2), (140, 64, 6), (270, 64, 20),
])  # fmt: skip
def test_shares(monkeypatch, tokens, heads, splits):
    """Shares of an odd number of tiles, of few and of no keys (lengths), of all tokens or of a last wave's; twice the
    same bits."""
    from fusion_pass.kernels.gluon import launchers

    tuned = launchers.attention.tuning_data
    blocks = -(-heads // 64)
    last = tokens * blocks % 132 // blocks if tokens * blocks > 132 else tokens
    monkeypatch.setattr(tuned, "hopper_plan", lambda *_: tuned.Plan(last, splits))
    first, second, rope = two_pools(tokens, heads)
    q, kv, indices, sink = first
    want = gathered_formula(q, kv, indices, sink, SCALE, None, second[1], second[2], second[3])
    groups = max(1, heads // 8)
    for op, launch, more, expected in (
        ("attention_gathered", launchers._launch_gathered, (), want),
        ("attention_gathered_rope", launchers._launch_gathered_rope, (*rope,), rope_formula(want, *rope, groups)),
    ):
        call = (*first, *more, SCALE, *((groups,) if more else ()), *second)
        results = []
        for _ in range(2):
            args, outs = outputs(op, call)
            launch(outs, *args)
            results.append(outs[0])
        assert torch.isfinite(results[0]).all() and relative_error(results[0], expected) < 4e-3
        assert torch.equal(*results)
    quant = (SCALE, groups, 128, "ue8m0", 1e-10, True)
    args, outs = outputs("attention_gathered_rope_quant", (*first, *rope, *quant, *second))
    launchers._launch_gathered_quant(outs, *args)
    assert relative_error(reference.dequantise(*outs), rope_formula(want, *rope, groups)) < 0.04
