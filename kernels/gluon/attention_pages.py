# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"
"""The producers of the Hopper attention that decode rows of a paged FP8 cache (layout: reference/paged.py).

Two warpgroups, one for each tile of a pair. cp.async brings a chunk's codes of every row into the buffer that their
bf16 form will fill, so that the copies of a whole tile are in flight and no memory beside the buffers is needed; what
has landed is read into registers, converted and stored over itself. What is stored is what the bf16 producer would have
copied there: the consumers do not know the difference.

Control code is what makes such a producer slow (computing barriers and addresses at run time takes longer than the
conversion), hence nothing but the loop over tiles is a loop, and the tile of the pair is a constant.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier
from triton.language.core import _aggregate as aggregate

from . import cluster
from .attention_shared import load_q
from .hopper import MASKED_SCORE, TILE, pin_int

ROW_UNITS = gl.constexpr(36)  # units of 16 bytes of a row: 448 codes and 64 bf16 values
TAIL = gl.constexpr(112)  # 4-byte words in front of a row's bf16 values
PIECE = gl.constexpr(16)  # words of codes under one exponent; a chunk has two pieces

# A chunk's codes or a row's bf16 values [64 rows, 32 words]: every thread has 16 bytes of each piece of two rows.
WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
DECODED = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))  # a decoded piece [64 rows, 32 words]
# Codes in the first half of their chunk's buffer, pieces of odd rows exchanged: eight threads meet all banks.
CODES = gl.constexpr(gl.SwizzledSharedLayout(16, 1, 2, order=[1, 0]))
VALUES = gl.constexpr(gl.NVMMASharedLayout(128, 32, rank=2))  # a chunk's buffer, or half of it, as words

# Four E4M3 codes to bf16: the hardware's conversion to fp16 (exact, NaN included), fp32, bf16, and a product with the
# block's power of two, which is exact but for results below bf16's normal range, which are rounded once.
DECODE_ASM = gl.constexpr(
    "{ .reg .b16 h, g; .reg .b32 x, y; .reg .f32 a, b; mov.b32 {h, g}, $2; "
    "cvt.rn.f16x2.e4m3x2 x, h; cvt.rn.f16x2.e4m3x2 y, g; "
    "mov.b32 {h, g}, x; cvt.f32.f16 a, h; cvt.f32.f16 b, g; cvt.rn.bf16x2.f32 x, b, a; mul.rn.bf16x2 $0, x, $3; "
    "mov.b32 {h, g}, y; cvt.f32.f16 a, h; cvt.f32.f16 b, g; cvt.rn.bf16x2.f32 y, b, a; mul.rn.bf16x2 $1, y, $3; }"
)
# A scale 2**(e - 127) as a pair of bf16, e in the lowest byte; e = 0 is the subnormal 0x40, e = 255 is infinity.
SCALE_ASM = gl.constexpr(
    "{ .reg .b32 t; prmt.b32 t, $1, 0, 0x4440; shl.b32 t, t, 7; max.u32 t, t, 0x40; prmt.b32 $0, t, 0, 0x1010; }"
)


@aggregate
class Pages:
    """Two paged caches."""

    data0: gl.tensor  # 4-byte words
    data1: gl.tensor
    stride0: gl.tensor  # units of 16 bytes from one page to the next
    stride1: gl.tensor
    SIZE0: gl.constexpr  # rows of a page
    SIZE1: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, data0, data1, stride0, stride1, SIZE0, SIZE1):
        self.data0 = data0
        self.data1 = data1
        self.stride0 = stride0
        self.stride1 = stride1
        self.SIZE0 = gl.constexpr(SIZE0)
        self.SIZE1 = gl.constexpr(SIZE1)

    @gluon.jit
    def locate(self, index, second, POOLS: gl.constexpr):
        """Pointers to rows' values and to their exponents. Those of invalid keys are meaningless."""
        index = index.to(gl.int32)
        page = index // self.SIZE0
        row = index - page * self.SIZE0
        size = row * 0 + self.SIZE0
        stride = self.stride0
        data = self.data0
        if POOLS == 2:
            stride = gl.where(second, self.stride1, self.stride0)
            data = gl.where(second, self.data1, self.data0)
            if self.SIZE0 != self.SIZE1:
                other = index // self.SIZE1
                page = gl.where(second, other, page)
                row = gl.where(second, index - other * self.SIZE1, row)
                size = gl.where(second, self.SIZE1, size)
        start = page.to(gl.int64) * stride
        values = data + (start + row * ROW_UNITS) * 4
        exponents = data + ((start + size * ROW_UNITS) * 4 + row * 2)
        return values, exponents


