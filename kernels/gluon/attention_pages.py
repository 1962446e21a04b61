# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"
"""The producer of the Hopper attention that decodes rows of a paged FP8 cache (layout: reference/paged.py).

cp.async brings the codes of 64 columns of every row (a piece) into the buffer that their bf16 form will fill, so that
all free chunks are in flight and nothing but the buffers holds them; once a piece has landed, its threads read it into
registers, convert it and store it over itself. What is stored is what the bf16 producer would have copied there: the
consumers do not know the difference. The rows of the next tile are prefetched into L2 meanwhile. The loops over tiles
and chunks are not unrolled: three warpgroups share one instruction cache.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier
from triton.language.core import _aggregate as aggregate

from .hopper import MASKED_SCORE, TILE, pin_int
from .producer import load_q

ROW_WORDS = gl.constexpr(144)  # 4-byte words of a row: 448 codes and 64 bf16 values
TAIL = gl.constexpr(112)  # where the bf16 values begin
PIECE = gl.constexpr(16)  # words of codes under one exponent

# Codes in the first half of their chunk's buffer, halves of odd rows exchanged: eight threads meet all banks.
RAW = gl.constexpr(gl.SwizzledSharedLayout(16, 1, 2, order=[1, 0]))
DONE = gl.constexpr(gl.NVMMASharedLayout(128, 32, rank=2))  # a chunk's buffer, or half of it, as words

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
PREFETCH_ASM = gl.constexpr(
    "{ .reg .pred p; setp.ne.u32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }"
)


@aggregate
class Pages:
    """Two paged caches."""

    data0: gl.tensor  # int32 words
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
        values = data + (start + row * (ROW_WORDS // 4)) * 4
        exponents = data + ((start + size * (ROW_WORDS // 4)) * 4 + row * 2)
        return values, exponents


@gluon.jit
def wait_for(barriers, slot, parity):
    """Wait for barrier `slot` of eight separate ones: branches are cheaper than what an array of barriers costs the
    consumers."""
    if slot < 4:
        if slot < 2:
            mbarrier.wait(barriers[0], parity, pred=slot == 0)
            mbarrier.wait(barriers[1], parity, pred=slot == 1)
        else:
            mbarrier.wait(barriers[2], parity, pred=slot == 2)
            mbarrier.wait(barriers[3], parity, pred=slot == 3)
    elif slot < 6:
        mbarrier.wait(barriers[4], parity, pred=slot == 4)
        mbarrier.wait(barriers[5], parity, pred=slot == 5)
    else:
        mbarrier.wait(barriers[6], parity, pred=slot == 6)
        mbarrier.wait(barriers[7], parity, pred=slot == 7)


@gluon.jit
def signal(barriers, slot):
    """Arrive at barrier `slot` of eight separate ones; every arrival is preceded by a barrier of the warps, so that
    only one may be met."""
    if slot < 4:
        if slot < 2:
            if slot == 0:
                mbarrier.arrive(barriers[0])
            else:
                mbarrier.arrive(barriers[1])
        elif slot == 2:
            mbarrier.arrive(barriers[2])
        else:
            mbarrier.arrive(barriers[3])
    elif slot < 6:
        if slot == 4:
            mbarrier.arrive(barriers[4])
        else:
            mbarrier.arrive(barriers[5])
    elif slot == 6:
        mbarrier.arrive(barriers[6])
    else:
        mbarrier.arrive(barriers[7])


@gluon.jit
def prefetch(values, exponents, valid, WARPS: gl.constexpr):
    """Bring rows and their exponents into L2."""
    LANES: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [WARPS, 1], [1, 0])  # [64 rows, 4 threads of a row]
    part = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, LANES)), 0)
    values = gl.expand_dims(gl.convert_layout(values, gl.SliceLayout(1, LANES), assert_trivial=True), 1)
    exponents = gl.expand_dims(gl.convert_layout(exponents, gl.SliceLayout(1, LANES), assert_trivial=True), 1)
    wanted = gl.convert_layout(valid.to(gl.int32), gl.SliceLayout(1, LANES), assert_trivial=True)
    wanted = gl.expand_dims(wanted, 1) + part * 0
    near = values + part * 16  # 64 bytes per thread of the row's 576
    rest = gl.where(part == 0, values + 128, exponents + part * 0)
    gl.inline_asm_elementwise(PREFETCH_ASM, "=r,l,r", [near, wanted], dtype=gl.int32, is_pure=False, pack=1)
    gl.inline_asm_elementwise(PREFETCH_ASM, "=r,l,r", [near + 64, wanted], dtype=gl.int32, is_pure=False, pack=1)
    gl.inline_asm_elementwise(PREFETCH_ASM, "=r,l,r", [rest, wanted], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def decode(codes, exponents, WARPS: gl.constexpr):
    """bf16 values, as words [64, 32], of codes[64, 16] (words) under the exponents in exponents[64]'s lowest byte."""
    DECODED: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [WARPS, 1], [1, 0])
    scale = gl.inline_asm_elementwise(SCALE_ASM, "=r,r", [exponents], dtype=gl.int32, is_pure=True, pack=1)
    scale = gl.expand_dims(scale, 1) + codes * 0
    low, high = gl.inline_asm_elementwise(
        DECODE_ASM, "=r,=r,r,r", [codes, scale], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return gl.convert_layout(gl.reshape(gl.join(low, high), [TILE, 2 * PIECE]), DECODED, assert_trivial=True)


@gluon.jit
def split_columns(codes, WORDS: gl.constexpr):
    """(columns 0..15, columns 16..31) of codes[64, 32]: different registers of the same threads."""
    pieces = gl.permute(gl.reshape(codes, [TILE, 2, PIECE]), (0, 2, 1))
    left, right = gl.split(pieces)
    return gl.convert_layout(left, WORDS, assert_trivial=True), gl.convert_layout(right, WORDS, assert_trivial=True)


@gluon.jit
def join_columns(left, right):
    """left[64, 32] and right[64, 32] side by side."""
    return gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), [TILE, 4 * PIECE])


