# SPDX-License-Identifier: Apache-2.0
"""The last wave's tokens of the Hopper attention, computed by a launch of their own beside that of the others: against
the same calls uncut, outputs poisoned beforehand, and chains in CUDA graphs and on several streams."""

from dataclasses import replace

import pytest
import torch
from op_cases import Maker, relative_error
from test_gpu import SCALE, outputs, two_pools
from test_hopper_gpu import hopper, paged_pools

pytest.importorskip("triton")

from fusion_pass.kernels import reference  # noqa: E402

pytestmark = pytest.mark.gpu
assert hopper  # a fixture of every test here: they need such a GPU


def last_tokens(tokens, heads):
    """Tokens of a last wave, as the plan has to find them."""
    blocks = heads // 64
    return tokens * blocks % 132 // blocks


def cases(tokens, heads):
    """(name, launcher, arguments, quantisation block) of every kind of keys and epilogue."""
    from fusion_pass.kernels.gluon import launchers

    first, second, rope = two_pools(tokens, heads)
    groups = heads // 8
    more = (*rope, SCALE, groups)
    m = Maker("cuda", torch.bfloat16)
    for rule, pack, block in (("fp32", False, 128), ("ue8m0", True, 128), ("ue8m0", True, 32)):
        quant = (*more, block, rule, 1e-10, pack)
        yield "attention_gathered_rope_quant", launchers._launch_gathered_quant, (*first, *quant, *second), block
    yield "attention_gathered", launchers._launch_gathered, (*first, SCALE, *second), 0
    yield "attention_gathered_rope", launchers._launch_gathered_rope, (*first, *more, *second), 0
    q, sink, rope, ((a, i, n, size), (b, j, k, other)), _ = paged_pools(m, tokens, heads, (64, 2), (64, 48))
    paged = (q, a, i, sink, *rope, SCALE, groups, size, 128, "ue8m0", 1e-10, True, n, b, j, k, other)
    yield "attention_paged_fp8_rope_quant", launchers._launch_paged_quant, paged, 128
    yield "attention_paged_fp8", launchers._launch_paged, (q, a, i, sink, SCALE, size, n, b, j, k, other), 0
    # one sequence and two, which share their tables; a window of 640 keys
    for batch in (1, 2):
        if tokens % batch == 0:
            queries = tokens // batch
            q, kv = m.normal(batch, queries, heads, 512), m.normal(batch, queries + 700, 512)
            dense = (q, kv, None, m.normal(heads, dtype=torch.float32), *m.rope(1, queries), SCALE, groups)
            quant = (128, "fp32", 1e-10, False, True, 640)
            yield "attention_rope_quant", launchers._launch_dense_quant, (*dense, *quant), 128


@pytest.mark.parametrize("heads", [128, 64])
@pytest.mark.parametrize("tokens", [67, 70, 133, 140, 300, 2048, 4097])
def test_tail(monkeypatch, tokens, heads):
    """The tokens before the tail have the bits of the uncut call, those of the tail its values; padding is zero."""
    from fusion_pass.kernels.gluon import attention

    for name in ("ROWS_US", "PAGES_US"):  # every small tail is cut, also where that is slower
        cheap = replace(getattr(attention.tuning_data, name), tail=4.0)
        monkeypatch.setattr(attention.tuning_data, name, cheap)
    plan, plans = attention.plan, []

    def noted(*args, **forms):
        plans.append(plan(*args, **forms))
        return plans[-1]

    for name, launch, call, block in cases(tokens, heads):
        monkeypatch.setattr(attention, "plan", lambda *args, **_: plan(*args, cut=False))
        args, want = outputs(name, call)
        launch(want, *args)
        monkeypatch.setattr(attention, "plan", noted)
        args, got = outputs(name, call)
        launch(got, *args)
        tail = plans[-1].cut
        count = last_tokens(tokens, heads)
        assert tail == count or (tail == 0 and count > 8), (name, plans[-1])
        if block:
            assert (got[1][..., tokens:] == 0).all(), name
            got_bits, want_bits = (x[0].view(torch.uint8) for x in (got, want))
            assert torch.equal(*(x[1][..., : tokens - tail] for x in (got, want))), name
            got, want = [reference.dequantise(*got, block)], [reference.dequantise(*want, block)]
        else:
            got_bits, want_bits = got[0], want[0]
        token_dim = 0 if name in ("attention_gathered", "attention_paged_fp8") else 1
        size = got_bits.shape[token_dim]
        assert torch.equal(*(x.narrow(token_dim, 0, size - tail) for x in (got_bits, want_bits))), name
        if tail:
            rest = [x[0].narrow(token_dim, size - tail, tail) for x in (got, want)]
            assert torch.isfinite(rest[0]).all(), name
            assert relative_error(*rest) < (0.03 if block else 4e-3), name