@gluon.jit
def decode(codes, exponents):
    """bf16 values, as words [64, 32], of codes[64, 16] (words) under the exponents in exponents[64]'s lowest byte."""
    scale = gl.inline_asm_elementwise(SCALE_ASM, "=r,r", [exponents], dtype=gl.int32, is_pure=True, pack=1)
    scale = gl.expand_dims(scale, 1) + codes * 0
    low, high = gl.inline_asm_elementwise(
        DECODE_ASM, "=r,=r,r,r", [codes, scale], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return gl.convert_layout(gl.reshape(gl.join(low, high), [TILE, 2 * PIECE]), DECODED, assert_trivial=True)


@gluon.jit
def split_pieces(codes):
    """(columns 0..15, columns 16..31) of codes[64, 32]: different registers of the same threads."""
    pieces = gl.permute(gl.reshape(codes, [TILE, 2, PIECE]), (0, 2, 1))
    left, right = gl.split(pieces)
    return gl.convert_layout(left, WORDS, assert_trivial=True), gl.convert_layout(right, WORDS, assert_trivial=True)


@gluon.jit
def join_pieces(left, right):
    """left[64, 32] and right[64, 32] side by side."""
    return gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), [TILE, 4 * PIECE])


@gluon.jit
def start_ahead(sh, pointers, valid, HALF: gl.constexpr):
    """Copy the codes of chunk 2 to the unused half of a buffer for probabilities, before their own is free."""
    codes = sh.p[HALF].index(1)._reinterpret(gl.int32, [TILE, 2 * PIECE], CODES)
    async_copy.async_copy_global_to_shared(codes, pointers + 2 * (2 * PIECE), mask=gl.expand_dims(valid, 1))
    async_copy.commit_group()


@gluon.jit
def finish_ahead(sh, exponents, parity, HALF: gl.constexpr):
    """Decode what `start_ahead` has brought, which has landed, into chunk 2's buffer once that is free."""
    codes = sh.p[HALF].index(1)._reinterpret(gl.int32, [TILE, 2 * PIECE], CODES)
    values = sh.k._reinterpret(gl.int32, [8, TILE, 4 * PIECE], VALUES)
    mbarrier.wait(sh.empty[HALF * 4 + 2], parity)
    left, right = split_pieces(codes.load(WORDS))
    values.index(HALF * 4 + 2).store(join_pieces(decode(left, exponents), decode(right, exponents >> 8)))
    fence_async_shared()
    mbarrier.arrive(sh.full[HALF * 4 + 2])


@gluon.jit
def start_chunk(sh, pointers, valid, parity, HALF: gl.constexpr, CHUNK: gl.constexpr):
    """Copy a chunk's codes into its buffer once that is free; of the last chunk, the bf16 values to where they belong.
    Invalid keys get zeros and read nothing."""
    codes = sh.k._reinterpret(gl.int32, [16, TILE, 2 * PIECE], CODES)
    values = sh.k._reinterpret(gl.int32, [16, TILE, 2 * PIECE], VALUES)
    mask = gl.expand_dims(valid, 1)
    mbarrier.wait(sh.empty[HALF * 4 + CHUNK], parity)
    async_copy.async_copy_global_to_shared(codes.index(HALF * 8 + CHUNK * 2), pointers + CHUNK * (2 * PIECE), mask=mask)
    if CHUNK == 3:
        async_copy.async_copy_global_to_shared(values.index(HALF * 8 + 7), pointers + TAIL, mask=mask)
    async_copy.commit_group()