@gluon.jit
def pages_producer(
    sh, keys, pages, jobs, q, q_strides, BATCHED: gl.constexpr, AHEAD: gl.constexpr, PREFETCH: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Load q, and decode the key rows of every job, as far ahead as the buffers allow."""
    # A row's codes of a chunk [64 rows, 32 words], its bf16 values [64, 32]: four threads per row, 2 x 16 bytes each.
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [WARPS, 1], [1, 0])
    lane = gl.arange(0, TILE, gl.SliceLayout(1, WORDS))
    word = gl.expand_dims(gl.arange(0, 2 * PIECE, gl.SliceLayout(0, WORDS)), 0)
    raw = sh.k._reinterpret(gl.int32, [16, TILE, 2 * PIECE], RAW)
    halves = sh.k._reinterpret(gl.int32, [16, TILE, 2 * PIECE], DONE)
    chunks = sh.k._reinterpret(gl.int32, [8, TILE, 4 * PIECE], DONE)
    done = 0
    turn = 0
    for job in range(gl.program_id(0), jobs.count, gl.num_programs(0)):
        block, split, list_row, token = jobs.place(job)
        first, count0, count1 = keys.counts(token, list_row)
        low, high = jobs.pairs(split, count0, count1)
        index = keys.load_tile(2 * low, lane, list_row, first, count0, count1)
        load_q(sh, jobs, keys, q, q_strides, block, token, turn, BATCHED, WARPS)
        for tile in range(2 * low, 2 * high):
            half = tile & 1
            parity = (done & 1) ^ 1
            index = pin_int(index)
            valid = keys.valid(index, tile, count0)
            values, exponent_words = pages.locate(index, tile >= gl.cdiv(count0, TILE), keys.POOLS)
            low_exponents = gl.load(exponent_words, mask=valid, other=0)
            high_exponents = gl.load(exponent_words + 1, mask=valid, other=0)
            index = keys.load_tile(tile + 1, lane, list_row, first, count0, count1)
            wait_for(sh.empty, half * 4, parity)  # chunk 0 is free: the last pair's terms have been read, too
            sh.terms.index(half).store(gl.where(valid, 0.0, MASKED_SCORE))
            mbarrier.arrive(sh.terms_ready[0], pred=half == 0)
            mbarrier.arrive(sh.terms_ready[1], pred=half != 0)
            mask = gl.expand_dims(valid, 1)
            pointers = gl.expand_dims(values, 1) + word
            for step in range((job >> 30) + 4 + AHEAD):  # not a constant: it would be unrolled
                # start copies of a chunk, in the order 0, 2, 1, 3, then decode one started AHEAD steps before
                if step < 4:
                    chunk = ((step & 1) << 1) | (step >> 1)
                    slot = half * 4 + chunk
                    wait_for(sh.empty, slot, parity)
                    async_copy.async_copy_global_to_shared(
                        raw.index(slot * 2), pointers + chunk * (2 * PIECE), mask=mask
                    )
                    if chunk == 3:
                        async_copy.async_copy_global_to_shared(
                            halves.index(slot * 2 + 1), pointers + TAIL, mask=mask
                        )
                async_copy.commit_group()
                async_copy.wait_group(AHEAD)
                if step >= AHEAD:
                    order = step - AHEAD
                    chunk = ((order & 1) << 1) | (order >> 1)
                    slot = half * 4 + chunk
                    exponents = gl.where(chunk < 2, low_exponents, high_exponents) >> ((chunk & 1) * 16)
                    left, right = split_columns(raw.index(slot * 2).load(WORDS), WORDS)
                    left = decode(left, exponents, WARPS)
                    if chunk < 3:
                        chunks.index(slot).store(join_columns(left, decode(right, exponents >> 8, WARPS)))
                    else:
                        halves.index(slot * 2).store(left)
                    if not sh.FENCED:
                        fence_async_shared()
                    signal(sh.full, slot)
                if PREFETCH and step == 2:
                    next_tile = tile + 1
                    next_valid = keys.valid(index, next_tile, count0)
                    a, b = pages.locate(index, next_tile >= gl.cdiv(count0, TILE), keys.POOLS)
                    prefetch(a, b, next_valid, WARPS)
            done += half
        turn += 1


@gluon.jit
def publish(sh, half, CHUNK: gl.constexpr):
    """Let the consumers read a chunk that has been stored."""
    if not sh.FENCED:
        fence_async_shared()
    if half == 0:
        mbarrier.arrive(sh.full[CHUNK])
    else:
        mbarrier.arrive(sh.full[4 + CHUNK])


@gluon.jit
def wait_empty(sh, half, parity, CHUNK: gl.constexpr):
    """Wait until a chunk's buffer is free."""
    mbarrier.wait(sh.empty[CHUNK], parity, pred=half == 0)
    mbarrier.wait(sh.empty[4 + CHUNK], parity, pred=half != 0)


@gluon.jit
def load_codes(pointers, valid, CHUNK: gl.constexpr):
    """A chunk's codes of every row, 0 where invalid; of the last chunk only the first half are codes."""
    return gl.load(pointers + CHUNK * (2 * PIECE), mask=gl.expand_dims(valid, 1), other=0)


@gluon.jit
def convert_chunk(chunks, half, codes, exponents, CHUNK: gl.constexpr, WORDS: gl.constexpr, WARPS: gl.constexpr):
    """Decode a whole chunk into its buffer; `exponents`: the word in which its two are."""
    shifted = exponents >> ((CHUNK & 1) * 16)
    left, right = split_columns(codes, WORDS)
    decoded = join_columns(decode(left, shifted, WARPS), decode(right, shifted >> 8, WARPS))
    chunks.index(half * 4 + CHUNK).store(decoded)


@gluon.jit
def find_tile(keys, pages, index, tile, count0):
    """(validity, pointers to values, words of exponents) of a tile's keys."""
    valid = keys.valid(index, tile, count0)
    values, exponent_words = pages.locate(index, tile >= gl.cdiv(count0, TILE), keys.POOLS)
    low = gl.load(exponent_words, mask=valid, other=0)
    high = gl.load(exponent_words + 1, mask=valid, other=0)
    return valid, values, low, high


@gluon.jit
def register_producer(sh, keys, pages, jobs, q, q_strides, BATCHED: gl.constexpr, WARPS: gl.constexpr):
    """Load q, and decode the key rows of every job: codes go from memory to registers two chunks ahead."""
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [WARPS, 1], [1, 0])
    lane = gl.arange(0, TILE, gl.SliceLayout(1, WORDS))
    word = gl.expand_dims(gl.arange(0, 2 * PIECE, gl.SliceLayout(0, WORDS)), 0)
    half_word = gl.expand_dims(gl.arange(0, PIECE, gl.SliceLayout(0, WORDS)), 0)
    halves = sh.k._reinterpret(gl.int32, [16, TILE, 2 * PIECE], DONE)
    chunks = sh.k._reinterpret(gl.int32, [8, TILE, 4 * PIECE], DONE)
    done = 0
    turn = 0
    for job in range(gl.program_id(0), jobs.count, gl.num_programs(0)):
        block, split, list_row, token = jobs.place(job)
        first, count0, count1 = keys.counts(token, list_row)
        low, high = jobs.pairs(split, count0, count1)
        index = keys.load_tile(2 * low, lane, list_row, first, count0, count1)
        following = keys.load_tile(2 * low + 1, lane, list_row, first, count0, count1)
        valid, values, low_exponents, high_exponents = find_tile(keys, pages, index, 2 * low, count0)
        codes = load_codes(gl.expand_dims(values, 1) + word, valid, 0)
        more = load_codes(gl.expand_dims(values, 1) + word, valid, 2)
        load_q(sh, jobs, keys, q, q_strides, block, token, turn, BATCHED, WARPS)
        for tile in range(2 * low, 2 * high):
            half = tile & 1
            parity = (done & 1) ^ 1
            pointers = gl.expand_dims(values, 1) + word
            wait_empty(sh, half, parity, 0)
            sh.terms.index(half).store(gl.where(valid, 0.0, MASKED_SCORE))
            convert_chunk(chunks, half, codes, low_exponents, 0, WORDS, WARPS)
            mbarrier.arrive(sh.terms_ready[0], pred=half == 0)
            mbarrier.arrive(sh.terms_ready[1], pred=half != 0)
            publish(sh, half, 0)
            codes = load_codes(pointers, valid, 1)
            wait_empty(sh, half, parity, 2)
            convert_chunk(chunks, half, more, high_exponents, 2, WORDS, WARPS)
            publish(sh, half, 2)
            last = gl.load(
                gl.expand_dims(values, 1) + 6 * PIECE + half_word, mask=gl.expand_dims(valid, 1), other=0
            )
            index = pin_int(following)
            following = keys.load_tile(tile + 2, lane, list_row, first, count0, count1)
            wait_empty(sh, half, parity, 1)
            convert_chunk(chunks, half, codes, low_exponents, 1, WORDS, WARPS)
            publish(sh, half, 1)
            next_valid, next_values, low_exponents, next_high = find_tile(keys, pages, index, tile + 1, count0)
            codes = load_codes(gl.expand_dims(next_values, 1) + word, next_valid, 0)
            wait_empty(sh, half, parity, 3)
            async_copy.async_copy_global_to_shared(
                halves.index(half * 8 + 7), pointers + TAIL, mask=gl.expand_dims(valid, 1)
            )
            if half == 0:
                async_copy.mbarrier_arrive(sh.full[3], increment_count=False)
            else:
                async_copy.mbarrier_arrive(sh.full[7], increment_count=False)
            halves.index(half * 8 + 6).store(decode(last, high_exponents >> 16, WARPS))
            publish(sh, half, 3)
            more = load_codes(gl.expand_dims(next_values, 1) + word, next_valid, 2)
            valid = next_valid
            values = next_values
            high_exponents = next_high
            done += half
        turn += 1


