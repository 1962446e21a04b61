# SPDX-License-Identifier: Apache-2.0
"""The producer of the Hopper attention that decodes rows of a paged FP8 cache (layout: reference/paged.py).

Plain loads take the codes of a chunk into registers while the chunk before it is decoded; decoding is a few integer
instructions and two packed bf16 products per pair of values, both exact. What is stored to shared memory is what the
bf16 producer would have copied there, so the consumers do not know the difference.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier
from triton.language.core import _aggregate as aggregate

from .hopper import COLUMNS, HEAD_DIM, TILE, pin_int

NOPE = gl.constexpr(448)
VALUE_BYTES = gl.constexpr(576)
EXPONENT_BYTES = gl.constexpr(8)
GROUP = gl.constexpr(8)  # columns of one thread's load

# [64 rows, 16 or 8 groups, 8 columns]
CHUNK = gl.constexpr(gl.BlockedLayout([1, 1, 8], [2, 16, 1], [4, 1, 1], [2, 1, 0]))
HALF_CHUNK = gl.constexpr(gl.BlockedLayout([1, 1, 8], [4, 8, 1], [4, 1, 1], [2, 1, 0]))
CHUNK_2D = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
HALF_CHUNK_2D = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))

# Four E4M3 codes to bf16: each byte to the top of a 16-bit lane, sign kept, exponent and mantissa shifted into place
# (that is the value times 2**-120, subnormals included), then times 2**120 and times the row block's scale.
DECODE_ASM = gl.constexpr(
    "{ .reg .b32 a, b, t, u; mov.b32 u, 0x7B807B80; "
    "prmt.b32 a, $2, 0, 0x1404; prmt.b32 b, $2, 0, 0x3424; "
    "shr.b32 t, a, 4; and.b32 t, t, 0x07F007F0; lop3.b32 a, a, 0x80008000, t, 0xEA; "
    "shr.b32 t, b, 4; and.b32 t, t, 0x07F007F0; lop3.b32 b, b, 0x80008000, t, 0xEA; "
    "mul.rn.bf16x2 a, a, u; mul.rn.bf16x2 b, b, u; mul.rn.bf16x2 $0, a, $3; mul.rn.bf16x2 $1, b, $4; }"
)


@gluon.jit
def decode(codes, exponents):
    """bf16 values of codes[64, n, 8] (uint8) under exponents[64, n]."""
    bits = exponents.to(gl.int16) << 7
    bits = gl.where(bits == 0, 0x40, bits).to(gl.int16)  # 2**-127 is a subnormal
    scale = gl.expand_dims(bits.to(gl.bfloat16, bitcast=True), 2)
    return gl.inline_asm_elementwise(DECODE_ASM, "=r,=r,r,r,r", [codes, scale], dtype=gl.bfloat16, is_pure=True, pack=4)


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
        """Pointers to the values and to the exponents of rows; meaningless for invalid indices."""
        index = gl.maximum(index.to(gl.int32), 0)
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
def load_chunk(values, exponents, valid, C: gl.constexpr):
    """Codes [64, 16, 8] and exponents [64, 16] of chunk C (0, 1, 2) of a tile; zero where invalid."""
    group = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, CHUNK)))
    column = gl.arange(0, GROUP, gl.SliceLayout(0, gl.SliceLayout(1, CHUNK)))
    place = gl.expand_dims(gl.expand_dims(group, 0), 2) * GROUP + gl.expand_dims(gl.expand_dims(column, 0), 1)
    pointers = gl.expand_dims(gl.expand_dims(values, 1), 2) + C * COLUMNS + place
    codes = gl.load(pointers, mask=gl.expand_dims(gl.expand_dims(valid, 1), 2), other=0)
    scale_pointers = gl.expand_dims(exponents, 1) + 2 * C + gl.expand_dims(group, 0) // 8
    return codes, gl.load(scale_pointers, mask=gl.expand_dims(valid, 1), other=127)


@gluon.jit
def store_chunk(sh, codes, exponents, parity, TILE_OF_PAIR: gl.constexpr, C: gl.constexpr):
    """Decode a chunk into its buffer once that is free."""
    x = gl.convert_layout(gl.reshape(decode(codes, exponents), [TILE, COLUMNS]), CHUNK_2D, assert_trivial=True)
    mbarrier.wait(sh.empty[TILE_OF_PAIR * 4 + C], parity)
    sh.k[TILE_OF_PAIR * 4 + C].index(0).store(x)
    fence_async_shared()
    mbarrier.arrive(sh.full[TILE_OF_PAIR * 4 + C])


@gluon.jit
def last_chunk(sh, keys, pages, index, second, tile, count0, parity, TILE_OF_PAIR: gl.constexpr):
    """Chunk 3: 64 columns of codes under the seventh exponent, then 64 bf16 values."""
    valid = keys.valid(index, tile, count0)
    values, exponents = pages.locate(index, second, keys.POOLS)
    group = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, HALF_CHUNK)))
    column = gl.arange(0, GROUP, gl.SliceLayout(0, gl.SliceLayout(1, HALF_CHUNK)))
    place = gl.expand_dims(gl.expand_dims(group, 0), 2) * GROUP + gl.expand_dims(gl.expand_dims(column, 0), 1)
    mask = gl.expand_dims(gl.expand_dims(valid, 1), 2)
    rows = gl.expand_dims(gl.expand_dims(values, 1), 2)
    codes = gl.load(rows + 3 * COLUMNS + place, mask=mask, other=0)
    scale = gl.load(
        gl.expand_dims(exponents, 1) + 6 + gl.expand_dims(group, 0) * 0, mask=gl.expand_dims(valid, 1), other=127
    )
    rope_rows = (rows + NOPE).to(gl.pointer_type(gl.bfloat16), bitcast=True)
    rope = gl.load(rope_rows + place, mask=mask, other=0.0)
    x = gl.convert_layout(gl.reshape(decode(codes, scale), [TILE, COLUMNS // 2]), HALF_CHUNK_2D, assert_trivial=True)
    y = gl.convert_layout(gl.reshape(rope, [TILE, COLUMNS // 2]), HALF_CHUNK_2D, assert_trivial=True)
    mbarrier.wait(sh.empty[TILE_OF_PAIR * 4 + 3], parity)
    buffer = sh.k[TILE_OF_PAIR * 4 + 3].index(0)
    buffer.slice(0, COLUMNS // 2, dim=1).store(x)
    buffer.slice(COLUMNS // 2, COLUMNS // 2, dim=1).store(y)
    fence_async_shared()
    mbarrier.arrive(sh.full[TILE_OF_PAIR * 4 + 3])


@gluon.jit
def load_q(sh, jobs, keys, q, q_strides, block, token, turn, BATCHED: gl.constexpr):
    """Copy the job's queries once the last job's are no longer needed."""
    lane = gl.arange(0, TILE, gl.SliceLayout(1, CHUNK_2D))
    column = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, CHUNK_2D)), 0)
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
def pages_producer(sh, keys, pages, jobs, q, q_strides, BATCHED: gl.constexpr):
    """Load q, and decode the key rows of every job, as far ahead as the buffers allow."""
    lane = gl.arange(0, TILE, gl.SliceLayout(1, gl.SliceLayout(2, CHUNK)))
    half_lane = gl.arange(0, TILE, gl.SliceLayout(1, gl.SliceLayout(2, HALF_CHUNK)))
    done = 0
    turn = 0
    for job in range(gl.program_id(0), jobs.count, gl.num_programs(0)):
        block, split, list_row, token = jobs.place(job)
        first, count0, count1 = keys.counts(token, list_row)
        low, high = jobs.pairs(split, count0, count1)
        index = keys.load_tile(2 * low, lane, list_row, first, count0, count1)
        half_index = keys.load_tile(2 * low, half_lane, list_row, first, count0, count1)
        load_q(sh, jobs, keys, q, q_strides, block, token, turn, BATCHED)
        for j in range(low, high):
            parity = (done & 1) ^ 1
            for half in gl.static_range(2):
                tile = 2 * j + half
                index = pin_int(index)
                second = tile >= gl.cdiv(count0, TILE)
                valid = keys.valid(index, tile, count0)
                term = gl.where(valid, 0.0, -1e30)
                values, exponents = pages.locate(index, second, keys.POOLS)
                codes0, scale0 = load_chunk(values, exponents, valid, 0)
                codes2, scale2 = load_chunk(values, exponents, valid, 2)
                store_chunk(sh, codes0, scale0, parity, half, 0)
                sh.terms[half].store(term)  # the chunk was free, so the last pair's terms have been read
                mbarrier.arrive(sh.terms_ready[half])
                codes1, scale1 = load_chunk(values, exponents, valid, 1)
                store_chunk(sh, codes2, scale2, parity, half, 2)
                index = keys.load_tile(tile + 1, lane, list_row, first, count0, count1)
                store_chunk(sh, codes1, scale1, parity, half, 1)
                last_chunk(sh, keys, pages, half_index, second, tile, count0, parity, half)
                half_index = keys.load_tile(tile + 1, half_lane, list_row, first, count0, count1)
            done += 1
        turn += 1
