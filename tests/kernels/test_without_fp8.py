# SPDX-License-Identifier: Apache-2.0
"""GPUs that the others leave out, forced on the GPU at hand: E4M3 encoded and decoded by bits (no FP8 instructions
below compute capability 8.9), and the tiles of every other architecture. What is not tested here is those GPUs
themselves; that every kernel compiles for them, and fits, is in test_compile.py."""

import pytest
import torch
from op_cases import Maker, gathered_formula, relative_error

pytest.importorskip("triton")

from fusion_pass.kernels import reference  # noqa: E402
from fusion_pass.kernels.ops import SPECS  # noqa: E402
from fusion_pass.kernels.triton import (  # noqa: E402
    attention_launch,
    bgemm,
    launchers,
    merge,
    paged,
    reduce_launchers,
    rope_quant,
)
from fusion_pass.kernels.tuning import attention as attention_tiles  # noqa: E402
from fusion_pass.kernels.tuning import bgemm as bgemm_tiles  # noqa: E402

pytestmark = pytest.mark.gpu
RULES = [("fp32", False, 128), ("ue8m0", False, 128), ("ue8m0", True, 128), ("ue8m0", True, 32), ("fp32", False, 32)]


def run(name: str, launch, args: tuple) -> tuple[torch.Tensor, ...]:
    """The portable launcher into poisoned outputs."""
    args = SPECS[name].complete(args, {})
    outs = SPECS[name].empty(*args)
    for out in outs:
        out.view(torch.uint8).fill_(0x7F)
    launch(outs, *args)
    return outs


def both_ways(monkeypatch, work, *args):
    """(results of ``work(*args)`` with FP8 instructions, results by bits)."""
    native = work(*args)
    with monkeypatch.context() as patch:
        for module in (attention_launch, bgemm, merge, paged, rope_quant):
            patch.setattr(module, "e4m3_is_native", lambda device: False)
        return native, work(*args)


def assert_same_bits(native, by_bits) -> None:
    for a, b in zip(native, by_bits, strict=True):
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def extreme(x: torch.Tensor) -> torch.Tensor:
    """Rows of tiny, huge and infinite values, zeros and a NaN among random ones."""
    x = x.float()
    x[0] *= 1e-8
    x[1, 0] = 0
    x[1, 1] *= 1e30
    x[2, 0, 3] = float("inf")
    x[2, 1, 200] = float("nan")
    return x.bfloat16()


@pytest.mark.parametrize("rule, pack, block", RULES)
def test_epilogue(monkeypatch, rule, pack, block):
    """Codes and scales of the standalone epilogue and of the merge, bit for bit."""
    m = Maker("cuda", torch.bfloat16)
    for tokens in (3, 64):
        o, rope = extreme(m.normal(tokens, 16, 512)), m.rope(tokens)
        arguments = (o, *rope, 2, block, rule, 1e-10, pack)
        name = "inverse_rope_quant"
        assert_same_bits(*both_ways(monkeypatch, run, name, reduce_launchers._launch_rope_quant, arguments))
        partials, lse = m.partials(18, tokens, 16, 512)
        arguments = (partials, lse, None, m.normal(16, dtype=torch.float32), *rope, 2, block, rule, 1e-10, pack)
        name = "merge_partials_rope_quant"
        assert_same_bits(*both_ways(monkeypatch, run, name, reduce_launchers._launch_merge_rope_quant, arguments))