@gluon.jit
def start_chunk(sh, raw, halves, pointers, mask, half, parity, CHUNK: gl.constexpr):
    """Copy a chunk's codes into its buffer once that is free; of the last chunk, the bf16 values as well."""
    wait_empty(sh, half, parity, CHUNK)
    async_copy.async_copy_global_to_shared(
        raw.index(half * 8 + CHUNK * 2), pointers + CHUNK * (2 * PIECE), mask=mask
    )
    if CHUNK == 3:
        async_copy.async_copy_global_to_shared(halves.index(half * 8 + 7), pointers + TAIL, mask=mask)
    async_copy.commit_group()


@gluon.jit
def finish_chunk(
    sh, raw, halves, chunks, exponents, half, CHUNK: gl.constexpr, BEHIND: gl.constexpr, WORDS: gl.constexpr
):
    """Decode a chunk in place when all but the BEHIND latest copies have landed."""
    async_copy.wait_group(BEHIND)
    shifted = exponents >> ((CHUNK & 1) * 16)
    left, right = split_columns(raw.index(half * 8 + CHUNK * 2).load(WORDS), WORDS)
    if CHUNK == 3:
        halves.index(half * 8 + 6).store(decode(left, shifted, 4))
    else:
        chunks.index(half * 4 + CHUNK).store(join_columns(decode(left, shifted, 4), decode(right, shifted >> 8, 4)))
    publish(sh, half, CHUNK)


