# SPDX-License-Identifier: Apache-2.0
"""The number-format helpers of device code against torch's casts, bit for bit, over every input class."""

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from fusion_pass.kernels.triton import interpreter  # noqa: E402

SIZE = 1 << 15


@triton.jit
def _encode(x_ptr, y_ptr, N: tl.constexpr, NATIVE: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y_ptr + i, interpreter.encode_e4m3(tl.load(x_ptr + i), NATIVE))


@triton.jit
def _decode(x_ptr, y_ptr, N: tl.constexpr, NATIVE: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, interpreter.decode_e4m3(tl.load(x_ptr + i), NATIVE))


@triton.jit
def _cast(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y_ptr + i, interpreter.cast_fp32(tl.load(x_ptr + i), y_ptr.dtype.element_ty))


@triton.jit
def _load(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y_ptr + i, interpreter.load_fp32(tl.load(x_ptr + i)))


@triton.jit
def _by_448(x_ptr, y_ptr, r_ptr, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    quotient = interpreter.divide_by_448(tl.load(x_ptr + i))
    tl.store(y_ptr + i, quotient)
    tl.store(r_ptr + i, interpreter.exact_reciprocal(quotient))


@triton.jit
def _divide(x_ptr, s_ptr, y_ptr, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    s = tl.load(s_ptr + i)
    reciprocal = tl.div_rn(tl.full(s.shape, 1.0, tl.float32), s)
    tl.store(y_ptr + i, interpreter.exact_divide(tl.load(x_ptr + i), s, reciprocal))


def fp32_samples(device):
    """Random bit patterns (every exponent, subnormals, NaN, infinities), the E4M3 range, and every tie of the E4M3
    grid."""
    gen = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (SIZE // 2,), generator=gen).to(torch.int32).view(torch.float32)
    codes = torch.arange(0, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes[1:] + codes[:-1]) / 2
    beyond = torch.tensor([464.0, 1e9, float("inf")])
    special = torch.cat([codes, ties, ties * (1 + 2**-23), ties * (1 - 2**-23), beyond])
    special = torch.cat([special, -special])
    normal = torch.randn(SIZE - SIZE // 2 - special.numel(), generator=gen) * 30
    return torch.cat([bits, special, normal]).to(device)


@pytest.mark.parametrize("native", [False, True])
def test_e4m3_encode_is_torchs(device, native):
    if native and not interpreter.e4m3_is_native(device):
        pytest.skip("no E4M3 instructions on this device")
    x = fp32_samples(device)
    codes = torch.full((SIZE,), 0xEE, dtype=torch.uint8, device=device)
    _encode[(SIZE // 1024,)](x, codes, 1024, native)
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    nan = x.isnan()
    assert nan.any() and torch.equal(codes[~nan], expected[~nan])
    assert ((codes[nan] & 0x7F) == 0x7F).all()


@pytest.mark.parametrize("native", [False, True])
def test_e4m3_decode_is_torchs(device, native):
    if native and not interpreter.e4m3_is_native(device):
        pytest.skip("no E4M3 instructions on this device")
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    x = torch.full((256,), -7.0, device=device)
    _decode[(1,)](codes, x, 256, native)
    want = codes.view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(x, want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(x.signbit()[~want.isnan()], want.signbit()[~want.isnan()])      # of zero as well


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy reports the overflow to infinity that is asked for
def test_casts_are_torchs(device, dtype):
    x = fp32_samples(device)
    y = torch.zeros(SIZE, dtype=dtype, device=device)
    _cast[(SIZE // 1024,)](x, y, 1024)
    torch.testing.assert_close(y, x.to(dtype), rtol=0, atol=0, equal_nan=True)
    back = torch.zeros(SIZE, device=device)
    _load[(SIZE // 1024,)](y, back, 1024)
    torch.testing.assert_close(back, y.float(), rtol=0, atol=0, equal_nan=True)


def test_exact_divide_is_ieee(device):
    gen = torch.Generator().manual_seed(1)
    x = (torch.randn(SIZE, generator=gen) * 100).to(device)
    s = (torch.rand(SIZE, generator=gen) + 1e-3).to(device)
    y = torch.zeros(SIZE, device=device)
    _divide[(SIZE // 1024,)](x, s, y, 1024)
    assert torch.equal(y, x / s)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_scales_are_ieee(device):
    """amax / 448 and its reciprocal: all mantissas of some binades, the smallest admissible values, infinity, NaN."""
    mantissa = torch.arange(0, 1 << 23, 1 if device.type == "cuda" else 509, dtype=torch.int32)
    binades = [(mantissa | (e + 127) << 23).view(torch.float32) for e in (-118, -117, -60, 0, 8, 100, 127)]
    x = torch.cat([*binades, torch.tensor([float("inf"), float("nan")])])
    x = x[~(x < 448 * 2.0**-126)]
    x = torch.nn.functional.pad(x, (0, -len(x) % 1024), value=1.0).to(device)
    quotient, reciprocal = torch.zeros_like(x), torch.zeros_like(x)
    _by_448[(len(x) // 1024,)](x, quotient, reciprocal, 1024)
    # Divided by a tensor: by a number, torch multiplies with its reciprocal on a GPU.
    exact = x / torch.full_like(x, 448)
    for got, want in ((quotient, exact), (reciprocal, torch.ones_like(x) / exact)):
        same = (got.view(torch.int32) == want.view(torch.int32)) | (got.isnan() & want.isnan())
        assert same.all(), (x[~same][:5], got[~same][:5], want[~same][:5])
