# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"
"""The producer of the Hopper attention that decodes rows of a paged FP8 cache (layout: reference/paged.py).

The rows of the next tile are prefetched into L2; plain loads take a chunk of every row into registers while the chunk
before it is decoded. Decoding is a few integer instructions and two packed bf16 products per pair of values, both
exact, and what is stored to shared memory is what the bf16 producer would have copied there, so the consumers do not
know the difference (but for the two NaN codes of E4M3, which give +-480 here: no cache has them). The loops over tiles
and pieces of a row are not unrolled: three warpgroups share one instruction cache.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier
from triton.language.core import _aggregate as aggregate

from .hopper import COLUMNS, HEAD_DIM, MASKED_SCORE, TILE, pin_int

VALUE_WORDS = gl.constexpr(72)  # 8-byte words per row: 448 codes and 64 bf16 values; exponents follow, one word per row
HALF = gl.constexpr(64)  # columns under one exponent
LINE = gl.constexpr(9)  # words between the addresses that a row's eight lanes prefetch: every 128-byte line is met

# Half a chunk's codes in words of four: [64 rows, 8 lanes, 2 words]; its bf16 values in words of two: [64 rows, 32]
PARTS = gl.constexpr(gl.BlockedLayout([1, 1, 2], [4, 8, 1], [4, 1, 1], [2, 1, 0]))
FLAT = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
FLAT_HALF = gl.constexpr(gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0]))
WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, rank=2))  # half a chunk's buffer as words: the same bytes
WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # a whole chunk of q

# Four E4M3 codes to bf16: each byte to the top of a 16-bit lane, sign kept, exponent and mantissa shifted into place
# (that is the value times 2**-120, subnormals included), then times 2**120 and times the block's scale.
DECODE_ASM = gl.constexpr(
    "{ .reg .b32 a, b, t, u; mov.b32 u, 0x7B807B80; "
    "prmt.b32 a, $2, 0, 0x1404; prmt.b32 b, $2, 0, 0x3424; "
    "shr.b32 t, a, 4; and.b32 t, t, 0x07F007F0; lop3.b32 a, a, 0x80008000, t, 0xEA; "
    "shr.b32 t, b, 4; and.b32 t, t, 0x07F007F0; lop3.b32 b, b, 0x80008000, t, 0xEA; "
    "mul.rn.bf16x2 a, a, u; mul.rn.bf16x2 b, b, u; mul.rn.bf16x2 $0, a, $3; mul.rn.bf16x2 $1, b, $3; }"
)
# A scale 2**(e - 127) as a pair of bf16, e in the lowest byte; e = 0 is the subnormal 0x40.
SCALE_ASM = gl.constexpr(
    "{ .reg .b32 t; prmt.b32 t, $1, 0, 0x4440; shl.b32 t, t, 7; max.u32 t, t, 0x40; prmt.b32 $0, t, 0, 0x1010; }"
)
PREFETCH_ASM = gl.constexpr("prefetch.global.L2 [$1]; mov.b32 $0, 0;")


@aggregate
class Pages:
    """Two paged caches."""

    data0: gl.tensor  # int64 words
    data1: gl.tensor
    stride0: gl.tensor  # words from one page to the next
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
    def base(self, second, POOLS: gl.constexpr):
        """Where the cache starts that a tile's keys lie in."""
        data = self.data0
        if POOLS == 2:
            data = gl.where(second, self.data1, self.data0)
        return data

    @gluon.jit
    def locate(self, index, second, POOLS: gl.constexpr):
        """Offsets of rows' values and exponents from the base, in words of 8 bytes (the launcher checks the range)."""
        index = index.to(gl.int32)
        page = index // self.SIZE0
        row = index - page * self.SIZE0
        size = row * 0 + self.SIZE0
        stride = self.stride0
        if POOLS == 2:
            stride = gl.where(second, self.stride1, self.stride0)
            if self.SIZE0 != self.SIZE1:
                other = index // self.SIZE1
                page = gl.where(second, other, page)
                row = gl.where(second, index - other * self.SIZE1, row)
                size = gl.where(second, self.SIZE1, size)
        start = page * stride
        return start + row * VALUE_WORDS, start + size * VALUE_WORDS + row


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
    """Arrive at barrier `slot` of eight separate ones."""
    if slot < 4:
        if slot < 2:
            mbarrier.arrive(barriers[0], pred=slot == 0)
            mbarrier.arrive(barriers[1], pred=slot == 1)
        else:
            mbarrier.arrive(barriers[2], pred=slot == 2)
            mbarrier.arrive(barriers[3], pred=slot == 3)
    elif slot < 6:
        mbarrier.arrive(barriers[4], pred=slot == 4)
        mbarrier.arrive(barriers[5], pred=slot == 5)
    else:
        mbarrier.arrive(barriers[6], pred=slot == 6)
        mbarrier.arrive(barriers[7], pred=slot == 7)


