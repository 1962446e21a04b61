# SPDX-License-Identifier: Apache-2.0
"""Two shares of a row that finish it together (kernels/gluon/attention_pairs.py): against float64, lists of few and of
no keys, twice the same bits, and in several streams and CUDA graphs at the same time."""

import pytest
import torch
from op_cases import Maker, gathered_formula, relative_error, rope_formula
from test_gpu import SCALE, outputs, two_pools
from test_hopper_gpu import hopper, paged_pools

pytest.importorskip("triton")

from fusion_pass.kernels import reference  # noqa: E402

pytestmark = pytest.mark.gpu
assert hopper  # a fixture of every test here: they need such a GPU


@pytest.fixture
def paired(monkeypatch):
    """Every call that fits the GPU takes two shares per row."""
    from fusion_pass.kernels.gluon import attention

    plan = attention.tuning_data.Plan
    monkeypatch.setattr(attention, "plan", lambda tokens, *_, **__: plan(tokens, 2, paired=True))


@pytest.mark.parametrize("heads", [128, 64, 16])
@pytest.mark.parametrize("tokens", [1, 3, 21, 33])
def test_rows(paired, tokens, heads):
    """Every epilogue, over two pools with lengths and -1 indices."""
    from fusion_pass.kernels.gluon import launchers

    first, second, rope = two_pools(tokens, heads)
    q, kv, indices, sink = first
    groups = max(1, heads // 8)
    want = gathered_formula(q, kv, indices, sink, SCALE, None, second[1], second[2], second[3])
    rotated = rope_formula(want, *rope, groups)
    for op, launch, more, expected in (
        ("attention_gathered", launchers._launch_gathered, (SCALE,), want),
        ("attention_gathered_rope", launchers._launch_gathered_rope, (*rope, SCALE, groups), rotated),
    ):
        results = []
        for _ in range(2):
            args, outs = outputs(op, (*first, *more, *second))
            launch(outs, *args)
            results.append(outs[0])
        assert torch.isfinite(results[0]).all() and relative_error(results[0], expected) < 4e-3, op
        assert torch.equal(*results), op
    for rule, pack, block in (("fp32", False, 128), ("ue8m0", True, 128), ("ue8m0", True, 32)):
        args, outs = outputs(
            "attention_gathered_rope_quant", (*first, *rope, SCALE, groups, block, rule, 1e-10, pack, *second)
        )
        launchers._launch_gathered_quant(outs, *args)
        assert (outs[1][..., tokens:] == 0).all()
        values = reference.dequantise(*outs, block)
        assert torch.isfinite(values).all() and relative_error(values, rotated) < 0.04, (rule, pack, block)


@pytest.mark.parametrize(("tokens", "heads"), [(33, 128), (66, 64)])
def test_pages(paired, tokens, heads):
    """The bits of the same rows in bf16."""
    from fusion_pass.kernels.gluon import launchers

    m, groups = Maker("cuda", torch.bfloat16), heads // 8
    q, sink, rope, ((a, i, n, size), (b, j, k, other)), pools = paged_pools(m, tokens, heads, (64, 2), (64, 48))
    (kv, *_), (extra, *_) = pools
    quant = (128, "ue8m0", 1e-10, True)
    paged = (q, a, i, sink, *rope, SCALE, groups, size, *quant, n, b, j, k, other)
    args, got = outputs("attention_paged_fp8_rope_quant", paged)
    launchers._launch_paged_quant(got, *args)
    rows = (q, kv, i, sink, *rope, SCALE, groups, *quant, n, extra, j, k)
    args, want = outputs("attention_gathered_rope_quant", rows)
    launchers._launch_gathered_quant(want, *args)
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8)) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("batch", [1, 3])
def test_dense(paired, batch):
    """Causal rows with a window, the first of which see a single key: their second share has none."""
    from fusion_pass.kernels.gluon import launchers

    m, queries = Maker("cuda", torch.bfloat16), 33 // batch
    q, kv = m.normal(batch, queries, 128, 512), m.normal(batch, queries, 512)
    call = (q, kv, None, m.normal(128, dtype=torch.float32), *m.rope(1, queries), SCALE, 16, True, 640)
    args, outs = outputs("attention_rope", call)
    launchers._launch_dense_rope(outs, *args)
    exact = reference.attention_rope(*(x.double() if isinstance(x, torch.Tensor) else x for x in call))
    assert torch.isfinite(outs[0]).all() and relative_error(outs[0], exact) < 4e-3


@pytest.mark.parametrize(("tokens", "heads"), [(32, 128), (64, 64)])
def test_several_streams_and_graphs(tokens, heads):
    """Calls of four streams and two graphs at the same time, several times over: every share finds its partner, and
    none takes another's flag for its own."""
    from fusion_pass.kernels.gluon import attention

    assert attention.plan(tokens, heads, 1152, 132).paired, "this case is meant for pairs"
    ops, calls = torch.ops.fusion_pass, []
    for _ in range(6):
        first, second, rope = two_pools(tokens, heads)
        more = dict(zip(("lengths", "extra_kv", "extra_indices", "extra_lengths"), second))
        calls.append(lambda a=first, r=rope, m=more: ops.attention_gathered_rope_quant(*a, *r, SCALE, heads // 8, **m))
    want = [call() for call in calls]
    torch.cuda.synchronize()
    streams, graphs, captured = [torch.cuda.Stream() for _ in range(6)], [], []
    for call in calls[4:]:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            captured.append([call() for _ in range(3)][-1])
    for _ in range(20):
        for out in captured:
            out[0].view(torch.uint8).fill_(255)
        torch.cuda.synchronize()
        eager = []
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if i < 4:
                    eager.append([calls[i]() for _ in range(3)][-1])
                else:
                    graphs[i - 4].replay()
        torch.cuda.synchronize()
        for got, (codes, scales) in zip(eager + captured, want, strict=True):
            assert torch.equal(got[0].view(torch.uint8), codes.view(torch.uint8)) and torch.equal(got[1], scales)
