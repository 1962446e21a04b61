# SPDX-License-Identifier: Apache-2.0
"""The KvSplit merge on synthetic partials: against a float64 merge and against the serial loop.

No attention is involved: partials, maxima, sums and sinks are made up, so that cases no attention would produce at
hand (huge spreads, empty rows, one dominating partial at the end) are reached. Without a GPU a smaller grid of the same
cases runs in Triton's interpreter.
"""

import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from fusion_pass.kernels.reduction import KV_SPLITS, KvSplitDecision  # noqa: E402
from fusion_pass.kernels.triton import merge, rope_quant  # noqa: E402

GPU = torch.cuda.is_available()
COUNTS = [1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 18, 31, 33, 64, 65, 127, 128, 200, 257] if GPU else [1, 2, 5, 9, 19]
DIMS = [64, 128, 256, 512] if GPU else [64]
TOKENS, HEADS = (3, 8) if GPU else (1, 2)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter: exp2(-inf), 1/0


def layout(kv_split, width=None, *, unroll=2, whole=False, warps=1):
    """A fixed layout, so that few kernels are compiled: run-time loop unless ``whole``."""
    return KvSplitDecision(kv_split, "test", width or 64, warps, unroll, unroll_limit=32 if whole else 0)


def make_maxima(kind, count, generator):
    shape = (count, TOKENS, HEADS)
    noise = torch.randn(shape, generator=generator)
    if kind == "random":
        top = noise * 4
    elif kind == "equal":
        top = torch.full(shape, 3.5)
    elif kind == "spread":  # rescaling factors down to exp(-2e4) = 0, and large magnitudes
        top = noise * 1e4
    elif kind == "ascending":  # every partial moves the maximum, the last dominates
        top = torch.arange(count).float()[:, None, None].expand(shape) * 30
    elif kind == "dominating_last":
        top = noise.clone()
        top[-1] = 500.0
    elif kind == "descending":
        top = -torch.arange(count).float()[:, None, None].expand(shape) * 30
    elif kind == "empty_mixed":  # empty partials in between, one row empty throughout
        top = noise * 4
        top[torch.rand(shape, generator=generator) < 0.5] = -math.inf
        top[:, 0, 0] = -math.inf
    elif kind == "all_empty":
        top = torch.full(shape, -math.inf)
    return top.clone()


KINDS = ["random", "equal", "spread", "ascending", "dominating_last", "descending", "empty_mixed", "all_empty"]


def make_case(kind, count, dim, device, *, stats_form, sink, dtype=torch.float32, seed=0):
    """(partials, lse or max, sum or None, sink or None). Unused rows (empty partials) hold NaN."""
    generator = torch.Generator().manual_seed(seed * 1000 + count)
    top = make_maxima(kind, count, generator)
    total = None
    partials = torch.randn(count, TOKENS, HEADS, dim, generator=generator)
    if stats_form == "sum":
        total = torch.rand(top.shape, generator=generator) * 50 + 0.5
        partials = partials * total[..., None]
        # Empty may also be said by the sum alone, with any maximum.
        by_sum = torch.rand(top.shape, generator=generator) < 0.2
        if kind == "empty_mixed":
            total[by_sum] = 0.0
        total[top == -math.inf] = 0.0
    partials = partials.to(dtype)
    empty = (top == -math.inf) if total is None else (total == 0)
    partials[empty] = float("nan")
    sinks = None
    if sink:
        # near the maxima, far below, -inf (no sink on this head), far above
        values = torch.tensor([0.7, -90.0, -math.inf, 40.0, 2.0, -1.0, 0.0, 9.0])
        sinks = values[:HEADS].to(device)
    moved = [None if t is None else t.to(device) for t in (partials, top, total)]
    return (*moved, sinks)


def reference(partials, top, total, sink, stat_scale=1.0):
    """The merge in float64: rows [T, H, D], their maximum and denominator (sink included)."""
    weight = torch.ones_like(top, dtype=torch.float64) if total is None else total.double()
    top = top.double().masked_fill(weight == 0, -math.inf)
    rows = partials.double().masked_fill((top == -math.inf)[..., None], 0.0)
    highest = top.amax(0)
    if sink is not None:
        highest = torch.maximum(highest, sink.double()[None, :] / stat_scale)
    shift = highest.masked_fill(highest == -math.inf, 0.0)
    factor = torch.exp(stat_scale * (top - shift))
    denominator = (factor * weight).sum(0)
    if sink is not None:
        denominator = denominator + torch.exp(stat_scale * (sink.double() / stat_scale - shift))
    merged = (rows * factor[..., None]).sum(0) / denominator.masked_fill(denominator == 0, 1.0)[..., None]
    return merged, highest, denominator


