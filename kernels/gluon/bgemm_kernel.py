# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"
"""Persistent warp-specialised grouped FP8 GEMM for Hopper.

out[t, g, r] = sum over blocks b of K: x_scale[g, b, t] * w_scale[g, r / 128, b] * (x[g, t, b] . w[g, r, b])

A producer streams both operands and the token scales with TMA through a ring of stages; two consumer warpgroups share
a tile of TOKENS tokens x 128 weight rows. The tensor cores accumulate one block of 128 in fp32, which is then scaled
and added to the tile's accumulator ("promotion"): while one warpgroup promotes, the other multiplies.

    SWAP      (16 or 32 tokens) weight rows are the tensor core's M operand, 64 per warpgroup
    64        tokens: both warpgroups take all of them, and 64 weight rows each
    128, 256  tokens: 64 or 128 per warpgroup, all weight rows

Tiles of 64 weight rows (for few groups, so that every multiprocessor has a tile) are shared along K instead: each
warpgroup takes every second block, and the two sums meet in shared memory.

The loop over K is not unrolled and reads stages by a running index: the loops of all three warpgroups stay within the
instruction cache. BLOCKS blocks of K make one stage where tiles are small, so that a step's latency is shared.

For few tokens the product is a stream of weights, and memory is idle while the small kernel before it runs. Few
registers let a CTA start beside that kernel's, and before it waits for it, it asks for PREFETCH bytes of its weight
rows to be brought into the L2 cache. That reads nothing: whoever writes the weight until then writes to that same
cache, and the loads proper come after the wait. Where the caller vouches for the weight (`early`), that of the ring's
first stages is loaded before the wait, and what is prefetched lies behind it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .hopper import allocate_barrier, pin, prefetch_rows

BLOCK = gl.constexpr(128)  # of K
ROWS = gl.constexpr(64)  # M of one matrix product


@aggregate
class Tiles:
    """The list of tiles, weight rows fastest, then tokens, then groups."""

    count: gl.tensor
    tokens: gl.tensor  # T
    blocks_t: gl.tensor  # tiles along the tokens
    ROW_TILES: gl.constexpr  # tiles along the weight rows
    K_BLOCKS: gl.constexpr  # K / 128
    TOKENS: gl.constexpr  # of a tile
    WEIGHT_ROWS: gl.constexpr  # of a tile
    STAGES: gl.constexpr
    BLOCKS: gl.constexpr  # K blocks per stage

    @gluon.constexpr_function
    def __init__(self, count, tokens, blocks_t, ROW_TILES, K_BLOCKS, TOKENS, WEIGHT_ROWS, STAGES, BLOCKS):
        self.count = count
        self.tokens = tokens
        self.blocks_t = blocks_t
        self.ROW_TILES = gl.constexpr(ROW_TILES)
        self.K_BLOCKS = gl.constexpr(K_BLOCKS)
        self.TOKENS = gl.constexpr(TOKENS)
        self.WEIGHT_ROWS = gl.constexpr(WEIGHT_ROWS)
        self.STAGES = gl.constexpr(STAGES)
        self.BLOCKS = gl.constexpr(BLOCKS)

    @gluon.jit
    def place(self, tile):
        """(group, first token, tile of weight rows) of a tile."""
        rest = tile // self.ROW_TILES
        group = rest // self.blocks_t
        return group, (rest - group * self.blocks_t) * self.TOKENS, tile - rest * self.ROW_TILES

    @gluon.jit
    def following(self, stage, phase):
        """The stage after `stage`, and the parity of its use."""
        stage += 1
        wrap = stage == self.STAGES
        return gl.where(wrap, 0, stage), gl.where(wrap, phase ^ 1, phase)


@aggregate
class Ring:
    """Stages of operands: x [STAGES * BLOCKS, tokens, 128], w [STAGES * BLOCKS, rows, 128], scales alike, barriers."""

    x: gl.shared_memory_descriptor
    w: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    sums: gl.shared_memory_descriptor  # fp32, of the second warpgroup, if the tiles are shared along K
    sums_full: gl.shared_memory_descriptor
    sums_empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, x, w, scales, full, empty, sums, sums_full, sums_empty):
        self.x = x
        self.w = w
        self.scales = scales
        self.full = full
        self.empty = empty
        self.sums = sums
        self.sums_full = sums_full
        self.sums_empty = sums_empty


@aggregate
class WeightScales:
    """[G, R / 128, K / 128] fp32 or exponent bytes; PACKED: the token scales are exponents in words of four blocks."""

    pointer: gl.tensor
    BYTES: gl.constexpr
    PACKED: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, pointer, BYTES, PACKED):
        self.pointer = pointer
        self.BYTES = gl.constexpr(BYTES)
        self.PACKED = gl.constexpr(PACKED)

    @gluon.jit
    def load(self, tiles, group, row_tile, block):
        """Raw scale of one 128 x 128 block of the weight."""
        row = (group * tiles.ROW_TILES + row_tile) * tiles.WEIGHT_ROWS // 128
        return gl.load(self.pointer + row * tiles.K_BLOCKS + block)

    @gluon.jit
    def product(self, x, w, block):
        """Token scales x (raw, as they are in memory) times a raw weight scale."""
        if self.PACKED:
            x = (((x >> (block % 4 * 8)) & 0xFF) << 23).to(gl.float32, bitcast=True)
        if self.BYTES:
            w = ((w.to(gl.int32) & 0xFF) << 23).to(gl.float32, bitcast=True)
        return x * w


@gluon.jit
def write(acc, staging, out, first, group, row0, tiles, SWAP: gl.constexpr, GROUPS: gl.constexpr):
    """Store a tile of fp32 sums as out[t, g, r]. acc [tokens, rows], SWAP: transposed."""
    width: gl.constexpr = tiles.ROW_TILES * tiles.WEIGHT_ROWS
    if SWAP:
        token = first + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
        row = row0 + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
        offset = (token.to(gl.int64) * GROUPS + group) * width
        pointer = out + gl.expand_dims(offset, 0) + gl.expand_dims(row, 1)
        gl.store(pointer, acc.to(out.dtype.element_ty), mask=gl.expand_dims(token < tiles.tokens, 0))
    else:
        WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        token = first + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
        offset = (token.to(gl.int64) * GROUPS + group) * width
        inside = gl.expand_dims(token < tiles.tokens, 1)
        if acc.shape[1] == 128:
            left, right = gl.split(gl.permute(gl.reshape(acc, [ROWS, 2, 64]), (0, 2, 1)))
            write_half(left, staging, out, offset, row0, inside, WIDE)
            write_half(right, staging, out, offset, row0 + 64, inside, WIDE)
        else:
            write_half(acc, staging, out, offset, row0, inside, WIDE)


@gluon.jit
def write_half(x, staging, out, offset, row0, inside, WIDE: gl.constexpr):
    """Store a [64 tokens, 64 rows] tile through shared memory."""
    column = row0 + gl.arange(0, 64, gl.SliceLayout(0, WIDE))
    gl.thread_barrier()  # the last tile has left the buffer
    staging.store(x.to(out.dtype.element_ty))
    gl.thread_barrier()
    gl.store(out + gl.expand_dims(offset, 1) + gl.expand_dims(column, 0), staging.load(WIDE), mask=inside)


@gluon.jit
def consumer(
    ring, staging, tiles, scales, out, weight, WHICH: gl.constexpr, SWAP: gl.constexpr, GROUPS: gl.constexpr,
    early, PDL: gl.constexpr, PREFETCH: gl.constexpr,
):  # fmt: skip
    """Warpgroup WHICH of two: its share of every tile."""
    if PDL:
        if PREFETCH > 0 and WHICH == 1:  # not in the producer, whose first copies are urgent
            row0 = gl.program_id(0) * tiles.WEIGHT_ROWS  # of the CTA's first tile, where the tokens are one tile
            behind = weight + early * tiles.BLOCKS * BLOCK
            prefetch_rows(behind, row0, tiles.K_BLOCKS * BLOCK, tiles.WEIGHT_ROWS, PREFETCH)
        gdc_wait()
    N: gl.constexpr = tiles.TOKENS if SWAP else (64 if tiles.TOKENS == 64 else 128)
    HALVES: gl.constexpr = 2 if tiles.TOKENS == 256 else 1
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 32])
    SCALES: gl.constexpr = gl.SliceLayout(0 if SWAP else 1, LAYOUT)
    T0: gl.constexpr = 0 if tiles.TOKENS <= 64 else WHICH * ROWS * HALVES  # first token of the share
    ALONG_K: gl.constexpr = tiles.WEIGHT_ROWS == 64
    R0: gl.constexpr = WHICH * 64 if tiles.TOKENS <= 64 and not ALONG_K else 0  # first weight row
    STEP: gl.constexpr = 2 if ALONG_K else 1
    B0: gl.constexpr = WHICH if ALONG_K else 0
    turn = gl.program_id(0) * 0
    stage = gl.program_id(0) * 0
    phase = stage
    for tile in range(gl.program_id(0), tiles.count, gl.num_programs(0)):
        group, first, row_tile = tiles.place(tile)
        acc0 = gl.zeros([ROWS, N], gl.float32, LAYOUT)
        acc1 = gl.zeros([ROWS, N], gl.float32, LAYOUT)
        t = gl.zeros([ROWS, N], gl.float32, LAYOUT)
        w = scales.load(tiles, group, row_tile, B0)
        for k in range(0, tiles.K_BLOCKS, tiles.BLOCKS):
            mbarrier.wait(ring.full.index(stage), phase)
            for b in gl.static_range(B0, tiles.BLOCKS, STEP):
                slot = stage * tiles.BLOCKS + b
                x_tile = ring.x.index(slot)
                w_tile = ring.w.index(slot)
                next_w = scales.load(tiles, group, row_tile, gl.minimum(k + b + STEP, tiles.K_BLOCKS - 1))
                if SWAP:
                    t = warpgroup_mma(w_tile.slice(R0, 64), x_tile.permute((1, 0)), t, use_acc=False, is_async=True)
                    x = ring.scales.index(slot).slice(0, N).load(SCALES)
                else:
                    part = w_tile.slice(R0, N).permute((1, 0))
                    t = warpgroup_mma(x_tile.slice(T0, ROWS), part, t, use_acc=False, is_async=True)
                    x = ring.scales.index(slot).slice(T0, ROWS).load(SCALES)
                factor = gl.expand_dims(scales.product(x, w, k + b), 0 if SWAP else 1)
                t = warpgroup_mma_wait(0, deps=[t])
                if HALVES == 1:
                    if b + STEP >= tiles.BLOCKS:
                        mbarrier.arrive(ring.empty.index(stage))
                acc0 = pin(acc0 + t * factor)
                if HALVES == 2:
                    part = w_tile.slice(R0, N).permute((1, 0))
                    t = warpgroup_mma(x_tile.slice(T0 + ROWS, ROWS), part, t, use_acc=False, is_async=True)
                    x = ring.scales.index(slot).slice(T0 + ROWS, ROWS).load(SCALES)
                    factor = gl.expand_dims(scales.product(x, w, k + b), 1)
                    t = warpgroup_mma_wait(0, deps=[t])
                    if b + STEP >= tiles.BLOCKS:
                        mbarrier.arrive(ring.empty.index(stage))
                    acc1 = pin(acc1 + t * factor)
                w = next_w
            stage, phase = tiles.following(stage, phase)
        row0 = row_tile * tiles.WEIGHT_ROWS + R0
        if ALONG_K:
            if WHICH == 1:
                mbarrier.wait(ring.sums_empty, (turn & 1) ^ 1)
                ring.sums.store(acc0)
                mbarrier.arrive(ring.sums_full)
            else:
                mbarrier.wait(ring.sums_full, turn & 1)
                acc0 += ring.sums.load(LAYOUT)
                mbarrier.arrive(ring.sums_empty)
                write(acc0, staging, out, first + T0, group, row0, tiles, SWAP, GROUPS)
            turn += 1
        else:
            write(acc0, staging, out, first + T0, group, row0, tiles, SWAP, GROUPS)
        if HALVES == 2:
            write(acc1, staging, out, first + T0 + ROWS, group, row0, tiles, SWAP, GROUPS)


@gluon.jit
def load_early(w_rows, ring, tiles, early, STAGE_BYTES: gl.constexpr):
    """Load the weight of the CTA's first `early` stages, and announce to their barriers all that will come."""
    group, first, row_tile = tiles.place(gl.program_id(0))
    w_row = (group * tiles.ROW_TILES + row_tile) * tiles.WEIGHT_ROWS
    for stage in range(0, early):
        full = ring.full.index(stage)
        mbarrier.expect(full, STAGE_BYTES)
        for b in gl.static_range(tiles.BLOCKS):
            slot = stage * tiles.BLOCKS + b
            tma.async_copy_global_to_shared(w_rows, [w_row, slot * BLOCK], full, ring.w.index(slot))


