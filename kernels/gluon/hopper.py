# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"
"""Building blocks that the Hopper kernels share: tile layouts, PTX one-liners, and what a job of the attention is.

Gluon is ``triton.experimental``: this package is imported only behind a gate that has checked the Triton version.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
HEAD_DIM = gl.constexpr(512)
TILE = gl.constexpr(64)  # keys per tile, and heads per job
COLUMNS = gl.constexpr(128)  # columns per chunk of a tile

# One warpgroup's accumulators: scores [64 heads, 64 keys] and output [64 heads, 128 columns].
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
PROBABILITIES = gl.constexpr(gl.DotOperandLayout(0, OUTPUT.value, 2))

# Scores of invalid keys. The running maximum starts far above it, so that exp2 gives an exact zero and never sees the
# rounding residue of (-1e30) - (-1e30) in a row that has met only invalid keys so far.
MASKED_SCORE = gl.constexpr(-1e30)
START_MAX = gl.constexpr(-1e9)
# The reference point of the exponentials follows the running maximum only when that has grown by more than this (log2
# units): probabilities stay below 2**8, which bf16 and the fp32 sums hold as well, and rescaling becomes rare.
LAZY = gl.constexpr(8.0)

# What the consumers do with a finished row.
EPILOGUE_PLAIN = gl.constexpr(0)  # out[T, H, D]
EPILOGUE_ROPE = gl.constexpr(1)  # inverse RoPE, out[G, T, K]
EPILOGUE_QUANT = gl.constexpr(2)  # inverse RoPE, E4M3 codes[G, T, K] and their scales
EPILOGUE_PARTIAL = gl.constexpr(3)  # normalised partial[P, T, H, D] and lse[P, T, H]

# Where a token's keys are.
KEYS_LISTED = gl.constexpr(0)  # index lists into one or two pools
KEYS_RANGE = gl.constexpr(1)  # one contiguous range of rows per token, from causality and window


@gluon.jit
def exp2_approx(x):
    """2**x with denormals flushed: gl.exp2 goes through a slower path that keeps them."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def pin(x):
    """Identity that the compiler cannot look through.

    Without it ptxas moves the rescaling of an accumulator across the wait of another group and then serialises wgmma
    (its warning C7517). No instruction remains in the machine code.
    """
    return gl.inline_asm_elementwise("// pin $0", "=f,0", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def pin_int(x):
    """`pin` for integers: what is computed from the result stays after what stands before it in the program."""
    return gl.inline_asm_elementwise("// pin $0", "=r,0", [x], dtype=x.dtype, is_pure=False, pack=1)


@gluon.constexpr_function
def _prefetch_asm(size):
    return f"cp.async.bulk.prefetch.L2.global [$1], {size}; mov.u32 $0, 0;"


@gluon.jit
def prefetch_rows(pointer, row0, stride, ROWS: gl.constexpr, BYTES: gl.constexpr):
    """Bring the first BYTES (a multiple of 16) of ROWS rows from `row0` on, `stride` bytes apart, into the L2 cache.

    To be called by one warpgroup. A hint: it returns at once, and memory may drop part of what is asked for too fast.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    ASM: gl.constexpr = _prefetch_asm(BYTES)
    row = row0 + gl.arange(0, ROWS, LAYOUT)
    address = (pointer + row.to(gl.int64) * stride).to(gl.int64, bitcast=True)
    gl.inline_asm_elementwise(ASM, "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1)


def _rescale_asm() -> tuple[str, str]:
    """PTX that multiplies 64 registers by their row's factor unless all factors of the warp are 1, and its constraints.

    In an accumulator [64, 128] a thread holds two rows; elements 0 and 2 of the 64 belong to different ones.
    """
    test = (
        "setp.neu.f32 p, $128, 0f3F800000; setp.neu.f32 q, $130, 0f3F800000; or.pred p, p, q; "
        "vote.sync.any.pred p, p, 0xffffffff; @!p bra DONE; "
    )
    products = " ".join(f"mul.f32 ${i}, ${i}, ${128 + i};" for i in range(64))
    constraints = ["=f"] * 64 + [str(i) for i in range(64)] + ["f"] * 64
    return "{ .reg .pred p, q; " + test + products + " DONE: }", ",".join(constraints)


RESCALE_ASM = gl.constexpr(_rescale_asm()[0])
RESCALE_CONSTRAINTS = gl.constexpr(_rescale_asm()[1])


@gluon.jit
def rescale(x, factor):
    """x[64, 128] times factor[64] per row, skipped by warps in which every factor is 1 (see `softmax_step`)."""
    return gl.inline_asm_elementwise(
        RESCALE_ASM, RESCALE_CONSTRAINTS, [x, per_row(factor)], dtype=gl.float32, is_pure=False, pack=64
    )


@gluon.jit
def per_row(x):
    """[64] in the scores' row layout -> [64, 1] in the output's: both hold a row in the same threads."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, OUTPUT)), 1)


@aggregate
class Keys:
    """Where the keys are."""

    kv0: gl.tensor
    kv1: gl.tensor
    rows0: gl.tensor  # rows of the pool; a larger index counts as invalid
    rows1: gl.tensor
    index0: gl.tensor
    index1: gl.tensor
    index_stride0: gl.tensor  # elements / 2
    index_stride1: gl.tensor
    width0: gl.tensor  # columns of the index list
    width1: gl.tensor
    length0: gl.tensor  # per-token lengths, read only if HAS_LENGTH0
    length1: gl.tensor
    bias: gl.tensor  # additive scores beside index0, read only if HAS_BIAS
    queries: gl.tensor  # S: query tokens of one sequence
    window: gl.tensor  # sliding window, 0 = none (KEYS_RANGE)
    causal: gl.tensor  # 0 or 1 (KEYS_RANGE)
    FORM: gl.constexpr
    POOLS: gl.constexpr
    HAS_LENGTH0: gl.constexpr
    HAS_LENGTH1: gl.constexpr
    HAS_BIAS: gl.constexpr
    BATCHED_KV: gl.constexpr
    STRIDE0: gl.constexpr  # elements from one row to the next
    STRIDE1: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, kv0, kv1, rows0, rows1, index0, index1, index_stride0, index_stride1, width0, width1,
        length0, length1, bias, queries, window, causal, FORM, POOLS, HAS_LENGTH0, HAS_LENGTH1, HAS_BIAS, BATCHED_KV,
        STRIDE0, STRIDE1,
    ):  # fmt: skip
        self.kv0 = kv0
        self.kv1 = kv1
        self.rows0 = rows0
        self.rows1 = rows1
        self.index0 = index0
        self.index1 = index1
        self.index_stride0 = index_stride0
        self.index_stride1 = index_stride1
        self.width0 = width0
        self.width1 = width1
        self.length0 = length0
        self.length1 = length1
        self.bias = bias
        self.queries = queries
        self.window = window
        self.causal = causal
        self.FORM = gl.constexpr(FORM)
        self.POOLS = gl.constexpr(POOLS)
        self.HAS_LENGTH0 = gl.constexpr(HAS_LENGTH0)
        self.HAS_LENGTH1 = gl.constexpr(HAS_LENGTH1)
        self.HAS_BIAS = gl.constexpr(HAS_BIAS)
        self.BATCHED_KV = gl.constexpr(BATCHED_KV)
        self.STRIDE0 = gl.constexpr(STRIDE0)
        self.STRIDE1 = gl.constexpr(STRIDE1)

    @gluon.jit
    def counts(self, token, list_row):
        """(first row of a range, keys in pool 0, keys in pool 1) of one token."""
        first = token * 0
        count0 = self.width0
        count1 = token * 0
        if self.FORM == KEYS_RANGE:
            # causal: key n is visible to query s iff n <= s + N - S; with a window w, only if n > s + N - S - w
            last = token % self.queries + self.width0 - self.queries
            first = gl.where(self.window > 0, gl.maximum(last - self.window + 1, 0), 0)
            count0 = gl.maximum(gl.where(self.causal != 0, last + 1, self.width0) - first, 0)
            if self.BATCHED_KV:
                first += token // self.queries * self.width0
        else:
            if self.HAS_LENGTH0:
                count0 = gl.minimum(gl.maximum(gl.load(self.length0 + list_row).to(gl.int32), 0), self.width0)
            if self.POOLS == 2:
                count1 = self.width1
                if self.HAS_LENGTH1:
                    count1 = gl.minimum(gl.maximum(gl.load(self.length1 + list_row).to(gl.int32), 0), self.width1)
        return first, count0, count1

    @gluon.jit
    def load_tile(self, tile, end, lane, list_row, first, count0, count1):
        """Indices of one tile's keys per lane, as they are in the list: :meth:`valid` and :meth:`locate` read them.

        None is valid from tile `end` on, where the job's share ends. `lane`: 0..63 in any layout. Tiles of the second
        pool follow those of the first. The split in two matters: the caller starts this load early, and nothing but
        waiting for it may stand between it and other work.
        """
        count0 = gl.where(tile < end, count0, 0)
        if self.FORM == KEYS_RANGE:
            column = tile * TILE + lane
            index = gl.where(column < count0, first + column, -1)
        elif self.POOLS == 1:
            column = tile * TILE + lane
            pointer = self.index0 + list_row.to(gl.int64) * self.index_stride0 * 2 + column
            index = gl.load(pointer, mask=column < count0, other=-1)
        else:
            tiles0 = gl.cdiv(count0, TILE)
            second = tile >= tiles0
            count1 = gl.where(tile < end, count1, 0)
            column = gl.where(second, tile - tiles0, tile) * TILE + lane
            offset0 = list_row.to(gl.int64) * self.index_stride0 * 2
            offset1 = list_row.to(gl.int64) * self.index_stride1 * 2
            pointer = gl.where(second, self.index1 + offset1, self.index0 + offset0) + column
            index = gl.load(pointer, mask=column < gl.where(second, count1, count0), other=-1)
        return index

    @gluon.jit
    def valid(self, index, tile, count0):
        """Whether each of a tile's indices points into its pool."""
        rows = self.rows0
        if self.POOLS == 2:
            rows = gl.where(tile >= gl.cdiv(count0, TILE), self.rows1, self.rows0)
        if self.FORM == KEYS_RANGE:
            valid = index >= 0
        elif index.dtype == gl.int32:
            valid = index.to(gl.uint32) < rows.to(gl.uint32)  # negative indices are large ones here
        else:
            valid = (index >= 0) & (index < rows)
        return valid

    @gluon.jit
    def locate(self, index, tile, count0):
        """Pointers to the rows of a tile's keys. Those of invalid keys are meaningless and must not be read."""
        row = index.to(gl.uint32).to(gl.int64)
        pointers = self.kv0 + row * self.STRIDE0
        if self.POOLS == 2:
            second = tile >= gl.cdiv(count0, TILE)
            if self.STRIDE0 == self.STRIDE1:
                pointers = gl.where(second, self.kv1, self.kv0) + row * self.STRIDE0
            else:
                pointers = gl.where(second, self.kv1, self.kv0) + row * gl.where(second, self.STRIDE1, self.STRIDE0)
        return pointers

    @gluon.jit
    def term(self, valid, tile, lane, list_row, count0):
        """Additive score per key of a tile, in log2 units; MASKED_SCORE where the key is invalid."""
        if self.HAS_BIAS:
            column = tile * TILE + lane
            pointer = self.bias + list_row.to(gl.int64) * self.index_stride0 * 2 + column
            bias = gl.load(pointer, mask=column < count0, other=0.0).to(gl.float32) * LOG2E
            term = gl.where(valid, gl.maximum(bias, MASKED_SCORE), MASKED_SCORE)
        else:
            term = gl.where(valid, 0.0, MASKED_SCORE)
        return term


