# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"
"""Number formats in device code, exact both on a GPU and under Triton's CPU interpreter.

The interpreter (``TRITON_INTERPRET=1``) keeps bf16 and fp8 tensors as the integers that hold their bits. Arithmetic on
them is therefore wrong (a bf16 ``tl.dot`` multiplies bit patterns), fp32 -> bf16 truncates, and fp32 -> e4m3 halves
values whose rounding carries into the exponent. The functions here take another, exact way there, chosen at compile
time by the constexpr ``INTERPRET``; on a GPU they compile to the plain instruction.

The bit-level E4M3 conversions also serve GPUs without ``fp8e4nv`` conversions (compute capability below 8.9): a
launcher passes ``NATIVE=e4m3_is_native(device)``. Codes travel as ``uint8`` bit patterns; view float8_e4m3fn tensors
as uint8 before the launch (``tensor.view(torch.uint8)``), so that one kernel source serves every architecture.

Format: E4M3FN (OCP 8-bit floating point): bias 7, subnormal step 2**-9, largest finite value 448 (0x7E), no infinity,
NaN is 0x7F / 0xFF.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _probe():
    pass


# Decided by what triton.jit returned in this process, so it cannot disagree with how the kernels really run.
INTERPRET = tl.constexpr(not isinstance(_probe, triton.JITFunction))


def interpreted() -> bool:
    """Whether kernels of this process run in Triton's CPU interpreter (then they take CPU tensors)."""
    return bool(INTERPRET.value)


def device_of(tensor: torch.Tensor) -> tuple[tuple[int, int], int]:
    """(compute capability, multiprocessors) of a tensor's GPU; the interpreter stands for one multiprocessor of an
    sm_90."""
    if interpreted():
        return (9, 0), 1
    return _properties(tensor.get_device())


@functools.cache
def _properties(index: int) -> tuple[tuple[int, int], int]:
    properties = torch.cuda.get_device_properties(index)
    return (properties.major, properties.minor), properties.multi_processor_count


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def e4m3_is_native(device: torch.device) -> bool:
    """Whether ``device`` converts to and from E4M3 in hardware (compute capability 8.9 and up). False when
    interpreted."""
    if interpreted() or device.type != "cuda":
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    return _capability(index) >= (8, 9)


def supports_pdl(device: torch.device) -> bool:
    """Whether ``device`` has programmatic dependent launch (compute capability 9.0 and up)."""
    if interpreted() or device.type != "cuda":
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    return _capability(index) >= (9, 0)


@triton.jit
def load_fp32(x):
    """fp32 values of a loaded floating tensor (fp32, fp16, bf16)."""
    if INTERPRET:
        if x.dtype == tl.bfloat16:
            y = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        else:
            y = x.to(tl.float32)
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def cast_fp32(x, DTYPE: tl.constexpr):
    """fp32 tensor rounded to nearest even into DTYPE (tl.float32, tl.float16 or tl.bfloat16)."""
    if INTERPRET:
        if DTYPE == tl.bfloat16:
            bits = x.to(tl.uint32, bitcast=True)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            # Rounding could carry a NaN's payload into the sign; keep it a quiet NaN.
            rounded = tl.where(x != x, (bits >> 16) | 0x40, rounded)
            y = rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
        else:
            y = x.to(DTYPE)
    else:
        y = x.to(DTYPE)
    return y


@triton.jit
def dot_operand(x):
    """Operand for ``tl.dot``: unchanged on a GPU; exact fp32 values under the interpreter (bf16 and fp16)."""
    if INTERPRET:
        y = load_fp32(x)
    else:
        y = x
    return y


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """fp32 tensor as a ``tl.dot`` operand of precision DTYPE: the values that rounding to DTYPE gives, in DTYPE on a
    GPU and in fp32 under the interpreter. Use it for softmax probabilities before the second product."""
    return dot_operand(cast_fp32(x, DTYPE))


@triton.jit
def encode_e4m3(x, NATIVE: tl.constexpr):
    """E4M3 bit pattern (uint8) of an fp32 tensor: nearest even, saturating at +-448, NaN becomes 0x7F."""
    if NATIVE:
        code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.uint32, bitcast=True)
        sign = (bits >> 24) & 0x80
        magnitude = bits & 0x7FFFFFFF
        # Normal range: round the fp32 mantissa to 3 bits; a carry moves into the exponent, as it should.
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20).to(tl.int32) - (120 << 3)
        # Below 2**-6: adding 2**14, whose fp32 spacing is 2**-9, rounds to the subnormal grid.
        small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(magnitude < 0x3C800000, small, tl.minimum(normal, 0x7E))
        code = tl.where(magnitude > 0x7F800000, 0x7F, code | sign.to(tl.int32)).to(tl.uint8)
    return code


@triton.jit
def decode_e4m3(code, NATIVE: tl.constexpr):
    """fp32 values of E4M3 bit patterns (uint8)."""
    if NATIVE:
        x = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        bits = code.to(tl.uint32)
        # Exponent and mantissa in place; the factor 2**120 corrects the bias and is exact for subnormals too.
        magnitude = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
        magnitude = tl.where((bits & 0x7F) == 0x7F, float("nan"), magnitude)
        # The sign as a bit: a negation is compiled to 0 - x, which has no -0.
        x = (magnitude.to(tl.uint32, bitcast=True) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)
    return x


@triton.jit
def exact_divide(x, divisor, reciprocal):
    """x / divisor with the IEEE result, given ``reciprocal = div_rn(1, divisor)``: one product and two FMAs instead
    of a division per element (Markstein: a correctly rounded reciprocal and one residual step round correctly as long
    as nothing under- or overflows; quotients here are at most about 448 and tiny ones encode to zero)."""
    if INTERPRET:
        q = tl.div_rn(x, tl.broadcast_to(divisor, x.shape))
    else:
        q = x * reciprocal
        q = tl.fma(tl.fma(-q, divisor, x), reciprocal, q)
    return q


# 1 / 448, rounded to fp32.
_RECIPROCAL_448 = tl.constexpr(0.002232142857142857)


@triton.jit
def divide_by_448(x):
    """x / 448 with the IEEE result, for finite x >= 448 * 2**-126, infinity and NaN: exact_divide with a constant
    reciprocal. A division instruction sequence is five times as long (the result was compared to it over all mantissas
    and the edges of the exponent range)."""
    if INTERPRET:
        q = tl.div_rn(x, tl.full(x.shape, 448.0, tl.float32))
    else:
        q = x * _RECIPROCAL_448
        q = tl.fma(tl.fma(-q, 448.0, x), _RECIPROCAL_448, q)
        q = tl.where(x == float("inf"), x, q)
    return q


@triton.jit
def exact_reciprocal(x):
    """1 / x with the IEEE result."""
    if INTERPRET:
        y = tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)
    else:
        y = tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Wait for the kernel this one was launched behind (no instruction unless PDL). Call before touching its
    outputs."""
    if PDL:
        if not INTERPRET:
            gdc_wait()


@triton.jit
def pdl_release(PDL: tl.constexpr):
    """Let the next kernel start its prologue (no instruction unless PDL)."""
    if PDL:
        if not INTERPRET:
            gdc_launch_dependents()