@gluon.jit
def in_place_producer(
    sh, keys, pages, jobs, q, q_strides, BATCHED: gl.constexpr, HALF: gl.constexpr, LOAD_Q: gl.constexpr
):
    """Load q, and decode the key rows of every job; HALF 2: of all tiles, 0 or 1: of every pair's first or second."""
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    STEP: gl.constexpr = 1 if HALF == 2 else 2
    lane = gl.arange(0, TILE, gl.SliceLayout(1, WORDS))
    word = gl.expand_dims(gl.arange(0, 2 * PIECE, gl.SliceLayout(0, WORDS)), 0)
    raw = sh.k._reinterpret(gl.int32, [16, TILE, 2 * PIECE], RAW)
    halves = sh.k._reinterpret(gl.int32, [16, TILE, 2 * PIECE], DONE)
    chunks = sh.k._reinterpret(gl.int32, [8, TILE, 4 * PIECE], DONE)
    done = 0
    turn = 0
    for job in range(gl.program_id(0), jobs.count, gl.num_programs(0)):
        block, split, list_row, token = jobs.place(job)
        first, count0, count1 = keys.counts(token, list_row)
        low, high = jobs.pairs(split, count0, count1)
        index = keys.load_tile(2 * low + (HALF & 1), lane, list_row, first, count0, count1)
        if LOAD_Q:
            load_q(sh, jobs, keys, q, q_strides, block, token, turn, BATCHED, 4)
        for tile in range(2 * low + (HALF & 1), 2 * high, STEP):
            if HALF == 2:
                half = tile & 1
            else:
                half = HALF
            parity = (done & 1) ^ 1
            index = pin_int(index)
            valid, values, low_exponents, high_exponents = find_tile(keys, pages, index, tile, count0)
            index = keys.load_tile(tile + STEP, lane, list_row, first, count0, count1)
            mask = gl.expand_dims(valid, 1)
            pointers = gl.expand_dims(values, 1) + word
            start_chunk(sh, raw, halves, pointers, mask, half, parity, 0)
            sh.terms.index(half).store(gl.where(valid, 0.0, MASKED_SCORE))
            start_chunk(sh, raw, halves, pointers, mask, half, parity, 2)
            start_chunk(sh, raw, halves, pointers, mask, half, parity, 1)
            if HALF == 2:
                mbarrier.arrive(sh.terms_ready[0], pred=half == 0)
                mbarrier.arrive(sh.terms_ready[1], pred=half != 0)
            else:
                mbarrier.arrive(sh.terms_ready[HALF])
            finish_chunk(sh, raw, halves, chunks, low_exponents, half, 0, 2, WORDS)
            start_chunk(sh, raw, halves, pointers, mask, half, parity, 3)
            finish_chunk(sh, raw, halves, chunks, high_exponents, half, 2, 2, WORDS)
            finish_chunk(sh, raw, halves, chunks, low_exponents, half, 1, 1, WORDS)
            finish_chunk(sh, raw, halves, chunks, high_exponents, half, 3, 0, WORDS)
            if HALF == 2:
                done += half
            else:
                done += 1
        turn += 1