@gluon.jit
def prefetch(base, values, exponents):
    """Bring rows and their exponents into L2."""
    lane = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, PARTS)))
    pointers = base + (gl.expand_dims(values, 1) + gl.expand_dims(lane, 0) * LINE)
    gl.inline_asm_elementwise(PREFETCH_ASM, "=r,l", [pointers], dtype=gl.int32, is_pure=False, pack=1)
    gl.inline_asm_elementwise(PREFETCH_ASM, "=r,l", [base + exponents], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_piece(base, values, piece):
    """64 bytes of every row from 64 * piece on, in words [64, 8, 2]."""
    lane = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, PARTS)))
    x = gl.load(base + (gl.expand_dims(values + piece * 8, 1) + gl.expand_dims(lane, 0)))
    words = gl.join(x.to(gl.int32), (x >> 32).to(gl.int32))
    return gl.convert_layout(words, PARTS, assert_trivial=True)


@gluon.jit
def decode(codes, exponents):
    """bf16 values, as words [64, 32], of codes[64, 8, 2] (words) under the exponents in exponents[64]'s lowest byte."""
    scale = gl.inline_asm_elementwise(SCALE_ASM, "=r,r", [exponents], dtype=gl.int32, is_pure=True, pack=1)
    scale = gl.expand_dims(gl.expand_dims(scale, 1), 2) + codes * 0
    low, high = gl.inline_asm_elementwise(
        DECODE_ASM, "=r,=r,r,r", [codes, scale], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return gl.convert_layout(gl.reshape(gl.join(low, high), [TILE, HALF // 2]), FLAT, assert_trivial=True)


@gluon.jit
def load_q(sh, jobs, keys, q, q_strides, block, token, turn, BATCHED: gl.constexpr):
    """Copy the job's queries once the last job's are no longer needed."""
    lane = gl.arange(0, TILE, gl.SliceLayout(1, WIDE))
    column = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, WIDE)), 0)
    batch_stride, token_stride, head_stride = q_strides  # elements / 8
    head = block * TILE + lane
    row = head.to(gl.int64) * head_stride
    if BATCHED:
        batch = token // keys.queries
        row += batch.to(gl.int64) * batch_stride + (token - batch * keys.queries).to(gl.int64) * token_stride
    else:
        row += token.to(gl.int64) * token_stride
    pointers = q + gl.expand_dims(row * 8, 1) + column
    in_heads = gl.expand_dims(head < jobs.HEADS, 1)
    mbarrier.wait(sh.q_empty, (turn & 1) ^ 1)
    for chunk in gl.static_range(HEAD_DIM // COLUMNS):
        if jobs.HEADS % TILE == 0:
            async_copy.async_copy_global_to_shared(sh.q[chunk].index(0), pointers + COLUMNS * chunk)
        else:
            async_copy.async_copy_global_to_shared(sh.q[chunk].index(0), pointers + COLUMNS * chunk, mask=in_heads)
    async_copy.mbarrier_arrive(sh.q_full, increment_count=False)


@gluon.jit
def plain(words, valid):
    """Words [64, 8, 2] of bf16 values as [64, 16], zero where invalid."""
    kept = gl.where(gl.expand_dims(gl.expand_dims(valid, 1), 2), words, 0)
    return gl.convert_layout(gl.reshape(kept, [TILE, HALF // 4]), FLAT_HALF, assert_trivial=True)


@gluon.jit
def find_rows(keys, pages, index, tile, count0):
    """(validity, base, offsets of values, offsets of exponents) of a tile's keys; invalid ones point to row 0."""
    second = tile >= gl.cdiv(count0, TILE)
    valid = keys.valid(index, tile, count0)
    values, exponents = pages.locate(gl.where(valid, index, 0), second, keys.POOLS)
    return valid, pages.base(second, keys.POOLS), values, exponents


@gluon.jit
def pages_producer(sh, keys, pages, jobs, q, q_strides, BATCHED: gl.constexpr, PREFETCH: gl.constexpr):
    """Load q, and decode the key rows of every job, as far ahead as the buffers allow."""
    lane = gl.arange(0, TILE, gl.SliceLayout(1, gl.SliceLayout(2, PARTS)))
    halves = sh.k._reinterpret(gl.int32, [16, TILE, HALF // 2], WORDS)
    done = 0
    turn = 0
    for job in range(gl.program_id(0), jobs.count, gl.num_programs(0)):
        block, split, list_row, token = jobs.place(job)
        first, count0, count1 = keys.counts(token, list_row)
        low, high = jobs.pairs(split, count0, count1)
        index = keys.load_tile(2 * low, lane, list_row, first, count0, count1)
        following = keys.load_tile(2 * low + 1, lane, list_row, first, count0, count1)
        valid, base, values, exponents = find_rows(keys, pages, index, 2 * low, count0)
        if PREFETCH:
            prefetch(base, values, exponents)
        load_q(sh, jobs, keys, q, q_strides, block, token, turn, BATCHED)
        left = load_piece(base, values, job >> 30)
        right = load_piece(base, values, (job >> 30) + 1)
        for tile in range(2 * low, 2 * high):
            half = tile & 1
            parity = (done & 1) ^ 1
            words = (base + exponents).to(gl.pointer_type(gl.int32), bitcast=True)
            low_exponents = gl.load(words, mask=valid, other=0)
            high_exponents = gl.load(words + 1, mask=valid, other=0)
            index = pin_int(following)
            following = keys.load_tile(tile + 2, lane, list_row, first, count0, count1)
            next_valid, next_base, next_values, exponents = find_rows(keys, pages, index, tile + 1, count0)
            if PREFETCH:
                prefetch(next_base, next_values, exponents)
            # Invalid keys: the first row of the pool, whose codes decode to something tiny under an exponent of 0, so
            # that no product with their zero probabilities is NaN; its bf16 values are replaced by zeros below.
            term = gl.where(valid, 0.0, MASKED_SCORE)
            mbarrier.wait(sh.empty[0], parity, pred=half == 0)
            mbarrier.wait(sh.empty[4], parity, pred=half != 0)
            sh.terms.index(half).store(term)  # the first chunk is free: the last pair's terms have been read
            mbarrier.arrive(sh.terms_ready[0], pred=half == 0)
            mbarrier.arrive(sh.terms_ready[1], pred=half != 0)
            for step in range((job >> 30) + 4):  # not a constant: it would be unrolled
                chunk = ((step & 1) << 1) | (step >> 1)  # in the order 0, 2, 1, 3
                last = step == 3
                after = gl.where(last, 0, (((step + 1) & 1) << 1) | ((step + 1) >> 1))
                from_base = gl.where(last, next_base, base)
                from_values = gl.where(last, next_values, values) + after * 16
                next_left = load_piece(from_base, from_values, 0)
                next_right = load_piece(from_base, from_values, 1)
                pair = gl.where(chunk < 2, low_exponents, high_exponents) >> ((chunk & 1) * 16)
                slot = half * 4 + chunk
                wait_for(sh.empty, slot, parity)
                halves.index(slot * 2).store(decode(left, pair))
                buffer = halves.index(slot * 2 + 1)
                if last:  # 64 bf16 values: the second half of their bytes was not loaded ahead
                    tail = load_piece(base, values, 8)
                    buffer.slice(0, HALF // 4, dim=1).store(plain(right, valid))
                    buffer.slice(HALF // 4, HALF // 4, dim=1).store(plain(tail, valid))
                else:
                    buffer.store(decode(right, pair >> 8))
                signal(sh.full, slot)
                left = next_left
                right = next_right
            valid = next_valid
            base = next_base
            values = next_values
            done += half
        turn += 1
