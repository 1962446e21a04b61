# SPDX-License-Identifier: Apache-2.0
"""The producer of the Hopper attention that decodes rows of a paged FP8 cache (layout: reference/paged.py).

The rows of the next tile are prefetched into L2; plain loads take the codes of a chunk into registers while the chunk
before it is decoded. Decoding is a few integer instructions and two packed bf16 products per pair of values, both
exact, and what is stored to shared memory is what the bf16 producer would have copied there, so the consumers do not
know the difference. The loops over tiles and chunks are not unrolled: three warpgroups share one instruction cache.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier
from triton.language.core import _aggregate as aggregate

from .hopper import COLUMNS, HEAD_DIM, MASKED_SCORE, TILE, pin_int

VALUE_BYTES = gl.constexpr(576)  # per row: 448 codes, 64 bf16 values
EXPONENT_BYTES = gl.constexpr(8)  # per row, behind the values of all rows of the page
HALF = gl.constexpr(64)  # columns under one exponent
LINE = gl.constexpr(72)  # bytes between the addresses that a row's eight lanes prefetch: every 128-byte line is met

# Half a chunk's codes in words of four: [64 rows, 8 lanes, 2 words]; its bf16 values in words of two: [64 rows, 32]
PARTS = gl.constexpr(gl.BlockedLayout([1, 1, 2], [4, 8, 1], [4, 1, 1], [2, 1, 0]))
FLAT = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
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
# A scale 2**(e - 127) as a pair of bf16, e in the lowest or second byte; e = 0 is the subnormal 0x40.
SCALE_ASM = gl.constexpr(
    tuple(
        "{ .reg .b32 t; prmt.b32 t, $1, 0, 0x444%d; shl.b32 t, t, 7; max.u32 t, t, 0x40; prmt.b32 $0, t, 0, 0x1010; }"
        % b
        for b in (0, 1)
    )
)
PREFETCH_ASM = gl.constexpr("prefetch.global.L2 [$1]; mov.b32 $0, 0;")


@aggregate
class Pages:
    """Two paged caches."""

    data0: gl.tensor  # uint8
    data1: gl.tensor
    stride0: gl.tensor  # bytes from one page to the next / 16
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
        """Pointers to the values and to the exponents of rows; those of invalid indices lie in page 0."""
        index = index.to(gl.int32)
        page = index // self.SIZE0
        offset = index - page * self.SIZE0
        size = offset * 0 + self.SIZE0
        data = self.data0
        stride = self.stride0
        if POOLS == 2:
            data = gl.where(second, self.data1, self.data0)
            stride = gl.where(second, self.stride1, self.stride0)
            if self.SIZE0 != self.SIZE1:
                other = index // self.SIZE1
                page = gl.where(second, other, page)
                offset = gl.where(second, index - other * self.SIZE1, offset)
                size = gl.where(second, self.SIZE1, size)
        start = data + page.to(gl.int64) * stride * 16
        return start + offset * VALUE_BYTES, start + size * VALUE_BYTES + offset * EXPONENT_BYTES


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
def prefetch(values, valid):
    """Bring rows into L2; invalid ones repeat the first row of the pool."""
    lane = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, PARTS)))
    pointers = gl.expand_dims(values, 1) + gl.expand_dims(lane, 0) * LINE
    gl.inline_asm_elementwise(PREFETCH_ASM, "=r,l", [pointers], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_half(values, valid, byte):
    """Codes of the half chunk that starts at byte `byte` of the rows, in words [64, 8, 2]; zero where invalid."""
    lane = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, PARTS)))
    word = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, PARTS)))
    place = gl.expand_dims(gl.expand_dims(lane, 0), 2) * 2 + gl.expand_dims(gl.expand_dims(word, 0), 1)
    rows = (values + byte).to(gl.pointer_type(gl.int32), bitcast=True)
    pointers = gl.expand_dims(gl.expand_dims(rows, 1), 2) + place
    return gl.load(pointers, mask=gl.expand_dims(gl.expand_dims(valid, 1), 2), other=0)


@gluon.jit
def decode(codes, exponents, BYTE: gl.constexpr):
    """bf16 values, as words [64, 32], of codes[64, 8, 2] (words) under the exponents in byte BYTE of exponents[64]."""
    asm: gl.constexpr = SCALE_ASM[BYTE]
    scale = gl.inline_asm_elementwise(asm, "=r,r", [exponents], dtype=gl.int32, is_pure=True, pack=1)
    scale = gl.expand_dims(gl.expand_dims(scale, 1), 2) + codes * 0
    low, high = gl.inline_asm_elementwise(
        DECODE_ASM, "=r,=r,r,r", [codes, scale], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return gl.convert_layout(gl.reshape(gl.join(low, high), [TILE, HALF // 2]), FLAT, assert_trivial=True)


@gluon.jit
def store_half(chunk, words, HALF_OF_CHUNK: gl.constexpr):
    """Write half a chunk's words to its buffer [64, 128] bf16."""
    part = chunk.slice(HALF_OF_CHUNK * HALF, HALF, dim=1)
    part._reinterpret(gl.int32, [TILE, HALF // 2], WORDS).store(words)


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
def rows_of(keys, pages, index, tile, count0):
    """(validity, pointers to values, pointers to exponents) of a tile's keys."""
    valid = keys.valid(index, tile, count0)
    values, exponents = pages.locate(gl.where(valid, index, 0), tile >= gl.cdiv(count0, TILE), keys.POOLS)
    return valid, values, exponents


@gluon.jit
def pages_producer(sh, keys, pages, jobs, q, q_strides, BATCHED: gl.constexpr):
    """Load q, and decode the key rows of every job, as far ahead as the buffers allow."""
    lane = gl.arange(0, TILE, gl.SliceLayout(1, gl.SliceLayout(2, PARTS)))
    column = gl.arange(0, HALF // 2, gl.SliceLayout(0, FLAT))
    done = 0
    turn = 0
    for job in range(gl.program_id(0), jobs.count, gl.num_programs(0)):
        block, split, list_row, token = jobs.place(job)
        first, count0, count1 = keys.counts(token, list_row)
        low, high = jobs.pairs(split, count0, count1)
        index = keys.load_tile(2 * low, lane, list_row, first, count0, count1)
        following = keys.load_tile(2 * low + 1, lane, list_row, first, count0, count1)
        valid, values, exponents = rows_of(keys, pages, index, 2 * low, count0)
        prefetch(values, valid)
        load_q(sh, jobs, keys, q, q_strides, block, token, turn, BATCHED)
        for tile in range(2 * low, 2 * high):
            half = tile & 1
            parity = (done & 1) ^ 1
            valid, values, exponents = rows_of(keys, pages, index, tile, count0)
            words = exponents.to(gl.pointer_type(gl.int32), bitcast=True)
            low_exponents = gl.load(words, mask=valid, other=0)
            high_exponents = gl.load(words + 1, mask=valid, other=0)
            a = load_half(values, valid, 0)
            b = load_half(values, valid, HALF)
            index = pin_int(following)
            _, next_values, _ = rows_of(keys, pages, index, tile + 1, count0)
            prefetch(next_values, valid)
            following = keys.load_tile(tile + 2, lane, list_row, first, count0, count1)
            term = gl.where(valid, 0.0, MASKED_SCORE)
            for c in range((job >> 30) + 3):  # not a constant: it would be unrolled
                # chunks in the order 0, 2, 1; then 3 below
                chunk = ((c & 1) << 1) | (c >> 1)
                after = (((c + 1) & 1) << 1) | ((c + 1) >> 1)
                next_a = load_half(values, valid, after * COLUMNS)
                next_b = load_half(values, valid, after * COLUMNS + HALF)
                pair = gl.where(chunk < 2, low_exponents, high_exponents) >> ((chunk & 1) * 16)
                x = decode(a, pair, 0)
                y = decode(b, pair, 1)
                slot = half * 4 + chunk
                wait_for(sh.empty, slot, parity)
                buffer = sh.k_all.index(slot)
                store_half(buffer, x, 0)
                store_half(buffer, y, 1)
                if c == 0:
                    sh.terms_all.index(half).store(term)  # the chunk was free: the last pair's terms have been read
                    mbarrier.arrive(sh.terms_ready[0], pred=half == 0)
                    mbarrier.arrive(sh.terms_ready[1], pred=half != 0)
                fence_async_shared()
                signal(sh.full, slot)
                a = next_a
                b = next_b
            rope_rows = gl.convert_layout(values, gl.SliceLayout(1, FLAT)) + 3 * COLUMNS + HALF
            rope_rows = gl.expand_dims(rope_rows.to(gl.pointer_type(gl.int32), bitcast=True), 1)
            in_pool = gl.expand_dims(gl.convert_layout(valid, gl.SliceLayout(1, FLAT)), 1)
            rope = gl.load(rope_rows + gl.expand_dims(column, 0), mask=in_pool, other=0)
            x = decode(a, high_exponents >> 16, 0)
            slot = half * 4 + 3
            wait_for(sh.empty, slot, parity)
            buffer = sh.k_all.index(slot)
            store_half(buffer, x, 0)
            store_half(buffer, rope, 1)
            fence_async_shared()
            signal(sh.full, slot)
            done += half
        turn += 1