@pytest.mark.parametrize("heads", [128, 16])
@pytest.mark.parametrize("tokens", [2, 200])
def test_attention(monkeypatch, tokens, heads):
    """Codes and scales behind attention, split and not; rows of FP8 pages decoded by bits."""
    m = Maker("cuda", torch.bfloat16)
    q, kv, indices, sink = m.gathered(tokens, heads, 512, 500, 300)
    rope = m.rope(tokens)
    for rule, pack, block in RULES:
        arguments = (q, kv, indices, sink, *rope, 0.05, heads // 8, block, rule, 1e-10, pack)
        name = "attention_gathered_rope_quant"
        assert_same_bits(*both_ways(monkeypatch, run, name, launchers._launch_gathered_quant, arguments))
    pages = m.pages(40, 8)
    arguments = (q, pages, m.integers(-1, 320, (tokens, 200)), sink, 0.05, 8)
    assert_same_bits(*both_ways(monkeypatch, run, "attention_paged_fp8", launchers._launch_paged, arguments))


def test_decoded_rows_are_the_formula(monkeypatch):
    """Every row of a cache that holds every code and exponent, decoded by bits, is the reference's row."""
    m = Maker("cuda", torch.bfloat16)
    pages = m.pages(16, 8)
    codes = torch.arange(256, dtype=torch.uint8, device="cuda")
    codes[(codes & 0x7F) == 0x7F] = 0  # NaN codes aside
    pages[:, :256] = codes
    pages[:, 8 * 576 : 8 * 584] = m.integers(1, 240, (16, 64), dtype=torch.uint8)
    indices = torch.arange(128, dtype=torch.int32, device="cuda").view(1, 128)
    q = m.normal(1, 16, 512)
    want = reference.decode_pages(pages, 8, torch.bfloat16)

    def decoded():
        ((_, _, rows, lists),) = list(paged.decoded_chunks(q, pages, 8, indices, None, None, None, None, 0))
        assert torch.equal(lists[0].long(), torch.arange(128, device="cuda"))
        return (rows[:128].clone(),)

    native, by_bits = both_ways(monkeypatch, decoded)
    assert_same_bits(native, by_bits)
    assert_same_bits(by_bits, (want,))


@pytest.mark.parametrize("tokens", [1, 16, 40, 300])
@pytest.mark.parametrize("form", [{}, {"packed": True, "stored": "e8m0"}, {"block": 32, "weight_block": 32}])
def test_bgemm_is_no_further_from_float64(tokens, form):
    """E4M3 decoded to bf16 is exact, so the product by bits errs by its fp32 sums alone."""
    m = Maker("cuda")
    args = m.bgemm(4, tokens, 512, 4096, **form)
    blocks = (form.get("block", 128), form.get("weight_block", 128))
    exact = reference.fp8_bgemm(*args, *blocks, torch.float64)
    errors = []
    for native in (True, False):
        out = torch.full((tokens, 4, 512), float("nan"), device="cuda")
        bgemm.fp8_bgemm(out, *args, *blocks, native=native)
        errors.append(relative_error(out, exact))
    print(f"{tokens} tokens, {form}: native {errors[0]:.2e}, by bits {errors[1]:.2e}")
    assert errors[1] <= errors[0] and errors[1] < 1e-6


@pytest.mark.parametrize("table", sorted(set(attention_tiles.TILES) - {"sm90"}))
def test_attention_tiles_of_other_architectures(table):
    """Their tiles give right results here (they are smaller, so they fit)."""
    for (size, heads), tile in attention_tiles.TILES[table].items():
        m = Maker("cuda", torch.bfloat16 if size == 2 else torch.float32)
        q, kv, indices, sink = m.gathered(7, heads + 8, 512, 400, 150)
        out = torch.full(q.shape, float("nan"), dtype=q.dtype, device="cuda")
        keys = attention_launch.Keys(kv[None], indices)
        for splits in (1, 3):
            attention_launch.attend((out,), q[None], keys, None, sink, 512**-0.5, None, tile, splits)
            want = gathered_formula(q, kv, indices, sink, 512**-0.5)
            assert relative_error(out, want) < (4e-3 if size == 2 else 1e-5), (table, heads, splits)


@pytest.mark.parametrize("table", ["small", "decoding"])
def test_bgemm_tiles_of_other_architectures(table):
    m = Maker("cuda")
    for limit, tile in (*bgemm_tiles.TILES[table], *bgemm_tiles.INVARIANT[table]):
        tokens = min(limit, 130)
        args = m.bgemm(4, tokens, 192, 1024)
        out = torch.full((tokens, 4, 192), float("nan"), device="cuda")
        bgemm.fp8_bgemm(out, *args, tile=tile, native=table == "small")
        assert relative_error(out, reference.fp8_bgemm(*args, out_dtype=torch.float64)) < 1e-3