def row_error(got, expected):
    """Largest error of a row relative to its largest entry."""
    scale = expected.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    return ((got.double() - expected.double()).abs() / scale).max().item()


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("stats_form,sink", [("lse", False), ("lse", True), ("sum", False), ("sum", True)])
def test_against_float64_and_serial(device, count, dim, stats_form, sink):
    kinds = KINDS if GPU else KINDS[(COUNTS.index(count) + sink) % 2 :: 2]
    for kind in kinds:
        case = make_case(kind, count, dim, device, stats_form=stats_form, sink=sink)
        expected, highest, denominator = reference(*case)
        serial = None
        for kv_split in KV_SPLITS:
            want_stats = (kv_split + count) % 2 == 0
            out, stats = merge.merge_partials(*case, return_stats=want_stats, decision=layout(kv_split, min(dim, 128)))
            where = f"{kind}, KvSplit {kv_split}"
            assert torch.isfinite(out).all(), where
            assert row_error(out, expected) < 1e-5, where
            if want_stats:
                assert torch.equal(stats[..., 0], highest.float()), where
                torch.testing.assert_close(stats[..., 1].double(), denominator, rtol=1e-5, atol=0)
            else:
                assert stats.numel() == 0
            if serial is None:
                serial = out
            # Agreement with the serial loop: element by element, and in the sums the upstream kernel was judged by.
            assert row_error(out, serial) < 1e-5, where
            absolute = serial.abs().sum().item()
            assert abs(out.double().sum().item() - serial.double().sum().item()) <= 1e-5 * max(absolute, 1e-30), where
            assert abs(out.abs().sum().item() - absolute) <= 1e-5 * max(absolute, 1e-30), where
        if kind == "all_empty":
            assert (serial == 0).all()
        if kind == "empty_mixed":
            assert (serial[0, 0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_split", KV_SPLITS)
def test_half_precision_partials(device, dtype, kv_split):
    case = make_case("empty_mixed", 9, 128, device, stats_form="lse", sink=True, dtype=dtype)
    expected, _, _ = reference(*case)
    out, _ = merge.merge_partials(*case, out_dtype=torch.float32, decision=layout(kv_split))
    assert row_error(out, expected) < 1e-5  # the partials' rounding is in both
    same, _ = merge.merge_partials(*case, decision=layout(kv_split))
    assert same.dtype == dtype and torch.equal(same, out.to(dtype))


@pytest.mark.parametrize("stat_scale", [math.log(2.0), 512**-0.5])
@pytest.mark.parametrize("kv_split", [1, 4])
def test_stat_scale(device, stat_scale, kv_split):
    """Maxima in base 2, and maxima of unscaled scores; the sink stays a natural logit."""
    case = make_case("random", 6, 128, device, stats_form="sum", sink=True)
    expected, highest, denominator = reference(*case, stat_scale=stat_scale)
    out, stats = merge.merge_partials(
        *case, stat_scale=stat_scale, return_stats=True, decision=layout(kv_split)
    )
    assert row_error(out, expected) < 1e-5
    torch.testing.assert_close(stats[..., 0].double(), highest, rtol=1e-6, atol=0)
    torch.testing.assert_close(stats[..., 1].double(), denominator, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kv_split", KV_SPLITS)
@pytest.mark.parametrize("count", [1, 5, 18, 33] if GPU else [5, 18])
def test_unrolled_and_looped_are_the_same(device, kv_split, count):
    """A loop unrolled whole is padded to a bucket of steps; the padding must not change a bit."""
    case = make_case("empty_mixed", count, 64, device, stats_form="sum", sink=True)
    looped, a = merge.merge_partials(*case, return_stats=True, decision=layout(kv_split, unroll=1))
    whole, b = merge.merge_partials(*case, return_stats=True, decision=layout(kv_split, whole=True))
    if GPU:  # the compiler may contract multiply-adds differently
        assert row_error(whole, looped) < 1e-6
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)
    else:
        assert torch.equal(whole, looped) and torch.equal(a, b)


def test_step_buckets_bound_the_number_of_kernels():
    for kv_split in KV_SPLITS:
        for limit in (0, 18, 32):
            compiled = {merge.unrolled_steps(count, kv_split, limit) for count in range(1, 1025)}
            assert len(compiled) <= 19
            for count in range(1, 1025):
                steps = merge.unrolled_steps(count, kv_split, limit)
                assert steps == 0 or (steps * kv_split >= count and steps <= limit)


def test_inputs_may_be_strided(device):
    partials, top, total, sink = make_case("random", 5, 64, device, stats_form="sum", sink=True)
    strided = [t.movedim(0, -1).contiguous().movedim(-1, 0) for t in (partials, top, total)]
    out, _ = merge.merge_partials(*strided, sink.repeat_interleave(2)[::2], decision=layout(2))
    expected, _ = merge.merge_partials(partials, top, total, sink, decision=layout(2))
    assert torch.equal(out, expected)


def test_no_tokens(device):
    partials = torch.empty(4, 0, 8, 512, device=device)
    out, stats = merge.merge_partials(partials, torch.empty(4, 0, 8, device=device), return_stats=True)
    assert out.shape == (0, 8, 512) and stats.shape == (0, 8, 2)


def tables(tokens, half, device):
    angle = torch.linspace(0.3, 30.0, tokens * half, device=device).reshape(tokens, half)
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("kv_split", KV_SPLITS)
def test_rope_epilogue_is_the_standalone_kernels(device, kv_split):
    case = make_case("empty_mixed", 7, 128, device, stats_form="lse", sink=True)
    cos, sin = tables(TOKENS, 16, device)
    merged, _ = merge.merge_partials(*case, decision=layout(kv_split))
    expected = rope_quant.inverse_rope(merged, cos, sin, 2)
    out = merge.merge_partials_rope(*case, cos, sin, 2, decision=layout(kv_split))
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-7)
    narrow = merge.merge_partials_rope(*case, cos, sin, 2, out_dtype=torch.bfloat16, decision=layout(kv_split))
    assert narrow.dtype == torch.bfloat16 and torch.equal(narrow, out.bfloat16())


@pytest.mark.parametrize("kv_split", [1, 2, 16])
@pytest.mark.parametrize("width", [128, 256])
@pytest.mark.parametrize("rule,pack,block", [("fp32", False, 128), ("ue8m0", False, 32), ("ue8m0", True, 64)])
def test_quant_epilogue_is_the_standalone_kernels(device, kv_split, width, rule, pack, block):
    """Merged in fp32, then rotated and quantised from fp32: as the merge to fp32 followed by the standalone kernel."""
    case = make_case("empty_mixed", 5, 256, device, stats_form="lse", sink=True)
    cos, sin = tables(TOKENS, 32, device)
    decision = layout(kv_split, width)
    merged, _ = merge.merge_partials(*case, decision=decision)
    expected_codes, expected_scales = rope_quant.inverse_rope_quant(merged, cos, sin, 2, block, rule, 1e-10, pack)
    codes, scales = merge.merge_partials_rope_quant(*case, cos, sin, 2, block, rule, 1e-10, pack, decision=decision)
    if rule == "fp32":
        torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)
    else:
        assert torch.equal(scales, expected_scales)
    assert (scales[..., TOKENS:] == 0).all() and scales.shape[-1] == 4
    difference = (codes.float() - expected_codes.float()).abs()
    assert (difference <= expected_codes.float().abs() / 8 + 2**-9).all()
    assert (difference != 0).float().mean() < 2e-3


