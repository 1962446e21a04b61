# SPDX-License-Identifier: Apache-2.0
"""The portable attention kernel itself (interpreter or GPU) against float64 formulas: every key source, ragged sizes,
empty rows, NaN in unused rows, splits, tiles of every size, poisoned outputs."""

import pytest
import torch
from op_cases import Maker, dense_formula, gathered_formula, relative_error, rope_formula

pytest.importorskip("triton")

from fusion_pass.kernels import reference  # noqa: E402
from fusion_pass.kernels.ops import SPECS  # noqa: E402
from fusion_pass.kernels.triton import attention_launch, launchers  # noqa: E402
from fusion_pass.kernels.triton.attention_launch import Keys, Rope, attend, rope_quant  # noqa: E402
from fusion_pass.kernels.tuning.attention import Tile  # noqa: E402

SCALE = 0.11
SMALL = Tile(16, 16, 4, 2)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}


def run(name, launch, args, poison=0x7F):
    """The launcher ``launch`` of op ``name`` into poisoned outputs."""
    args = SPECS[name].complete(args, {})
    SPECS[name].check(*args)
    outs = SPECS[name].empty(*args)
    for out in outs:
        out.view(torch.uint8).fill_(poison)
    launch(outs, *args)
    return outs


def close(got, want, dtype):
    assert got.dtype == dtype and torch.isfinite(got).all()
    # A GPU's exp2 is approximate and its fp32 products are summed in another order.
    slack = 5 if got.is_cuda and dtype == torch.float32 else 1
    assert relative_error(got, want) < TOLERANCE[dtype] * slack


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("mask", ["none", "bool", "float", "min"])
@pytest.mark.parametrize("causal,window", [(False, 0), (True, 0), (True, 4)])
def test_dense(device, dtype, mask, causal, window):
    args = Maker(device, dtype).dense(mask=mask, sink=mask != "min", dim=64, heads=3)
    (got,) = run("attention", launchers._launch_dense, (*args, SCALE, causal, window))
    close(got, dense_formula(*args, SCALE, causal, window), dtype)


@pytest.mark.parametrize("queries,keys", [(1, 40), (3, 3), (5, 2), (127, 33)])
@pytest.mark.parametrize("window", [0, 20])
def test_dense_ragged(device, queries, keys, window):
    args = Maker(device).dense(batch=1, queries=queries, keys=keys, heads=1, dim=64, sink=False)
    (got,) = run("attention", launchers._launch_dense, (*args, SCALE, True, window))
    close(got, dense_formula(*args, SCALE, True, window), torch.float32)


def test_all_masked_and_nan(device):
    m = Maker(device)
    q, kv, mask, sink = m.dense(mask="bool", dim=64)
    kv[:, 3] = float("nan")
    mask[..., 3] = False
    mask[:, 1] = False
    for s in (sink, None):
        for form in (mask, torch.where(mask, 0.0, float("-inf"))):
            (got,) = run("attention", launchers._launch_dense, (q, kv, form, s, SCALE))
            close(got, dense_formula(q, kv.nan_to_num(0.0), mask, s, SCALE), torch.float32)
            assert (got[:, 1] == 0).all()
    (got,) = run("attention", launchers._launch_dense, (q, kv[:, :0], None, sink, SCALE))
    assert (got == 0).all()


def test_minimum_mask_without_sink(device):
    """A row of nothing but the dtype's minimum, no sink: the keys share the weight, as the formula says."""
    q, kv, mask, _ = Maker(device).dense(mask="min", dim=64, sink=False)
    mask[:, 2] = torch.finfo(mask.dtype).min
    (got,) = run("attention", launchers._launch_dense, (q, kv, mask, None, SCALE))
    close(got, dense_formula(q, kv, mask, None, SCALE), torch.float32)
    torch.testing.assert_close(got[0, 2], kv[0].mean(0).expand(4, -1), rtol=1e-4, atol=1e-5)
    again = torch.full_like(got, float("nan"))
    attend((again,), q, Keys(kv), mask, None, SCALE, None, SMALL, splits=3)
    close(again, got, torch.float32)


def test_mask_passes(device, monkeypatch):
    """Long prefills list their masks in passes of a bounded workspace."""
    for shared in (True, False):
        q, kv, mask, sink = Maker(device).dense(queries=7, mask="float", dim=64)
        mask = mask[:1] if shared else mask
        want = dense_formula(q, kv, mask, sink, SCALE)
        for rows in (1, 3, 7, 100):
            monkeypatch.setattr(attention_launch, "rows_per_pass", lambda keys, rows=rows: rows)
            (got,) = run("attention", launchers._launch_dense, (q, kv, mask, sink, SCALE))
            close(got, want, torch.float32)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("pools", ["one", "lengths", "two"])