@gluon.jit
def producer(x_rows, w_rows, scale_rows, ring, tiles, padded, early, PACKED: gl.constexpr, PDL: gl.constexpr):
    """Stream both operands' blocks and the token scales through the ring."""
    scale_bytes: gl.constexpr = 4 * ring.scales.shape[1]
    size: gl.constexpr = tiles.BLOCKS * ((tiles.TOKENS + tiles.WEIGHT_ROWS) * BLOCK + scale_bytes)
    stage = gl.program_id(0) * 0
    phase = stage
    loaded = early  # stages whose weight is on its way
    if PDL:
        load_early(w_rows, ring, tiles, early, size)
        gdc_wait()
    for tile in range(gl.program_id(0), tiles.count, gl.num_programs(0)):
        group, first, row_tile = tiles.place(tile)
        w_row = (group * tiles.ROW_TILES + row_tile) * tiles.WEIGHT_ROWS
        for k in range(0, tiles.K_BLOCKS, tiles.BLOCKS):
            mbarrier.wait(ring.empty.index(stage), phase ^ 1)
            full = ring.full.index(stage)
            due = loaded <= 0
            loaded -= 1
            mbarrier.expect(full, size, pred=due)
            for b in gl.static_range(tiles.BLOCKS):
                slot = stage * tiles.BLOCKS + b
                block = k + b
                weight_row = [w_row, block * BLOCK]
                tma.async_copy_global_to_shared(w_rows, weight_row, full, ring.w.index(slot), pred=due)
                x_row = group * tiles.tokens + first
                tma.async_copy_global_to_shared(x_rows, [x_row, block * BLOCK], full, ring.x.index(slot))
                if PACKED:
                    row = group * (tiles.K_BLOCKS // 4) + block // 4
                else:
                    row = group * tiles.K_BLOCKS + block
                tma.async_copy_global_to_shared(scale_rows, [row * padded + first], full, ring.scales.index(slot))
            stage, phase = tiles.following(stage, phase)


@gluon.jit(do_not_specialize=["tiles_count", "tokens", "blocks_t", "padded", "early"])
def bgemm_kernel(
    x_rows, w_rows, scale_rows, w_scales, weight, out, tiles_count, tokens, blocks_t, padded, early,
    GROUPS: gl.constexpr, ROW_TILES: gl.constexpr, K_BLOCKS: gl.constexpr, TOKENS: gl.constexpr,
    WEIGHT_ROWS: gl.constexpr, STAGES: gl.constexpr, BLOCKS: gl.constexpr, SWAP: gl.constexpr,
    PACKED_X: gl.constexpr, BYTES_W: gl.constexpr, PDL: gl.constexpr,
    LET_IN: gl.constexpr, PREFETCH: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """x_rows: descriptor of [G*T, K]; w_rows: of [G*R, K], `weight`; scale_rows: of all token scales, flat.

    See `launch`. LET_IN: have a dependent kernel launched early. PREFETCH: bytes of each weight row. Both only where
    there is one tile of tokens. early: stages whose weight is loaded before the wait for the kernel in front.
    """
    if LET_IN:
        gdc_launch_dependents()
    tiles = Tiles(tiles_count, tokens, blocks_t, ROW_TILES, K_BLOCKS, TOKENS, WEIGHT_ROWS, STAGES, BLOCKS)
    scales = WeightScales(w_scales, BYTES_W, PACKED_X)
    SLOTS: gl.constexpr = STAGES * BLOCKS
    x = gl.allocate_shared_memory(gl.float8e4nv, [SLOTS, TOKENS, BLOCK], x_rows.layout)
    w = gl.allocate_shared_memory(gl.float8e4nv, [SLOTS, WEIGHT_ROWS, BLOCK], w_rows.layout)
    # TMA writes to multiples of 128 bytes: at least 32 scales
    raw = gl.allocate_shared_memory(scale_rows.dtype, [SLOTS, scale_rows.block_shape[0]], scale_rows.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    OUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    STAGED: gl.constexpr = 8 if SWAP else ROWS  # the swapped form stores from registers
    staging0 = gl.allocate_shared_memory(out.dtype.element_ty, [STAGED, 64], OUT)
    staging1 = gl.allocate_shared_memory(out.dtype.element_ty, [STAGED, 64], OUT)
    SUM_ROWS: gl.constexpr = ROWS if WEIGHT_ROWS == 64 else 1
    SUM_COLUMNS: gl.constexpr = TOKENS if SWAP else 64
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    sums = gl.allocate_shared_memory(gl.float32, [SUM_ROWS, SUM_COLUMNS], PLAIN)
    fence_async_shared()
    ring = Ring(x, w, raw, full, empty, sums, allocate_barrier(1), allocate_barrier(1))
    gl.warp_specialize(
        [
            (consumer, (ring, staging0, tiles, scales, out, weight, 0, SWAP, GROUPS, early, PDL, PREFETCH)),
            (consumer, (ring, staging1, tiles, scales, out, weight, 1, SWAP, GROUPS, early, PDL, PREFETCH)),
            (producer, (x_rows, w_rows, scale_rows, ring, tiles, padded, early, PACKED_X, PDL)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