@gluon.jit
def finish_chunk(sh, exponents, HALF: gl.constexpr, CHUNK: gl.constexpr, BEHIND: gl.constexpr):
    """Decode a chunk where it is, once all but the BEHIND latest copies have landed, and let the consumers have it.
    `exponents`: the half of every row's 8 bytes in which the chunk's two are."""
    codes = sh.k._reinterpret(gl.int32, [16, TILE, 2 * PIECE], CODES)
    async_copy.wait_group(BEHIND)
    shifted = exponents >> ((CHUNK & 1) * 16)
    left, right = split_pieces(codes.index(HALF * 8 + CHUNK * 2).load(WORDS))
    if CHUNK == 3:
        values = sh.k._reinterpret(gl.int32, [16, TILE, 2 * PIECE], VALUES)
        values.index(HALF * 8 + 6).store(decode(left, shifted))
    else:
        values = sh.k._reinterpret(gl.int32, [8, TILE, 4 * PIECE], VALUES)
        values.index(HALF * 4 + CHUNK).store(join_pieces(decode(left, shifted), decode(right, shifted >> 8)))
    fence_async_shared()
    mbarrier.arrive(sh.full[HALF * 4 + CHUNK])


@gluon.jit
def pages_producer(
    sh, keys, pages, jobs, q, q_strides, BATCHED: gl.constexpr, AHEAD: gl.constexpr, HALF: gl.constexpr
):  # fmt: skip
    """Decode the key rows of tile HALF of every pair of every job, as far ahead as the buffers allow; the first
    producer loads q as well.

    AHEAD: the upper halves of the buffers for probabilities are not used by another job's output meanwhile.
    """
    if jobs.PAIRED:
        cluster.announce()
    lane = gl.arange(0, TILE, gl.SliceLayout(1, WORDS))
    word = gl.expand_dims(gl.arange(0, 2 * PIECE, gl.SliceLayout(0, WORDS)), 0)
    done = 0
    turn = 0
    for job in range(gl.program_id(0), jobs.count, gl.num_programs(0)):
        block, split, list_row, token = jobs.place(job)
        first, count0, count1 = keys.counts(token, list_row)
        low, end, pairs = jobs.share(split, count0, count1)
        index = keys.load_tile(low + HALF, end, lane, list_row, first, count0, count1)
        if HALF == 0:
            load_q(sh, jobs, keys, q, q_strides, block, token, turn, BATCHED)
        for tile in range(low + HALF, low + 2 * pairs, 2):
            parity = (done & 1) ^ 1
            index = pin_int(index)
            valid = keys.valid(index, tile, count0)
            values, exponents = pages.locate(index, tile >= gl.cdiv(count0, TILE), keys.POOLS)
            exponents_low = gl.load(exponents, mask=valid, other=0)
            exponents_high = gl.load(exponents + 1, mask=valid, other=0)
            index = keys.load_tile(tile + 2, end, lane, list_row, first, count0, count1)
            pointers = gl.expand_dims(values, 1) + word
            if AHEAD:
                # Chunks 1 to 3 become free together, at the end of a pair, and 2 is the first that is needed then.
                start_ahead(sh, pointers, valid, HALF)
                start_chunk(sh, pointers, valid, parity, HALF, 0)
                sh.terms.index(HALF).store(gl.where(valid, 0.0, MASKED_SCORE))
                mbarrier.arrive(sh.terms_ready[HALF])
                finish_chunk(sh, exponents_low, HALF, 0, 0)
                start_chunk(sh, pointers, valid, parity, HALF, 1)
                finish_ahead(sh, exponents_high, parity, HALF)
                start_chunk(sh, pointers, valid, parity, HALF, 3)
                finish_chunk(sh, exponents_low, HALF, 1, 1)
                finish_chunk(sh, exponents_high, HALF, 3, 0)
            else:
                start_chunk(sh, pointers, valid, parity, HALF, 0)
                sh.terms.index(HALF).store(gl.where(valid, 0.0, MASKED_SCORE))
                start_chunk(sh, pointers, valid, parity, HALF, 2)
                start_chunk(sh, pointers, valid, parity, HALF, 1)
                mbarrier.arrive(sh.terms_ready[HALF])
                finish_chunk(sh, exponents_low, HALF, 0, 2)
                start_chunk(sh, pointers, valid, parity, HALF, 3)
                finish_chunk(sh, exponents_high, HALF, 2, 2)
                finish_chunk(sh, exponents_low, HALF, 1, 1)
                finish_chunk(sh, exponents_high, HALF, 3, 0)
            done += 1
        turn += 1