@pytest.mark.parametrize("tokens", [1, 3, 5])
def test_gathered(device, dtype, pools, tokens):
    m = Maker(device, dtype)
    args = m.gathered(tokens=tokens, dim=64, columns=37, heads=5)
    second = m.second_pool(tokens=tokens, dim=64, columns=19)
    extra = {"one": (), "lengths": second[:1], "two": second}[pools]
    (got,) = run("attention_gathered", launchers._launch_gathered, (*args, SCALE, *extra))
    close(got, gathered_formula(*args, SCALE, *extra), dtype)


def test_gathered_many_ragged_tokens(device):
    m = Maker(device)
    args = m.gathered(tokens=127, dim=64, columns=5, heads=2)
    (got,) = run("attention_gathered", launchers._launch_gathered, (*args, SCALE))
    close(got, gathered_formula(*args, SCALE), torch.float32)


def test_gathered_bad_indices(device):
    """-1, out-of-range and 64-bit indices are masked; NaN rows behind them, and rows nobody picks, never show."""
    q, kv, indices, sink = Maker(device).gathered(dim=64)
    used = torch.zeros(len(kv), dtype=torch.bool, device=device)
    used[indices[indices >= 0].long()] = True
    used[0] = False
    indices[indices == 0] = -1
    want = gathered_formula(q, kv, indices, sink, SCALE)
    kv[~used] = float("nan")
    gone = indices < 0
    forms = [indices, indices.masked_fill(gone, len(kv)), indices.masked_fill(gone, 2**31 - 1)]
    forms += [indices.long().masked_fill(gone, 2**40), indices.long().masked_fill(gone, -(2**40))]
    for form in forms:
        (got,) = run("attention_gathered", launchers._launch_gathered, (q, kv, form, sink, SCALE))
        close(got, want, torch.float32)


def test_gathered_mixed_index_dtypes(device):
    m = Maker(device)
    args, second = list(m.gathered(dim=64)), list(m.second_pool(dim=64))
    want = gathered_formula(*args, SCALE, *second)
    for first_dtype, second_dtype in ((torch.int64, torch.int32), (torch.int32, torch.int64)):
        args[2], second[2] = args[2].to(first_dtype), second[2].to(second_dtype)
        (got,) = run("attention_gathered", launchers._launch_gathered, (*args, SCALE, *second))
        close(got, want, torch.float32)


def test_gathered_nothing(device):
    q, kv, indices, sink = Maker(device).gathered(dim=64)
    cos, sin = Maker(device).rope(5, half=16)
    nothing = torch.full_like(indices, -1)
    for s in (sink, None):
        (got,) = run("attention_gathered", launchers._launch_gathered, (q, kv, nothing, s, SCALE))
        assert (got == 0).all()
        codes, scales = run(
            "attention_gathered_rope_quant",
            launchers._launch_gathered_quant,
            (q, kv, nothing, s, cos, sin, SCALE, 2, 32),
        )
        assert (codes.view(torch.uint8) & 0x7F == 0).all() and torch.isfinite(scales).all()
        assert (scales[..., :5] > 0).all() and (scales[..., 5:] == 0).all()


