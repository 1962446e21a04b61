# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"
"""What the two consumer warpgroups do with their halves of a finished row: rotate, quantise, write.

Each [64 heads, 128 columns] accumulator is one chunk of the head's 512 columns, and for 128-wide quantisation exactly
one block, so the absolute maximum needs only the four lanes that share a row, and the rotated pairs sit in one thread:
the whole epilogue moves no data between warps except to make the stores 16 bytes wide.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from .hopper import (
    COLUMNS,
    EPILOGUE_PARTIAL,
    EPILOGUE_PLAIN,
    EPILOGUE_QUANT,
    HEAD_DIM,
    LN2,
    LOG2E,
    OUTPUT,
    SCORES,
    TILE,
    exp2_approx,
    per_row,
)

# Even (or odd) elements of the pairs of an accumulator [64, 128]: what splitting it gives.
PAIR_LAYOUT = gl.constexpr(
    gl.SliceLayout(
        2,
        gl.DistributedLinearLayout(
            reg_bases=[[0, 0, 1], [8, 0, 0], [0, 4, 0], [0, 8, 0], [0, 16, 0], [0, 32, 0]],
            lane_bases=[[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
            warp_bases=[[16, 0, 0], [32, 0, 0]],
            block_bases=[],
            shape=[64, 64, 2],
        ),
    )
)


@aggregate
class Output:
    """Where results go, and the epilogue's parameters. Pointers that the form of epilogue does not use are dummies."""

    out: gl.tensor  # rows [.., 512] (values or codes)
    scales: gl.tensor  # fp32 [G, K/BLOCK, M], or int16 halves of int32 [G, K/(4*BLOCK), M]
    lse: gl.tensor  # fp32 [P, T, H]
    sink: gl.tensor
    cos: gl.tensor  # [rope_period, HALF], contiguous
    sin: gl.tensor
    rope_period: gl.tensor  # token t uses row t % rope_period
    total: gl.tensor  # T: tokens of the outputs, all launches together
    origin: gl.tensor  # first token that partials hold
    padded: gl.tensor  # M = ceil(T/4)*4
    floor: gl.tensor  # smallest absolute maximum
    HEADS: gl.constexpr
    PER_GROUP: gl.constexpr  # heads per group
    HALF: gl.constexpr  # rope_dim / 2
    EPILOGUE: gl.constexpr
    BLOCK: gl.constexpr  # quantisation block along K: 128 or 32
    POWER_OF_TWO: gl.constexpr  # UE8M0 rule
    PACKED: gl.constexpr  # exponents packed in int32 words
    HAS_SINK: gl.constexpr
    ROPE_SHARED: gl.constexpr  # several sequences use one table

    @gluon.constexpr_function
    def __init__(
        self, out, scales, lse, sink, cos, sin, rope_period, total, origin, padded, floor,
        HEADS, PER_GROUP, HALF, EPILOGUE, BLOCK, POWER_OF_TWO, PACKED, HAS_SINK, ROPE_SHARED,
    ):  # fmt: skip
        self.out = out
        self.scales = scales
        self.lse = lse
        self.sink = sink
        self.cos = cos
        self.sin = sin
        self.rope_period = rope_period
        self.total = total
        self.origin = origin
        self.padded = padded
        self.floor = floor
        self.HEADS = gl.constexpr(HEADS)
        self.PER_GROUP = gl.constexpr(PER_GROUP)
        self.HALF = gl.constexpr(HALF)
        self.EPILOGUE = gl.constexpr(EPILOGUE)
        self.BLOCK = gl.constexpr(BLOCK)
        self.POWER_OF_TWO = gl.constexpr(POWER_OF_TWO)
        self.PACKED = gl.constexpr(PACKED)
        self.HAS_SINK = gl.constexpr(HAS_SINK)
        self.ROPE_SHARED = gl.constexpr(ROPE_SHARED)

    @gluon.jit
    def row_offset(self, head, token, split):
        """Element offset of a head's row of 512 in `out`."""
        if self.EPILOGUE == EPILOGUE_PLAIN:
            row = token.to(gl.int64) * self.HEADS + head
        elif self.EPILOGUE == EPILOGUE_PARTIAL:
            row = (split.to(gl.int64) * self.total + token - self.origin) * self.HEADS + head
        else:
            group = head // self.PER_GROUP
            row = (group.to(gl.int64) * self.total + token) * self.PER_GROUP + head % self.PER_GROUP
        return row * HEAD_DIM

    @gluon.jit
    def load_sink(self, block):
        """The sinks of a job's heads, in log2 units. Loaded early: the row's end should not wait for memory."""
        head = block * TILE + gl.arange(0, TILE, gl.SliceLayout(1, SCORES))
        sink = gl.full([TILE], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        if self.HAS_SINK and self.EPILOGUE != EPILOGUE_PARTIAL:
            sink = gl.load(self.sink + head, mask=head < self.HEADS, other=float("-inf")).to(gl.float32) * LOG2E
        return sink

    @gluon.jit
    def load_rope(self, token):
        """(cos, sin) of the pairs of a head's last chunk, 1 and 0 where nothing is rotated."""
        PAIRS: gl.constexpr = gl.SliceLayout(0, PAIR_LAYOUT)
        pair = gl.arange(0, COLUMNS // 2, PAIRS) - (COLUMNS // 2 - self.HALF)
        cos = gl.full([COLUMNS // 2], 1.0, gl.float32, PAIRS)
        sin = gl.full([COLUMNS // 2], 0.0, gl.float32, PAIRS)
        if self.EPILOGUE != EPILOGUE_PLAIN and self.EPILOGUE != EPILOGUE_PARTIAL:
            row = token * self.HALF
            if self.ROPE_SHARED:
                row = (token % self.rope_period) * self.HALF
            cos = gl.load(self.cos + row + pair, mask=pair >= 0, other=1.0).to(gl.float32)
            sin = gl.load(self.sin + row + pair, mask=pair >= 0, other=0.0).to(gl.float32)
        return cos, sin

    @gluon.jit
    def denominator(self, sums, maximum, sink, block, token, split, STORE_LSE: gl.constexpr):
        """1 / softmax denominator per row, sink included unless this is a partial, whose lse it stores instead."""
        head = block * TILE + gl.arange(0, TILE, gl.SliceLayout(1, SCORES))
        if self.EPILOGUE == EPILOGUE_PARTIAL:
            if STORE_LSE:
                pointer = self.lse + (split.to(gl.int64) * self.total + token - self.origin) * self.HEADS + head
                gl.store(pointer, (maximum + gl.log2(sums)) * LN2, mask=(head < self.HEADS))
        elif self.HAS_SINK:
            sums += exp2_approx(sink - maximum)
        return 1.0 / gl.maximum(sums, 1e-30)

    @gluon.jit
    def rotate(self, x, cos, sin):
        """Inverse RoPE on the last 2 * HALF columns of a head, given its last chunk x[64, 128] and `load_rope`."""
        even, odd = gl.split(gl.reshape(x, [TILE, COLUMNS // 2, 2]))
        cos = gl.expand_dims(gl.convert_layout(cos, gl.SliceLayout(0, even.type.layout), assert_trivial=True), 0)
        sin = gl.expand_dims(gl.convert_layout(sin, gl.SliceLayout(0, even.type.layout), assert_trivial=True), 0)
        joined = gl.join(even * cos + odd * sin, odd * cos - even * sin)
        return gl.convert_layout(gl.reshape(joined, [TILE, COLUMNS]), OUTPUT, assert_trivial=True)

    @gluon.jit
    def store_tile(self, x, staging, block, token, split, column):
        """Write a [64, 128] tile of 8- or 16-bit values through shared memory, 16 bytes per thread and store."""
        VECTOR: gl.constexpr = 128 // self.out.dtype.element_ty.primitive_bitwidth
        WIDE: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 * VECTOR // COLUMNS, COLUMNS // VECTOR], [4, 1], [1, 0])
        staging.store(x)
        head = block * TILE + gl.arange(0, TILE, gl.SliceLayout(1, WIDE))
        columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, WIDE))
        pointer = self.out + gl.expand_dims(self.row_offset(head, token, split), 1) + gl.expand_dims(columns, 0)
        gl.thread_barrier()
        gl.store(pointer, staging.load(WIDE), mask=gl.expand_dims((head < self.HEADS), 1))

    @gluon.jit
    def chunk(self, x, staging, block, token, split, CHUNK):
        """Finish one normalised fp32 chunk x[64, 128] of the heads' columns CHUNK * 128 to CHUNK * 128 + 127."""
        if self.EPILOGUE == EPILOGUE_QUANT:
            codes = self.quantise(x, block, token, CHUNK)
            buffer = staging._reinterpret(gl.float8e4nv, [TILE, COLUMNS], gl.NVMMASharedLayout(128, 8, rank=2))
            self.store_tile(codes, buffer, block, token, split, CHUNK * COLUMNS)
        elif self.out.dtype.element_ty == gl.float32:
            # partials in fp32: a quad of lanes writes whole 32-byte sectors straight from the accumulators
            head = block * TILE + gl.arange(0, TILE, gl.SliceLayout(1, OUTPUT))
            columns = CHUNK * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, OUTPUT))
            offset = gl.expand_dims(self.row_offset(head, token, split), 1) + gl.expand_dims(columns, 0)
            gl.store(self.out + offset, x, mask=gl.expand_dims((head < self.HEADS), 1))
        else:
            buffer = staging._reinterpret(
                self.out.dtype.element_ty, [TILE, COLUMNS], gl.NVMMASharedLayout(128, 16, rank=2)
            )
            self.store_tile(x.to(self.out.dtype.element_ty), buffer, block, token, split, CHUNK * COLUMNS)

    @gluon.jit
    def quantise(self, x, block, token, CHUNK):
        """Codes of x[64, 128]; stores its blocks' scales and, for the last token, zeros in the padding columns."""
        PARTS: gl.constexpr = COLUMNS // self.BLOCK
        if PARTS == 1:
            amax = gl.max(gl.abs(x), 1)
        else:
            amax = gl.max(gl.abs(gl.reshape(x, [TILE, PARTS, self.BLOCK])), 2)
        amax = gl.maximum(amax, self.floor)
        if self.POWER_OF_TWO:
            # 2^ceil(log2(amax / 448)) through the exponent bits
            quotient = gl.div_rn(amax, gl.full_like(amax, 448.0))
            bits = (quotient.to(gl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
            scale = bits.to(gl.float32, bitcast=True)
            inverse = (0x7F000000 - bits).to(gl.float32, bitcast=True)
        else:
            scale = gl.div_rn(amax, gl.full_like(amax, 448.0))
            inverse = gl.div_rn(gl.full_like(amax, 1.0), scale)
        self.store_scales(scale, block, token, CHUNK)
        if PARTS == 1:
            y = self.divide(x, gl.expand_dims(scale, 1), gl.expand_dims(inverse, 1))
        else:
            parts = gl.reshape(x, [TILE, PARTS, self.BLOCK])
            y = self.divide(parts, gl.expand_dims(scale, 2), gl.expand_dims(inverse, 2))
            y = gl.convert_layout(gl.reshape(y, [TILE, COLUMNS]), OUTPUT)
        return y.to(gl.float8e4nv)

    @gluon.jit
    def divide(self, x, scale, inverse):
        """x / scale, correctly rounded: exact for a power of two, else a reciprocal with one residual correction."""
        y = x * inverse
        if not self.POWER_OF_TWO:
            y = gl.fma(gl.fma(-y, scale + x * 0.0, x), inverse + x * 0.0, y)
        return y

    @gluon.jit
    def store_scales(self, scale, block, token, CHUNK):
        """Store scale[64] (or [64, 4] for blocks of 32) in either storage."""
        PARTS: gl.constexpr = COLUMNS // self.BLOCK
        if PARTS == 1:
            head = block * TILE + gl.arange(0, TILE, scale.type.layout)
            part = head * 0
        else:
            rows: gl.constexpr = gl.SliceLayout(1, scale.type.layout)
            columns: gl.constexpr = gl.SliceLayout(0, scale.type.layout)
            head = block * TILE + gl.expand_dims(gl.arange(0, TILE, rows), 1)
            part = gl.expand_dims(gl.arange(0, PARTS, columns), 0)
        blocks: gl.constexpr = HEAD_DIM // self.BLOCK  # per head
        number = CHUNK * PARTS + part  # of the block within its head
        if self.PACKED:
            # the exponent bytes of one int32 word come from two warpgroups: each byte is a store of its own
            value = (scale.to(gl.int32, bitcast=True) >> 23).to(gl.int8)
            row = head.to(gl.int64) * (blocks // 4) + number // 4
            pointer = self.scales + (row * self.padded + token) * 4 + number % 4
            step: gl.constexpr = 4
        else:
            value = scale
            pointer = self.scales + (head.to(gl.int64) * blocks + number) * self.padded + token
            step: gl.constexpr = 1  # type: ignore[no-redef]
        in_range = head + part * 0 < self.HEADS
        gl.store(pointer, value, mask=in_range)
        if token + 1 == self.total:
            for pad in gl.static_range(1, 4):
                gl.store(pointer + pad * step, value * 0, mask=in_range & (token + pad < self.padded))

    @gluon.jit
    def finish(self, left, right, sums, maximum, sink, rope, staging, block, token, split, HALF_OF_HEAD: gl.constexpr):
        """Normalise and write one warpgroup's 256 columns, two [64, 128] accumulators; rope: of the last chunk."""
        inverse = per_row(self.denominator(sums, maximum, sink, block, token, split, HALF_OF_HEAD == 0))
        self.chunk(left * inverse, staging, block, token, split, HALF_OF_HEAD * 2)
        x = right * inverse
        if HALF_OF_HEAD == 1 and self.EPILOGUE != EPILOGUE_PLAIN and self.EPILOGUE != EPILOGUE_PARTIAL:
            cos, sin = rope
            x = self.rotate(x, cos, sin)
        self.chunk(x, staging, block, token, split, HALF_OF_HEAD * 2 + 1)

    @gluon.jit
    def finish_chunk(self, x, sums, maximum, sink, rope, staging, block, token, which, HALF_OF_HEAD: gl.constexpr):
        """Normalise and write one of a warpgroup's two accumulators [64, 128], the one with number `which` (0 or 1)."""
        x = x * per_row(self.denominator(sums, maximum, sink, block, token, which, False))
        if HALF_OF_HEAD == 1 and self.EPILOGUE != EPILOGUE_PLAIN:
            cos, sin = rope
            x = self.rotate(x, gl.where(which == 1, cos, 1.0), gl.where(which == 1, sin, 0.0))
        self.chunk(x, staging, block, token, which * 0, HALF_OF_HEAD * 2 + which)