def test_tile_too_narrow_for_the_block(device):
    case = make_case("random", 2, 128, device, stats_form="lse", sink=False)
    cos, sin = tables(TOKENS, 16, device)
    with pytest.raises(ValueError, match="cannot quantise blocks of 128"):
        merge.merge_partials_rope_quant(*case, cos, sin, 2, decision=layout(1, 64))


@pytest.mark.gpu
@pytest.mark.parametrize("quant", [False, True])
@pytest.mark.parametrize("captured,replayed", [(2, 40), (40, 2), (40, 0)])
def test_captured_with_one_context_replayed_with_another(device, captured, replayed, quant):
    """Buffers of a fixed capacity of 40 partials; the graph is captured while ``captured`` of them are in use."""
    capacity, tokens, heads, dim = 40, 2, 16, 512
    sink = torch.randn(heads, device=device)
    cos, sin = tables(tokens, 32, device)
    partials = torch.empty(capacity, tokens, heads, dim, device=device)
    lse = torch.empty(capacity, tokens, heads, device=device)

    def fill(used, seed):
        generator = torch.Generator(device=device).manual_seed(seed)
        partials.fill_(float("nan"))  # what a producer leaves in slots it did not use
        lse.fill_(-math.inf)
        if used:
            partials[:used].normal_(generator=generator)
            lse[:used].normal_(generator=generator)

    def run():
        if quant:
            return merge.merge_partials_rope_quant(partials, lse, None, sink, cos, sin, 2)
        return merge.merge_partials(partials, lse, None, sink, return_stats=True)

    fill(captured, 0)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run()
    fill(replayed, 1)
    for out in outs:
        out.view(torch.uint8).fill_(0x7F)
    graph.replay()
    torch.cuda.synchronize()
    eager = run()
    for out, expected in zip(outs, eager):
        assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))
    if not quant:
        merged, _, _ = reference(partials, lse, None, sink)
        assert row_error(outs[0], merged) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("kv_split", [None, *KV_SPLITS])
@pytest.mark.parametrize("tokens", [1, 2])
def test_programmatic_dependent_launch(device, kv_split, tokens):
    """The merge launched dependent on its producer must not read the partials before they are written."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")
    count, heads, dim = 18, 128, 512
    source = torch.randn(count, tokens, heads, dim, device=device)
    lse = torch.randn(count, tokens, heads, device=device)
    partials = torch.empty_like(source)
    decision = merge.decide(partials, kv_split)
    with_pdl = replace(decision, pdl=True)
    expected, _ = merge.merge_partials(source, lse, decision=replace(decision, pdl=False))
    graph = torch.cuda.CUDAGraph()

    def chain():
        partials.fill_(float("nan"))
        torch.add(source, 0.0, out=partials)
        first, _ = merge.merge_partials(partials, lse, decision=with_pdl)
        second, _ = merge.merge_partials(partials, lse, decision=with_pdl)
        return first, second

    chain()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        outs = chain()
    for _ in range(20):
        graph.replay()
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(outs[0], expected) and torch.equal(outs[1], expected)