def test_wide_strides(device):
    """Operands that are slices of larger tensors: q with heads first, kv rows of a wider cache, strided tables."""
    m = Maker(device)
    q = m.normal(2, 4, 5, 64).transpose(1, 2)
    cache = m.normal(2, 17, 96)
    kv, mask = cache[..., :64], m.normal(2, 17, 5).transpose(1, 2)
    table = m.normal(2, 5, 32)
    cos, sin = table[..., ::2], table[..., 1::2]
    (got,) = run("attention_rope", launchers._launch_dense_rope, (q, kv, mask, None, cos, sin, SCALE, 2))
    want = rope_formula(dense_formula(q, kv, mask, None, SCALE).flatten(0, 1), cos.flatten(0, 1), sin.flatten(0, 1), 2)
    close(got, want, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("half", [8, 32])
def test_rope(device, dtype, half):
    m = Maker(device, dtype)
    args = m.dense(mask="float", dim=128)
    cos, sin = m.rope(2, 5, half=half)
    (got,) = run("attention_rope", launchers._launch_dense_rope, (*args, cos, sin, SCALE, 2))
    want = rope_formula(dense_formula(*args, SCALE).flatten(0, 1), cos.flatten(0, 1), sin.flatten(0, 1), 2)
    close(got, want, dtype)


QUANT = [(128, "fp32", False), (32, "fp32", False), (128, "ue8m0", False), (32, "ue8m0", True), (64, "ue8m0", True)]


def agree(got, want, block):
    """Codes and scales against the reference: the kernel's sums differ in the last bits, so a scale may differ by an
    ulp (or, rarely, a power of two at its boundary) and a code by one step."""
    values = [reference.dequantise(*pair, block) for pair in (got, want)]
    assert relative_error(*values) < 5e-3
    differing = (got[0].view(torch.uint8) != want[0].view(torch.uint8)).float().mean().item()
    assert differing < 0.02


@pytest.mark.parametrize("block,rule,pack", QUANT)
@pytest.mark.parametrize("tokens", [1, 3, 5])
def test_quantised(device, block, rule, pack, tokens):
    m = Maker(device)
    dense = m.dense(batch=1, queries=tokens, mask="bool", dim=256)
    quant = (SCALE, 2, block, rule, 1e-10, pack)
    args = (*dense, *m.rope(1, tokens), *quant)
    got = run("attention_rope_quant", launchers._launch_dense_quant, args)
    want = reference.attention_rope_quant(*args)
    assert got[1].shape == want[1].shape and (got[1][..., tokens:] == 0).all()
    agree(got, want, block)
    gathered = (*m.gathered(tokens=tokens, dim=256), *m.rope(tokens), *quant, *m.second_pool(tokens=tokens, dim=256))
    got = run("attention_gathered_rope_quant", launchers._launch_gathered_quant, gathered)
    want = reference.attention_gathered_rope_quant(*gathered)
    assert (got[1][..., tokens:] == 0).all()
    agree(got, want, block)


@pytest.mark.parametrize("splits", [2, 3, 7])
@pytest.mark.parametrize("form", ["mask", "range", "gathered"])
def test_splits(device, splits, form):
    """Split, merged and rotated equals unsplit; splits beyond the keys are empty."""
    m = Maker(device)
    q, kv, mask, sink = m.dense(1, keys=45, mask="float" if form == "mask" else "none", dim=64)
    keys, scales = Keys(kv, causal=form == "range", window=30 if form == "range" else 0), None
    if form == "gathered":
        q, pool, indices, sink = m.gathered(tokens=5, dim=64, columns=37)
        lengths, extra, extra_indices, extra_lengths = m.second_pool(dim=64, columns=19)
        q = q[None]
        keys = Keys(pool[None], indices, lengths, None, False, 0, extra, extra_indices, extra_lengths)
    tokens = q.shape[0] * q.shape[1]
    rope = Rope(*m.rope(q.shape[0], 5, half=16), 2)
    for epilogue in (None, rope):
        want, got = (q.new_full((tokens, 4, 64) if epilogue is None else (2, tokens, 128), 9.0) for _ in range(2))
        attend((want,), q, keys, mask, sink, SCALE, epilogue, SMALL, 1)
        attend((got,), q, keys, mask, sink, SCALE, epilogue, SMALL, splits)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    quantised = rope_quant(rope.cos, rope.sin, 2, 32, "ue8m0", 1e-10, True)
    pairs = []
    for count in (1, splits):
        codes = torch.full((2, tokens, 128), 0x7F, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        scales = torch.full((2, 1, (tokens + 3) // 4 * 4), -1, dtype=torch.int32, device=device)
        attend((codes, scales), q, keys, mask, sink, SCALE, quantised, SMALL, count)
        pairs.append((codes, scales))
    assert (pairs[1][1][..., tokens:] == 0).all()
    agree(pairs[1], pairs[0], 32)


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_partials(device, splits):
    m = Maker(device)
    args = m.gathered(tokens=3, dim=64, columns=150)
    pools = m.second_pool(tokens=3, dim=64, columns=70)
    pools[0][1] = 0
    pools[3][1] = 0
    q, kv, indices, sink = args
    partials, lse = run("attention_partials", launchers._launch_partials, (q, kv, indices, SCALE, splits, *pools))
    assert torch.isfinite(partials).all()
    assert (lse[:, 1] == float("-inf")).all() and (partials[:, 1] == 0).all()
    merged, _ = reference.merge_partials(partials, lse, None, sink)
    close(merged, gathered_formula(*args, SCALE, *pools), torch.float32)


@pytest.mark.parametrize("tile", [Tile(16, 32, 4, 1), Tile(32, 16, 4, 2), Tile(64, 64, 8, 2)])
def test_tiles(device, tile):
    """The result does not depend on the tile beyond rounding, whether heads fill it or not."""
    m = Maker(device)
    q, kv, mask, sink = m.dense(batch=1, queries=2, heads=40, keys=70, dim=64, mask="bool")
    out = torch.full_like(q, float("nan")).contiguous()
    attend((out,), q, Keys(kv), mask, sink, SCALE, None, tile, 1)
    close(out, dense_formula(q, kv, mask, sink, SCALE), torch.float32)


def test_refusals():
    q, kv, mask, sink = Maker().dense(dim=96)
    assert "head_dim 96" in launchers._refuses_dense(q, kv, mask, sink, 0.1, False, 0)
    q, kv, mask, sink = Maker("cpu", torch.float64).dense()
    assert "float64" in launchers._refuses_dense(q, kv, mask, sink, 0.1, False, 0)
    q, kv, mask, sink = Maker().dense()
    assert "block 48" in attention_launch.refuses(q, quant_block=48)
