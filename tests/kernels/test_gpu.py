# SPDX-License-Identifier: Apache-2.0
"""The portable kernels at DeepSeek-V4's sizes on a GPU, checked on sampled tokens against float64: long prefills, split
decode, 64-bit offsets, NaN guard rows, CUDA graphs, determinism, compilations."""

import pytest
import torch
from op_cases import Maker, gathered_formula, relative_error, rope_formula

pytest.importorskip("triton")

from fusion_pass.kernels import reference  # noqa: E402
from fusion_pass.kernels.ops import SPECS, explain  # noqa: E402
from fusion_pass.kernels.triton import launchers  # noqa: E402

pytestmark = pytest.mark.gpu
SCALE = 512**-0.5


def outputs(name, args):
    """Complete arguments and NaN-poisoned outputs of op ``name``."""
    args = SPECS[name].complete(args, {})
    outs = SPECS[name].empty(*args)
    for out in outs:
        out.view(torch.uint8).fill_(0x7F)
    return args, outs


def sampled(tokens):
    return sorted({0, 1, tokens // 3, tokens // 2, tokens - 2, tokens - 1} & set(range(tokens)))


def two_pools(tokens, heads, near=128, far=1024, pool=20000):
    """bf16 operands over a window and a compressed pool; NaN rows that only -1 and cut-off columns point at."""
    m = Maker("cuda", torch.bfloat16)
    q, window, indices, sink = m.gathered(tokens, heads, 512, pool, near)
    extra, extra_indices = m.normal(pool, 512), m.integers(0, pool - 1, (tokens, far))
    extra_lengths = m.integers(far // 2, far + 1, (tokens,))
    extra[-1] = float("nan")
    cut = torch.arange(far, device="cuda") >= extra_lengths.unsqueeze(1)
    extra_indices = extra_indices.masked_fill(cut, pool - 1)
    indices = torch.where(indices == 0, -1, indices)
    window[0] = float("nan")
    return (q, window, indices, sink), (None, extra, extra_indices, extra_lengths), m.rope(tokens)


@pytest.mark.parametrize("heads", [128, 64, 8])
@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 33, 127, 4097])
def test_gathered_chain(tokens, heads):
    """Rows, rotated rows and codes of both pools; splits decide themselves by token count."""
    first, second, rope = two_pools(tokens, heads)
    q, kv, indices, sink = first
    pick = sampled(tokens)
    cut = [None if t is None else t[pick] for t in (None, second[2], second[3])]
    want = gathered_formula(q[pick], kv, indices[pick], sink, SCALE, None, second[1], *cut[1:])
    args, outs = outputs("attention_gathered", (*first, SCALE, *second))
    launchers._launch_gathered(outs, *args)
    assert torch.isfinite(outs[0]).all() and relative_error(outs[0][pick], want) < 4e-3

    groups = heads // 8
    rotated = rope_formula(want, *(t[pick] for t in rope), groups)
    args, outs = outputs("attention_gathered_rope", (*first, *rope, SCALE, groups, *second))
    launchers._launch_gathered_rope(outs, *args)
    assert torch.isfinite(outs[0]).all() and relative_error(outs[0][:, pick], rotated) < 4e-3

    # E4M3 codes of a 1 x 128 block: 2 % relative error is the format's; the padding columns are zero.
    for rule, pack in (("fp32", False), ("ue8m0", True)):
        quant = (SCALE, groups, 128, rule, 1e-10, pack)
        args, outs = outputs("attention_gathered_rope_quant", (*first, *rope, *quant, *second))
        launchers._launch_gathered_quant(outs, *args)
        codes, scales = outs
        assert (scales[..., tokens:] == 0).all()
        values = reference.dequantise(codes, scales)
        assert torch.isfinite(values).all() and relative_error(values[:, pick], rotated) < 0.04


@pytest.mark.parametrize("queries", [1, 127, 4097])
@pytest.mark.parametrize("mask", ["window", "min", "bool", "causal"])
def test_dense_prefill(queries, mask):
    """Flash shapes: 64 heads, keys = queries of a window layer plus a quarter as many compressed rows."""
    m = Maker("cuda", torch.bfloat16)
    keys = max(200, queries + queries // 4)
    q, kv, _, sink = m.dense(1, queries, 64, 512, keys)
    position = torch.arange(queries, device="cuda")[:, None] + keys - queries
    n = torch.arange(keys, device="cuda")[None, :]
    near = (n <= position) & (n > position - 128)
    keep = near | ((torch.rand(queries, keys, generator=m.generator, device="cuda") < 0.1) & (n <= position))
    forms = {
        "window": (None, True, 128, near),
        "causal": (None, True, 0, n <= position),
        "bool": (keep[None], False, 0, keep),
        "min": (torch.where(keep, 0.0, torch.finfo(torch.bfloat16).min).bfloat16()[None], False, 0, keep),
    }
    tensor, causal, window, visible = forms[mask]
    rope = m.rope(1, queries)
    args, outs = outputs("attention_rope", (q, kv, tensor, sink, *rope, SCALE, 8, causal, window))
    launchers._launch_dense_rope(outs, *args)
    pick = sampled(queries)
    lists = [torch.nonzero(visible[t]).flatten() for t in pick]
    indices = torch.full((len(pick), max(map(len, lists))), -1, device="cuda", dtype=torch.int64)
    for row, found in zip(indices, lists):
        row[: len(found)] = found
    want = gathered_formula(q[0, pick], kv[0], indices, sink, SCALE)
    want = rope_formula(want, *(t[0, pick] for t in rope), 8)
    assert torch.isfinite(outs[0]).all() and relative_error(outs[0][:, pick], want) < 4e-3


def test_wide_offsets():
    """Operands beyond 2^31 elements: q, outputs, and a pool whose used rows lie at its far end."""
    m = Maker("cuda", torch.bfloat16)
    tokens, rows = 33000, 4_300_000
    q = torch.empty(tokens, 128, 512, dtype=torch.bfloat16, device="cuda").normal_(generator=m.generator)
    pool = torch.zeros(rows, 512, dtype=torch.bfloat16, device="cuda")
    pool[-64:].normal_(generator=m.generator)
    indices = m.integers(rows - 64, rows, (tokens, 16))
    rope, sink = m.rope(tokens), m.normal(128, dtype=torch.float32)
    assert q.numel() > 2**31 and pool.numel() > 2**31
    args, outs = outputs("attention_gathered_rope", (q, pool, indices, sink, *rope, SCALE, 16))
    launchers._launch_gathered_rope(outs, *args)
    pick = sampled(tokens)
    want = gathered_formula(q[pick], pool, indices[pick], sink, SCALE)
    assert relative_error(outs[0][:, pick], rope_formula(want, *(t[pick] for t in rope), 16)) < 4e-3


@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_graph_and_determinism(tokens):
    """Captured in a CUDA graph and replayed on new inputs, the chain gives bit for bit what eager launches give."""
    first, second, rope = two_pools(tokens, 128)
    _, _, weight, factors = Maker("cuda").bgemm(16, 1, 1024, 4096)
    ops = torch.ops.fusion_pass

    def chain():
        more = dict(zip(("lengths", "extra_kv", "extra_indices", "extra_lengths"), second))
        codes, scales = ops.attention_gathered_rope_quant(*first, *rope, SCALE, 16, **more)
        return ops.fp8_bgemm(codes, scales, weight, factors)

    want = chain()
    assert torch.equal(chain(), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain()
    for _ in range(2):
        first[0].normal_()
        got.fill_(float("nan"))
        graph.replay()
        assert torch.equal(got, chain())


def test_kernels_are_chosen():
    first, second, rope = two_pools(4, 128)
    chosen, reasons = explain("attention_gathered", SPECS["attention_gathered"].complete((*first, SCALE), {}))
    assert chosen is not None, reasons
    double = [t.double() if t.is_floating_point() else t for t in first]
    chosen, reasons = explain("attention_gathered", SPECS["attention_gathered"].complete((*double, SCALE), {}))
    assert chosen is None and any("float64" in reason for reason in reasons)


def test_no_compilation_while_serving():
    """After one pass over the token-count buckets, no other token count compiles anything."""
    import triton

    def serve(tokens):
        first, second, rope = two_pools(tokens, 128, pool=300, far=64)
        args, outs = outputs("attention_gathered_rope_quant", (*first, *rope, SCALE, 16, 128, "fp32", 1e-10, False))
        launchers._launch_gathered_quant(outs, *args)
        m = Maker("cuda")
        args, outs = outputs("fp8_bgemm", m.bgemm(16, tokens, 1024, 4096))
        launchers._launch_bgemm(outs, *args)

    compiled = []
    hook = triton.knobs.runtime.jit_post_compile_hook
    for tokens in (*range(1, 35), 48, 65, 129, 300):
        serve(tokens)
    triton.knobs.runtime.jit_post_compile_hook = lambda *, fn, **_: compiled.append(fn.name)
    try:
        for tokens in range(1, 300, 7):
            serve(tokens)
    finally:
        triton.knobs.runtime.jit_post_compile_hook = hook
    assert compiled == []