@aggregate
class Jobs:
    """The jobs that persistent CTAs walk through: rows (token, head block; the block fastest), or shares of their keys,
    (share, row), the row fastest. PAIRED: every row has two shares, one job behind the other."""

    count: gl.tensor
    tokens: gl.tensor  # tokens of this launch
    first: gl.tensor  # index list of the first of them
    token0: gl.tensor  # token, in q and in the outputs, of index list 0
    splits: gl.tensor  # shares of each row
    HEADS: gl.constexpr
    SPLIT: gl.constexpr  # whether rows are cut into shares
    PAIRED: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, count, tokens, first, token0, splits, HEADS, SPLIT, PAIRED):
        self.count = count
        self.tokens = tokens
        self.first = first
        self.token0 = token0
        self.splits = splits
        self.HEADS = gl.constexpr(HEADS)
        self.SPLIT = gl.constexpr(SPLIT)
        self.PAIRED = gl.constexpr(PAIRED)

    @gluon.jit
    def place(self, job):
        """(head block, share, row of the index list, token) of a job."""
        blocks: gl.constexpr = (self.HEADS + TILE - 1) // TILE
        split = job * 0
        if self.PAIRED:
            split = job & 1
            job = job >> 1
        elif self.SPLIT:  # runtime divisions are slow: none without need
            rows = self.tokens * blocks
            split = job // rows
            job -= split * rows
        list_row = self.first + job // blocks
        block = job % blocks
        if blocks == 1:
            block = job >> 30  # zero, but not a constant: the compiler would keep all that it implies in registers
        return block, split, list_row, self.token0 + list_row

    @gluon.jit
    def share(self, split, count0, count1):
        """A job's tiles [low, end) and how many pairs they make: at least one, so that every job writes its output.

        The last pair's second tile is absent where the number of tiles is odd.
        """
        end = gl.cdiv(count0, TILE) + gl.cdiv(count1, TILE)
        low = split
        if self.SPLIT:
            tiles = gl.maximum(gl.cdiv(end, self.splits), 1)
            low = split * tiles
            end = gl.minimum(end, low + tiles)
        pairs = gl.maximum((end - low + 1) // 2, 1)
        gl.assume(pairs > 0)  # no zero-trip path: it would keep a second copy of the accumulators alive
        return low, end, pairs


@gluon.jit
def allocate_barrier(count: gl.constexpr):
    """One mbarrier in an allocation of its own: indexing an array of them costs a CTA-wide barrier per arrival."""
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=count)
    return barrier


def triton_version() -> tuple[int, int]:
    """(major, minor) of the installed Triton."""
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)
