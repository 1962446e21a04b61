# SPDX-License-Identifier: Apache-2.0
"""What the kernels of the chain do to each other's memory on an sm_90 GPU: merged partials that are discarded from the
L2 cache, and a weight that is brought there, or read, while the kernel before still runs."""

import pytest
import torch
from op_cases import Maker
from test_gpu import SCALE, two_pools
from test_hopper_gpu import hopper  # noqa: F401  (skips elsewhere)

pytest.importorskip("triton")

pytestmark = pytest.mark.gpu
GUARD = 1 << 16  # elements on both sides of the partials


def stream_through_the_cache():
    """Read and write more than the L2 cache holds."""
    torch.empty(1 << 27, dtype=torch.uint8, device="cuda").fill_(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tiling", [None, (4, 4)], ids=["a program per row", "4 rows per program"])
@pytest.mark.parametrize(("count", "tokens"), [(18, 1), (9, 3), (6, 8), (2, 33)])
def test_discarded_partials(count, tokens, tiling, dtype):
    """The result is that of a merge which leaves the partials alone, and nothing beside them is lost."""
    from fusion_pass.kernels.triton import merge, merge_rows
    from fusion_pass.kernels.triton.epilogue import quant_mode

    if tiling and (count > 4 or dtype != torch.bfloat16):
        pytest.skip("not a form of this kernel")
    torch.manual_seed(0)
    shape = (count, tokens, 128, 512)
    size = count * tokens * 128 * 512
    buffer = torch.empty(size + 2 * GUARD, dtype=dtype, device="cuda")
    partials = buffer[GUARD:-GUARD].view(shape)
    values, lse = torch.randn(shape, device="cuda").to(dtype), torch.randn(shape[:3], device="cuda")
    angle = torch.rand(tokens, 32, device="cuda") * 6
    epilogue = merge.Epilogue(angle.cos(), angle.sin(), 16, quant_mode("ue8m0", False), 128, 1e-10)
    results = []
    for last_use in (False, True, True):
        buffer.fill_(7.0)
        partials.copy_(values)
        codes = torch.full((16, tokens, 4096), 255, dtype=torch.uint8, device="cuda")
        scales = torch.full((16, 32, (tokens + 3) // 4 * 4), float("nan"), device="cuda")
        if tiling:
            rows, warps = tiling
            merge_rows.merge_rows_into(
                codes, scales, partials, lse, None, epilogue, rows=rows, num_warps=warps, pdl=True, last_use=last_use
            )
        else:
            decision = merge.decide(partials, None, epilogue=True)
            merge.merge_into(codes, scales, None, partials, lse, None, None, 1.0, decision, epilogue, last_use=last_use)
        stream_through_the_cache()
        assert (buffer[:GUARD] == 7).all() and (buffer[-GUARD:] == 7).all()
        if not last_use:
            assert torch.equal(partials, values)
        results.append((codes, scales))
    for codes, scales in results[1:]:
        assert torch.equal(codes, results[0][0]) and torch.equal(scales, results[0][1])


@pytest.mark.parametrize("tokens", [1, 4, 16, 32])
def test_weight_written_just_before(tokens):
    """The kernel before the product writes the weight, which the product may have begun to bring into the L2 cache."""
    ops = torch.ops.fusion_pass
    first, second, rope = two_pools(tokens, 128)
    more = dict(zip(("lengths", "extra_kv", "extra_indices", "extra_lengths"), second))
    versions = [Maker("cuda", seed=s).bgemm(16, 1, 1024, 4096)[2:] for s in (1, 2)]
    scales = versions[0][1]
    source, weight = versions[0][0].clone(), versions[0][0].clone()

    def layer():
        codes, token_scales = ops.attention_gathered_rope_quant(*first, *rope, SCALE, 16, **more)
        before = ops.fp8_bgemm(codes, token_scales, weight, scales)  # behind the merge
        weight.copy_(source)
        return before, ops.fp8_bgemm(codes, token_scales, weight, scales)  # behind the copy

    codes, token_scales = ops.attention_gathered_rope_quant(*first, *rope, SCALE, 16, **more)
    want = [ops.fp8_bgemm(codes, token_scales, version, scales) for version, _ in versions]
    layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = layer()
    last = 0
    for which in (1, 0) * 10:
        source.copy_(versions[which][0])
        for out in got:
            out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(got[0], want[last]) and torch.equal(got[1], want[which])
        last = which


@pytest.mark.parametrize(("tokens", "heads"), [
    (1, 128), (3, 128), (5, 128), (16, 128), (32, 128), (64, 128), (127, 128), (300, 128), (4097, 128),
    (1, 64), (8, 64), (64, 64), (200, 64),
])  # fmt: skip
def test_weight_ready(tokens, heads):
    """A product that reads its weight early has the bits of one that waits, behind attention over rows and over pages,
    with weights in turn, and with a weight that the layer before has written."""
    from test_hopper_gpu import paged_pools

    ops, groups = torch.ops.fusion_pass, heads // 8
    first, second, rope = two_pools(tokens, heads)
    more = dict(zip(("lengths", "extra_kv", "extra_indices", "extra_lengths"), second))
    m = Maker("cuda", torch.bfloat16)
    q, sink, tables, ((a, i, n, size), (b, j, k, other)), _ = paged_pools(m, tokens, heads, (64, 2), (64, 48))
    paged = dict(zip(("lengths", "extra_pages", "extra_indices", "extra_lengths"), (n, b, j, k)))
    attentions = (
        lambda: ops.attention_gathered_rope_quant(*first, *rope, SCALE, groups, **more),
        lambda: ops.attention_paged_fp8_rope_quant(
            q, a, i, sink, *tables, SCALE, groups, size, **paged, extra_page_size=other
        ),
    )
    weights = [Maker("cuda", seed=s).bgemm(groups, 1, 1024, 4096)[2:] for s in (1, 2, 3)]
    changing = torch.empty_like(weights[0][0])

    def layers(ready):
        outs = []
        for attention in attentions:
            for weight, scales in weights:
                outs.append(ops.fp8_bgemm(*attention(), weight, scales, weight_ready=ready))
        changing.copy_(weights[1][0])  # in front of the attention, which waits for it
        outs.append(ops.fp8_bgemm(*attentions[0](), changing, weights[1][1], weight_ready=ready))
        return outs

    want = layers(False)
    for _ in range(3):
        changing.view(torch.uint8).fill_(0x7F)
        for got, expected in zip(layers(True), want, strict=True):
            assert torch.equal(got, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = layers(True)
    for _ in range(10):
        changing.view(torch.uint8).fill_(0x7F)
        for out in results:
            out.fill_(float("nan"))
        stream_through_the_cache()
        graph.replay()
        for got, expected in zip(results, want, strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("tokens", [1, 64, 200])
def test_a_copied_weight_is_not_ready(tokens):
    """A weight in another layout is copied by the kernel in front of the product, whatever the caller says of it."""
    codes, scales, weight, factors = Maker("cuda").bgemm(16, tokens, 1024, 4096)
    turned = weight.mT.contiguous().mT
    want = torch.ops.fusion_pass.fp8_bgemm(codes, scales, weight, factors)
    for _ in range(20):
        stream_through_the_cache()
        assert torch.equal(torch.ops.fusion_pass.fp8_bgemm(codes, scales, turned, factors, weight_ready=True), want)