def chain(tokens, heads, paged, seed):
    """A call of two pools or of pages, followed by the product."""
    ops = torch.ops.fusion_pass
    first, second, rope = two_pools(tokens, heads)
    groups = heads // 8
    m = Maker("cuda", torch.bfloat16, seed=seed)
    weight = m.bgemm(groups, 1, 1024, 4096)[2:]
    cache, columns = m.pages(64, 64, 64), m.integers(-1, 4096, (tokens, 1152))
    more = dict(zip(("lengths", "extra_kv", "extra_indices", "extra_lengths"), second))

    def call(q):
        if paged:
            pair = ops.attention_paged_fp8_rope_quant(q, cache, columns, first[3], *rope, SCALE, groups, 64)
        else:
            pair = ops.attention_gathered_rope_quant(q, *first[1:], *rope, SCALE, groups, **more)
        return (*pair, ops.fp8_bgemm(*pair, *weight))

    return first[0], call


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize(("tokens", "heads"), [(67, 128), (70, 128), (140, 64), (270, 128)])
def test_product_waits_for_both_launches(tokens, heads, paged):
    """Two layers with different queries in one graph, whose second reuses the first's memory: a product that started
    before either launch of the attention was done would read what the other layer left."""
    q, call = chain(tokens, heads, paged, seed=tokens)
    queries = [q * factor for factor in (1.0, -2.0)]
    want = []
    for x in queries:
        want.append(call(x)[2])
        torch.cuda.synchronize()
    assert not torch.equal(*want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [call(queries[i % 2])[2] for i in range(4)]
    for _ in range(20):
        for out in got:
            out.fill_(float("nan"))
        graph.replay()
        graph.replay()
        for i, out in enumerate(got):
            assert torch.equal(out, want[i % 2])


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_several_streams_and_graphs(paged):
    """Calls of two streams and two graphs at the same time."""
    calls = [chain(70, 128, paged, seed=seed) for seed in range(4)]
    want = [call(q) for q, call in calls]
    torch.cuda.synchronize()
    streams, graphs, captured = [torch.cuda.Stream() for _ in range(4)], [], []
    for q, call in calls[2:]:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            captured.append(call(q))
    for _ in range(20):
        for codes, *_ in captured:
            codes.view(torch.uint8).fill_(255)
        torch.cuda.synchronize()
        eager = []
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if i < 2:
                    eager.append(calls[i][1](calls[i][0]))
                else:
                    graphs[i - 2].replay()
        torch.cuda.synchronize()
        for got, expected in zip(eager + captured, want, strict=True):
            for x, y in zip(got, expected, strict=True):
                assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def test_batch_invariant_calls_are_not_cut():
    """Token by token, the bits of a call of 70 tokens are those of calls of one."""
    first, second, rope = two_pools(70, 128)
    names = ("lengths", "extra_kv", "extra_indices", "extra_lengths")

    def call(rows):
        q, kv, indices, sink = first
        tables = (table[rows] for table in rope)
        more = {n: t if t is None or n == "extra_kv" else t[rows] for n, t in zip(names, second)}
        return torch.ops.fusion_pass.attention_gathered_rope(
            q[rows], kv, indices[rows], sink, *tables, SCALE, 16, **more, batch_invariant=True
        )

    every = call(slice(0, 70))
    for token in (0, 66, 69):
        assert torch.equal(every[:, token : token + 1], call(slice(token, token + 1)))