@gluon.jit
def looped_producer(
    sh, keys, pages, jobs, q, q_strides, BATCHED: gl.constexpr, HALF: gl.constexpr, LOAD_Q: gl.constexpr
):
    """`in_place_producer` of one tile of each pair, with the first three chunks decoded in a loop: less code."""
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    lane = gl.arange(0, TILE, gl.SliceLayout(1, WORDS))
    word = gl.expand_dims(gl.arange(0, 2 * PIECE, gl.SliceLayout(0, WORDS)), 0)
    raw = sh.k._reinterpret(gl.int32, [16, TILE, 2 * PIECE], RAW)
    halves = sh.k._reinterpret(gl.int32, [16, TILE, 2 * PIECE], DONE)
    chunks = sh.k._reinterpret(gl.int32, [8, TILE, 4 * PIECE], DONE)
    done = 0
    turn = 0
    for job in range(gl.program_id(0), jobs.count, gl.num_programs(0)):
        block, split, list_row, token = jobs.place(job)
        first, count0, count1 = keys.counts(token, list_row)
        low, high = jobs.pairs(split, count0, count1)
        index = keys.load_tile(2 * low + HALF, lane, list_row, first, count0, count1)
        if LOAD_Q:
            load_q(sh, jobs, keys, q, q_strides, block, token, turn, BATCHED, 4)
        for tile in range(2 * low + HALF, 2 * high, 2):
            parity = (done & 1) ^ 1
            index = pin_int(index)
            valid, values, low_exponents, high_exponents = find_tile(keys, pages, index, tile, count0)
            index = keys.load_tile(tile + 2, lane, list_row, first, count0, count1)
            mask = gl.expand_dims(valid, 1)
            pointers = gl.expand_dims(values, 1) + word
            start_chunk(sh, raw, halves, pointers, mask, HALF, parity, 0)
            sh.terms.index(HALF).store(gl.where(valid, 0.0, MASKED_SCORE))
            start_chunk(sh, raw, halves, pointers, mask, HALF, parity, 2)
            mbarrier.arrive(sh.terms_ready[HALF])
            start_chunk(sh, raw, halves, pointers, mask, HALF, parity, 1)
            exponents = low_exponents
            chunk = job >> 30
            for step in range((job >> 30) + 3):
                async_copy.wait_group(2)
                left, right = split_columns(raw.index(HALF * 8 + chunk * 2).load(WORDS), WORDS)
                decoded = join_columns(decode(left, exponents, 4), decode(right, exponents >> 8, 4))
                chunks.index(HALF * 4 + chunk).store(decoded)
                fence_async_shared()
                if step == 0:
                    mbarrier.arrive(sh.full[HALF * 4])
                    start_chunk(sh, raw, halves, pointers, mask, HALF, parity, 3)
                    exponents = high_exponents
                    chunk = chunk + 2
                else:
                    async_copy.commit_group()
                    if step == 1:
                        mbarrier.arrive(sh.full[HALF * 4 + 2])
                    else:
                        mbarrier.arrive(sh.full[HALF * 4 + 1])
                    exponents = low_exponents >> 16
                    chunk = chunk - 1
            finish_chunk(sh, raw, halves, chunks, high_exponents, HALF, 3, 0, WORDS)
            done += 1
        turn += 1
