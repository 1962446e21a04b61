# SPDX-License-Identifier: Apache-2.0
"""How the Hopper attention shares out keys, and what its launchers make of the plan, without such a GPU: the launches
of the attention are played by the reference, the merge behind them runs in Triton's interpreter."""

from types import SimpleNamespace

import pytest
import torch
from op_cases import Maker, relative_error

pytest.importorskip("triton")

from fusion_pass.kernels import reference  # noqa: E402
from fusion_pass.kernels.gluon import attention, launchers  # noqa: E402
from fusion_pass.kernels.modes import Modes, using  # noqa: E402
from fusion_pass.kernels.ops import SPECS  # noqa: E402
from fusion_pass.kernels.tuning.attention import (  # noqa: E402
    MERGING,
    RELEASE_FIRST,
    RELEASE_LAST,
    RELEASE_LOADED,
    RELEASE_NEVER,
    Merging,
    Plan,
    hopper_merging,
    hopper_plan,
)

SMS = 132


@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize("heads", [16, 64, 128, 192])
def test_plans(heads, pages):
    """No share is empty, shares of a last wave fit into one wave and leave whole waves before them, and nothing else
    is cut."""
    blocks = -(-heads // 64)
    for tiles in (1, 2, 3, 10, 18, 33):
        for tokens in (*range(1, 301), 1024, 2048, 4096, 4097):
            plan = hopper_plan(tokens, heads, tiles, SMS, pages=pages)
            rows = tokens * blocks
            assert 0 <= plan.cut <= tokens and 1 <= plan.splits <= tiles and (plan.cut > 0) == (plan.splits > 1)
            assert plan.cut * blocks * plan.splits <= SMS
            share = -(-tiles // plan.splits)
            assert (plan.splits - 1) * share < tiles, "a share without keys"
            assert not plan.paired or (plan.cut == tokens and plan.splits == 2 and not pages)
            if rows > SMS and plan.cut:
                whole = (tokens - plan.cut) * blocks
                assert whole <= rows // SMS * SMS < whole + plan.cut * blocks
                # what a call of these tokens alone takes, unless it finishes its rows itself
                alone = hopper_plan(plan.cut, heads, tiles, SMS, pages=pages)
                assert plan == alone or alone.paired
                assert not plan.paired
            if rows > SMS:
                assert hopper_plan(tokens, heads, tiles, SMS, False, pages) == Plan(0, 1)


@pytest.mark.parametrize(
    ("tokens", "heads", "tail"), [(67, 128, 1), (70, 128, 4), (2048, 128, 2), (4096, 128, 4), (140, 64, 8)]
)
def test_tails(tokens, heads, tail):
    """A last wave of a few rows is cut; one that is full is not."""
    plan = attention.plan(tokens, heads, 1152, SMS)
    assert plan.cut == tail and plan.splits >= 4
    assert attention.plan(128, 128, 1152, SMS) == Plan(0, 1)
    assert attention.plan(66, 128, 1152, SMS) == Plan(0, 1)


def test_pairs():
    """Two shares finish their rows themselves where rows half fill the GPU and may do so."""
    for tokens, heads, keys in ((32, 128, 1152), (33, 128, 1152), (64, 64, 640), (40, 64, 640)):
        assert attention.plan(tokens, heads, keys, SMS) == Plan(tokens, 2, paired=True)
        assert not attention.plan(tokens, heads, keys, SMS, pages=True).paired
    assert not attention.plan(16, 128, 1152, SMS).paired


def test_merging():
    """Programs never hold more partials than the kernel has forms for, a program that takes a multiprocessor finds one
    in a single wave, and what waits beside a running attention is tiny or such a program."""
    from fusion_pass.kernels.triton.merge_rows import COUNTS

    for limit, most, how in MERGING:
        assert how.tiling is None or most <= COUNTS[-1]
        for rows in (limit // 2 + 1, limit):
            found = hopper_merging(rows, 2)
            wide = found.tiling is not None and found.tiling[1] == 32
            assert not wide or -(-rows // found.tiling[0]) <= SMS
            assert found.release == RELEASE_NEVER or wide or rows < 1024
        found = hopper_merging(limit, most)
        assert found.tiling == how.tiling and (found == how or limit <= 896)
    assert hopper_merging(1 << 20, 2) == hopper_merging(4096, 5) == Merging(None, RELEASE_NEVER)
    for pages in (False, True):
        assert hopper_merging(128, 18, pages=pages) == Merging((1, 4), RELEASE_FIRST)
        assert hopper_merging(1024, 5, pages=pages).release == RELEASE_NEVER
    assert hopper_merging(512, 9).release == RELEASE_LOADED
    assert hopper_merging(512, 9, pages=True).release == RELEASE_LAST
    assert hopper_merging(256, 9, tail=True).release == RELEASE_FIRST
    assert hopper_merging(4096, 2, tail=True).release == RELEASE_NEVER


@pytest.fixture
def operands(monkeypatch):
    """Seven tokens of eight heads over two pools; the plan cuts the last three into two shares."""
    monkeypatch.setattr(launchers, "_sm_count", lambda device: SMS)
    monkeypatch.setattr(attention, "plan", lambda *args, **forms: Plan(3, 2))
    m = Maker(dtype=torch.bfloat16)
    return m, m.gathered(7, 8, 512, 40, 9), m.second_pool(7, 512)


def played(calls, q, kv, indices, scale, second, whole):
    """A stand-in for the launches of the attention, which notes how it was called. whole(): results of all tokens."""
    tokens = q.shape[0]

    def partials(to, first):
        lengths, extra, extra_indices, extra_lengths = second
        rows = [None if t is None else t[first:] for t in (lengths, extra_indices, extra_lengths)]
        splits = to.out.shape[0]
        out, lse = reference.attention_partials(
            q[first:], kv, indices[first:], scale, splits, rows[0], extra, rows[1], rows[2]
        )
        to.out.copy_(out)
        to.lse.copy_(lse)

    def launch(to, sink, splits=1, paired=False, tail=None):
        assert not paired
        calls.append((to.kind, splits, None if tail is None else tail.out.shape[:2]))
        if to.kind == "partial":
            partials(to, 0)
            return
        count = tokens - (0 if tail is None else tail.out.shape[1])
        token_dim = 0 if to.kind == "plain" else 1
        for target, values in zip((to.out, to.scales), whole(), strict=False):
            dim = token_dim if target is to.out else 2
            target.narrow(dim, 0, count).copy_(values.narrow(dim, 0, count))
        if tail is not None:
            partials(tail, count)

    return launch


@pytest.mark.parametrize("release", [RELEASE_FIRST, RELEASE_NEVER], ids=["early", "late"])
@pytest.mark.parametrize("tiled", [False, True], ids=["a program per row", "rows together"])
@pytest.mark.parametrize("op", ["", "_rope", "_rope_quant", "_rope_quant, packed"])
def test_tail_is_merged_where_it_belongs(monkeypatch, operands, op, tiled, release):
    """The merge writes the last tokens' rows, columns of scales and the padding, and nothing else."""
    m, (q, kv, indices, sink), second = operands
    how = Merging((4, 4) if tiled else None, release)
    monkeypatch.setattr(launchers.tuning_data, "hopper_merging", lambda *_, **more: how)
    rope, scale, packed = m.rope(7), 0.05, "packed" in op
    name = "attention_gathered" + op.split(",")[0]
    quant = (128, "ue8m0", 1e-10, packed) if "quant" in op else ()
    middle = (*rope, scale, 2, *quant) if op else (scale,)
    args = SPECS[name].complete((q, kv, indices, sink, *middle, *second), {})
    outs = SPECS[name].empty(*args)
    for out in outs:
        out.view(torch.uint8).fill_(0x7F)
    results = getattr(reference, name)(*args)
    results = results if isinstance(results, tuple) else (results,)
    calls = []
    epilogue = {
        "": lambda: attention.Epilogue("plain", outs[0]),
        "_rope": lambda: launchers._rope(outs, *rope, 2),
    }.get(op, lambda: launchers._quant(outs, *rope, 2, *quant))()
    launch = played(calls, q, kv, indices, scale, second, lambda: results)
    launchers._attend(epilogue, 7, 8, 15, sink, launch, q.device)
    assert calls == [(epilogue.kind, 1, (2, 3))]
    if quant:
        assert (outs[1][..., 7:] == 0).all()
        for first in (slice(0, 4), slice(4, 7)):
            got, want = (reference.dequantise(x[0], x[1])[:, first] for x in (outs, results))
            assert relative_error(got, want) < (0.03 if first.start else 1e-7)
    else:
        assert torch.isfinite(outs[0]).all() and relative_error(outs[0], results[0]) < 4e-3


def test_tables_that_sequences_share(monkeypatch, operands):
    """Two sequences of three tokens under one table, the last three merged: the same as with the table repeated."""
    m, (q, kv, indices, sink), second = operands
    q, indices, second = q[:6], indices[:6], tuple(t if t is None or t.dim() > 2 else t for t in second)
    cos, sin = m.rope(3)
    for tiled in (False, True):
        how = Merging((4, 4) if tiled else None, RELEASE_FIRST)
        monkeypatch.setattr(launchers.tuning_data, "hopper_merging", lambda *_, how=how, **more: how)
        results = []
        for tables in ((cos, sin), (cos.repeat(2, 1), sin.repeat(2, 1))):
            out = torch.full((2, 6, 4 * 512), float("nan"), dtype=torch.bfloat16)
            rows = [None if t is None else t[:6] if t.shape[0] == 7 else t for t in second]
            whole = lambda rows=rows: (  # noqa: E731
                reference.attention_gathered_rope(
                    q, kv, indices, sink, cos.repeat(2, 1), sin.repeat(2, 1), 0.05, 2, *rows
                ),
            )
            launch = played([], q, kv, indices, 0.05, rows, whole)
            launchers._attend(attention.Epilogue("rope", out, None, None, *tables, 2), 6, 8, 15, sink, launch, q.device)
            assert relative_error(out, whole()[0]) < 4e-3
            results.append(out)
        assert torch.equal(*results)


def test_pairs_are_asked_for(monkeypatch, operands):
    """A plan of pairs becomes one launch that finishes its rows, and nothing is merged."""
    _, (q, *_, sink), _ = operands
    monkeypatch.setattr(attention, "plan", lambda *args, **forms: Plan(7, 2, paired=True))
    calls = []
    launch = lambda to, sink, **how: calls.append((to.kind, how))  # noqa: E731
    out = torch.empty_like(q)
    launchers._attend(attention.Epilogue("plain", out), 7, 8, 15, sink, launch, q.device)
    assert calls == [("plain", {"splits": 2, "paired": True})]
    properties = SimpleNamespace(multi_processor_count=SMS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    partial = attention.Epilogue("partial", out, lse=out)
    with pytest.raises(ValueError, match="two shares that finish their rows: got 2 and 'partial'"):
        attention._launch(q.unsqueeze(0), q, None, 0.05, partial, lists=None, tokens=7, splits=2, paired=True)


def test_batch_invariant_calls_are_never_cut(operands):
    m, (q, kv, indices, sink), second = operands
    calls = []
    out = torch.empty_like(q)
    launch = played(calls, q, kv, indices, 0.05, second, lambda: (out,))
    with using(Modes(batch_invariant=True)):
        launchers._attend(attention.Epilogue("plain", out), 7, 8, 15, sink, launch, q.device)
    assert calls == [("plain", 1, None)]


@pytest.mark.parametrize("aligned", [True, False])
def test_pages_that_are_decoded_first_are_not_cut(monkeypatch, aligned):
    """The plan is told what the launch can do."""
    asked = []

    def plan(*args, **forms):
        asked.append(forms)
        return Plan(0, 1)

    monkeypatch.setattr(attention, "plan", plan)
    monkeypatch.setattr(attention, "launch_paged", lambda *args, **more: None)
    monkeypatch.setattr(attention, "launch_gathered", lambda *args, **more: None)
    monkeypatch.setattr(launchers, "_sm_count", lambda device: SMS)
    m = Maker(dtype=torch.bfloat16)
    q, pages = m.normal(3, 8, 512), m.pages(3, 8, 16 if aligned else 40)
    assert attention.pages_aligned(pages) == aligned
    if not aligned:
        monkeypatch.setattr("fusion_pass.kernels.triton.paged.decoded_chunks", lambda *args: ())
    launchers._launch_paged((torch.empty_like(q),), q, pages, m.integers(0, 20, (3, 9)), None, 0.05, 8, *[None] * 4, 1)
    assert asked == [{"cut": aligned, "pages": aligned}]


@pytest.mark.parametrize("count", [2, 5, 7, 18])
def test_counts_between_forms(count):
    """Partials that a kernel's form has slots for but the call does not hold are not read."""
    from fusion_pass.kernels.triton import merge, merge_rows

    m = Maker(dtype=torch.bfloat16)
    partials, lse = m.partials(count, 2, 4, 512, dtype=torch.bfloat16)
    (cos, sin), sink = m.rope(2), m.normal(4, dtype=torch.float32)
    outs = [torch.full((2, 2, 2 * 512), float("nan"), dtype=torch.bfloat16) for _ in range(2)]
    epilogue = merge.Epilogue(cos, sin, 2)
    merge_rows.merge_rows_into(outs[0], None, partials, lse, sink, epilogue, rows=1, num_warps=4, pdl=False)
    merge.merge_into(outs[1], None, None, partials, lse, None, sink, 1.0, merge.decide(partials, 1), epilogue)
    assert torch.isfinite(outs[0]).all() and relative_error(*outs) < 4e-3
