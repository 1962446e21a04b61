# SPDX-License-Identifier: Apache-2.0
"""The FP8 BGEMM kernel (interpreter or GPU): scale layouts, block widths, ragged sizes, every form of the loop."""

import pytest
import torch
from op_cases import Maker, relative_error

pytest.importorskip("triton")

from fusion_pass.kernels import reference  # noqa: E402
from fusion_pass.kernels.triton import bgemm, launchers  # noqa: E402
from fusion_pass.kernels.triton.interpreter import interpreted  # noqa: E402
from fusion_pass.kernels.tuning.bgemm import TILES, Tile  # noqa: E402

TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float32: 2e-6}


def check(args, block=128, weight_block=128, dtype=torch.bfloat16, tile=None, native=None):
    codes, _, weight, _ = args
    out = torch.full((codes.shape[1], codes.shape[0], weight.shape[1]), float("nan"), dtype=dtype, device=codes.device)
    bgemm.fp8_bgemm(out, *args, block, weight_block, tile, native)
    want = reference.fp8_bgemm(*args, block, weight_block, torch.float64)
    assert torch.isfinite(out).all()
    # Tensor cores add E4M3 products of one step with fewer bits than fp32.
    allowed = TOLERANCE[dtype] if interpreted() else max(TOLERANCE[dtype], 2e-4)
    assert relative_error(out, want) < allowed


@pytest.mark.parametrize("block,weight_block,packed,stored", [
    (128, 128, False, "fp32"), (128, 128, True, "e8m0"), (32, 32, True, "uint8"), (32, 32, False, "fp32"),
    (128, 32, False, "e8m0"), (32, 128, True, "fp32"), (64, 256, False, "fp32"),
])  # fmt: skip
def test_scale_forms(device, block, weight_block, packed, stored):
    check(Maker(device).bgemm(2, 5, 192, 512, block, weight_block, packed, stored), block, weight_block)


@pytest.mark.parametrize("tokens", [1, 3, 5, 127])
def test_ragged_tokens(device, tokens):
    check(Maker(device).bgemm(2, tokens, 64, 256))


@pytest.mark.parametrize("rows", [16, 130, 200])
def test_ragged_rows(device, rows):
    check(Maker(device).bgemm(1, 3, rows, 256))
    check(Maker(device).bgemm(1, 3, rows, 256, 32, 32, True, "uint8"), 32, 32)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_output_dtypes(device, dtype):
    check(Maker(device).bgemm(), dtype=dtype)


@pytest.mark.parametrize("swap", [True, False])
@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("block_r", [64, 128])
def test_forms(device, swap, prefetch, block_r):
    tile = Tile(block_r, 32, 4, 3, swap, prefetch_scales=prefetch)
    check(Maker(device).bgemm(2, 37, 136, 256), tile=tile)
    check(Maker(device).bgemm(1, 9, 136, 128, 32, 32, True, "uint8"), 32, 32, tile=tile)


def test_strided_operands(device):
    """Codes as a slice of a [T, G, K] tensor, weights of a wider one."""
    codes, scales, weight, factors = Maker(device).bgemm(2, 5, 64, 256)
    by_token = codes.view(torch.uint8).transpose(0, 1).contiguous().transpose(0, 1).view(torch.float8_e4m3fn)
    wide = torch.zeros(2, 64, 512, dtype=torch.uint8, device=device)
    wide[..., :256] = weight.view(torch.uint8)
    check((by_token, scales, wide.view(torch.float8_e4m3fn)[..., :256], factors))


def test_all_codes(device):
    """Each E4M3 value times one: the operands decode exactly (NaN codes aside)."""
    values = torch.arange(256, dtype=torch.uint8, device=device)
    values = values[(values & 0x7F) != 0x7F].view(torch.float8_e4m3fn)
    codes = torch.zeros(1, len(values), 128, dtype=torch.uint8, device=device)
    codes[0, :, 3] = values.view(torch.uint8)
    weight = torch.zeros(1, 16, 128, device=device)
    weight[0, 5, 3] = 1.0
    scales = torch.ones(1, 1, (len(values) + 3) // 4 * 4, device=device)
    out = torch.empty(len(values), 1, 16, device=device)
    operands = (codes.view(torch.float8_e4m3fn), scales, weight.to(torch.float8_e4m3fn), scales.new_ones(1, 1, 1))
    for native in (None, False):
        bgemm.fp8_bgemm(out, *operands, native=native)
        assert torch.equal(out[:, 0, 5], values.float())


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [16, 8])
@pytest.mark.parametrize("tokens", [1, 8, 16, 31, 64, 100, 257, 600, 4097])
def test_real_shapes(tokens, groups):
    """Every row of the table at DeepSeek-V4's sizes, and the path of GPUs without E4M3 arithmetic."""
    args = Maker("cuda").bgemm(groups, tokens, 1024, 4096)
    check(args)
    if tokens <= 257:
        check(args, native=False)
        check(Maker("cuda").bgemm(groups, tokens, 1024, 4096, 32, 32, True, "e8m0"), 32, 32)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", sorted({t for rows in TILES.values() for _, t in rows}, key=str))
def test_every_tile(tile):
    check(Maker("cuda").bgemm(4, 131, 1024, 4096), tile=tile)


def test_refusals():
    args = Maker().bgemm()
    assert "float64" in bgemm.refuses(*args, 128, 128, torch.float64)
    assert "block 16" in bgemm.refuses(*args, 16, 128, torch.bfloat16)
    assert launchers.bgemm.refuses(*args, 128, 128, torch.bfloat16) is None
