# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"
"""Persistent warp-specialised grouped FP8 GEMM for Hopper, for token counts where the tensor cores are the limit.

out[t, g, r] = sum over blocks b of K: x_scale[g, b, t] * w_scale[g, r / 128, b] * (x[g, t, b] . w[g, r, b])

A CTA computes tiles of 128 * HALVES tokens x 128 weight rows. A producer streams both operands with TMA through a ring
of stages; two consumer warpgroups take 64 * HALVES tokens each. The tensor cores accumulate one block of 128 in fp32,
which is then scaled and added to the tile's accumulator ("promotion"): while one warpgroup promotes, the other
multiplies. `pin` keeps the compiler from postponing promotions, which would keep several products' results alive. With
tiles of 128 tokens there are registers for two results, and a warpgroup multiplies while it promotes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from .hopper import allocate_barrier, pin

BLOCK = gl.constexpr(128)  # of K, and weight rows of a tile
ROWS = gl.constexpr(64)  # tokens of one matrix product
STAGES = gl.constexpr(4)
ACCUMULATOR = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))


@aggregate
class Tiles:
    """The list of tiles, weight rows fastest, then tokens, then groups."""

    count: gl.tensor
    tokens: gl.tensor  # T
    blocks_m: gl.tensor  # tiles along the tokens
    ROW_TILES: gl.constexpr  # R / 128
    K_BLOCKS: gl.constexpr  # K / 128
    HALVES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, count, tokens, blocks_m, ROW_TILES, K_BLOCKS, HALVES):
        self.count = count
        self.tokens = tokens
        self.blocks_m = blocks_m
        self.ROW_TILES = gl.constexpr(ROW_TILES)
        self.K_BLOCKS = gl.constexpr(K_BLOCKS)
        self.HALVES = gl.constexpr(HALVES)

    @gluon.jit
    def place(self, tile):
        """(group, first token, tile of weight rows) of a tile."""
        rest = tile // self.ROW_TILES
        group = rest // self.blocks_m
        return group, (rest - group * self.blocks_m) * (2 * ROWS * self.HALVES), tile % self.ROW_TILES


@aggregate
class Scales:
    """Scales of both operands: fp32, or exponent bytes (x: packed in words of four blocks)."""

    x: gl.tensor  # fp32 [G, K/128, M], or int8 view of int32 [G, K/512, M]
    w: gl.tensor  # [G, R/128, K/128] fp32, or exponent bytes
    padded: gl.tensor  # M
    PACKED_X: gl.constexpr
    BYTES_W: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, x, w, padded, PACKED_X, BYTES_W):
        self.x = x
        self.w = w
        self.padded = padded
        self.PACKED_X = gl.constexpr(PACKED_X)
        self.BYTES_W = gl.constexpr(BYTES_W)

    @gluon.jit
    def load_x(self, tiles, group, block, token):
        """Raw scales of the tokens' K block `block`. The launcher checks that 32-bit offsets suffice."""
        if self.PACKED_X:
            row = group * (tiles.K_BLOCKS // 4) + block // 4
            pointer = self.x + (row * self.padded + token) * 4 + block % 4
        else:
            pointer = self.x + (group * tiles.K_BLOCKS + block) * self.padded + token
        return gl.load(pointer, mask=token < tiles.tokens, other=0)

    @gluon.jit
    def load_w(self, tiles, group, row_tile, block):
        """Raw scale of one 128 x 128 block of the weight."""
        return gl.load(self.w + (group * tiles.ROW_TILES + row_tile) * tiles.K_BLOCKS + block)

    @gluon.jit
    def product(self, x, w):
        """x * w of raw scales."""
        if self.PACKED_X:
            x = ((x.to(gl.int32) & 0xFF) << 23).to(gl.float32, bitcast=True)
        if self.BYTES_W:
            w = ((w.to(gl.int32) & 0xFF) << 23).to(gl.float32, bitcast=True)
        return x * w


@gluon.jit
def start(x, w, t, z):
    """Start x[64, 128] @ w[128, 128]^T into the registers of t, whose value is dead: fresh registers would spill."""
    return warpgroup_mma(x.index(z), w.index(z).permute((1, 0)), t, use_acc=False, is_async=True)


@gluon.jit
def write(acc, staging, out, first, group, row_tile, tiles):
    """Store a [64, 128] tile of fp32 sums as out[t, g, r] in the output's dtype, 16 bytes per thread and store."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    token = first + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
    column = row_tile * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, WIDE))
    staging.store(acc.to(out.dtype.element_ty))
    width: gl.constexpr = tiles.ROW_TILES * BLOCK
    groups = tiles.count // (tiles.blocks_m * tiles.ROW_TILES)
    row = (token.to(gl.int64) * groups + group) * width
    gl.thread_barrier()
    pointer = out + gl.expand_dims(row, 1) + gl.expand_dims(column, 0)
    gl.store(pointer, staging.load(WIDE), mask=gl.expand_dims(token < tiles.tokens, 1))


@gluon.jit
def consumer(x, w, staging, full, empty, tiles, scales, out, WHICH: gl.constexpr):
    """Warpgroup WHICH of two: 64 * HALVES tokens of every tile."""
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, ACCUMULATOR))
    rounds: gl.constexpr = tiles.K_BLOCKS // STAGES
    done = 0
    for tile in range(gl.program_id(0), tiles.count, gl.num_programs(0)):
        group, first, row_tile = tiles.place(tile)
        first += WHICH * ROWS * tiles.HALVES
        acc0 = gl.zeros([ROWS, BLOCK], gl.float32, ACCUMULATOR)
        acc1 = gl.zeros([ROWS, BLOCK], gl.float32, ACCUMULATOR)
        ta = gl.zeros([ROWS, BLOCK], gl.float32, ACCUMULATOR)
        tb = gl.zeros([ROWS, BLOCK], gl.float32, ACCUMULATOR)
        x0 = scales.load_x(tiles, group, tile * 0, first + rows)
        x1 = x0
        if tiles.HALVES == 2:
            x1 = scales.load_x(tiles, group, tile * 0, first + ROWS + rows)
        w0 = scales.load_w(tiles, group, row_tile, 0)
        second = gl.minimum(tile * 0 + 1, tiles.K_BLOCKS - 1)
        next0 = scales.load_x(tiles, group, second, first + rows)
        next1 = next0
        if tiles.HALVES == 2:
            next1 = scales.load_x(tiles, group, second, first + ROWS + rows)
        next_w = scales.load_w(tiles, group, row_tile, second)
        for k in range(rounds):
            z = done >> 30  # opaque zero, see scores_chunk in attention_kernel.py
            parity = done & 1
            if tiles.HALVES == 1:
                # two results: the next block multiplies while this one is promoted
                mbarrier.wait(full[0], parity)
                ta = start(x[WHICH], w[0], ta, z)
                for s in gl.static_range(STAGES):
                    following = gl.minimum(k * STAGES + s + 2, tiles.K_BLOCKS - 1)
                    after0 = scales.load_x(tiles, group, following, first + rows)
                    after_w = scales.load_w(tiles, group, row_tile, following)
                    if s + 1 < STAGES:
                        mbarrier.wait(full[s + 1], parity)
                        if s % 2 == 0:
                            tb = start(x[(s + 1) * 2 + WHICH], w[s + 1], tb, z)
                        else:
                            ta = start(x[(s + 1) * 2 + WHICH], w[s + 1], ta, z)
                    if s % 2 == 0:
                        ta = warpgroup_mma_wait(1, deps=[ta])
                        mbarrier.arrive(empty[s])
                        acc0 = pin(acc0 + ta * gl.expand_dims(scales.product(x0, w0), 1))
                    else:
                        if s + 1 < STAGES:
                            tb = warpgroup_mma_wait(1, deps=[tb])
                        else:
                            tb = warpgroup_mma_wait(0, deps=[tb])
                        mbarrier.arrive(empty[s])
                        acc0 = pin(acc0 + tb * gl.expand_dims(scales.product(x0, w0), 1))
                    x0 = next0
                    w0 = next_w
                    next0 = after0
                    next_w = after_w
            else:
                for s in gl.static_range(STAGES):
                    # scales of the next two blocks are on their way while this one multiplies
                    following = gl.minimum(k * STAGES + s + 2, tiles.K_BLOCKS - 1)
                    after0 = scales.load_x(tiles, group, following, first + rows)
                    after1 = scales.load_x(tiles, group, following, first + ROWS + rows)
                    after_w = scales.load_w(tiles, group, row_tile, following)
                    mbarrier.wait(full[s], parity)
                    ta = warpgroup_mma_wait(0, deps=[start(x[s * 4 + WHICH * 2], w[s], ta, z)])
                    acc0 = pin(acc0 + ta * gl.expand_dims(scales.product(x0, w0), 1))
                    ta = warpgroup_mma_wait(0, deps=[start(x[s * 4 + WHICH * 2 + 1], w[s], ta, z)])
                    mbarrier.arrive(empty[s])
                    acc1 = pin(acc1 + ta * gl.expand_dims(scales.product(x1, w0), 1))
                    x0 = next0
                    x1 = next1
                    w0 = next_w
                    next0 = after0
                    next1 = after1
                    next_w = after_w
            done += 1
        write(acc0, staging, out, first, group, row_tile, tiles)
        if tiles.HALVES == 2:
            write(acc1, staging, out, first + ROWS, group, row_tile, tiles)


@gluon.jit
def producer(x_rows, w_rows, x, w, full, empty, tiles):
    """Stream both operands' blocks through the ring."""
    rounds: gl.constexpr = tiles.K_BLOCKS // STAGES
    bytes_per_stage: gl.constexpr = (2 * ROWS * tiles.HALVES + BLOCK) * BLOCK
    done = 0
    for tile in range(gl.program_id(0), tiles.count, gl.num_programs(0)):
        group, first, row_tile = tiles.place(tile)
        x_row = group * tiles.tokens + first
        w_row = (group * tiles.ROW_TILES + row_tile) * BLOCK
        for k in range(rounds):
            for s in gl.static_range(STAGES):
                column = (k * STAGES + s) * BLOCK
                mbarrier.wait(empty[s], (done & 1) ^ 1)
                mbarrier.expect(full[s], bytes_per_stage)
                tma.async_copy_global_to_shared(w_rows, [w_row, column], full[s], w[s].index(0))
                for part in gl.static_range(2 * tiles.HALVES):
                    tma.async_copy_global_to_shared(
                        x_rows, [x_row + part * ROWS, column], full[s], x[s * 2 * tiles.HALVES + part].index(0)
                    )
            done += 1


@gluon.jit
def tile_buffer(layout: gl.constexpr, rows: gl.constexpr):
    return gl.allocate_shared_memory(gl.float8e4nv, [1, rows, BLOCK], layout)


@gluon.jit(do_not_specialize=["tiles_count", "tokens", "blocks_m", "padded"])
def bgemm_kernel(
    x_rows, w_rows, x_scales, w_scales, out, tiles_count, tokens, blocks_m, padded,
    ROW_TILES: gl.constexpr, K_BLOCKS: gl.constexpr, HALVES: gl.constexpr,
    PACKED_X: gl.constexpr, BYTES_W: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """x_rows: descriptor of [G*T, K]; w_rows: of [G*R, K]; see `launch_bgemm` for the rest."""
    L: gl.constexpr = x_rows.layout
    tiles = Tiles(tiles_count, tokens, blocks_m, ROW_TILES, K_BLOCKS, HALVES)
    scales = Scales(x_scales, w_scales, padded, PACKED_X, BYTES_W)
    x = (
        tile_buffer(L, ROWS), tile_buffer(L, ROWS), tile_buffer(L, ROWS), tile_buffer(L, ROWS),
        tile_buffer(L, ROWS), tile_buffer(L, ROWS), tile_buffer(L, ROWS), tile_buffer(L, ROWS),
    )  # fmt: skip
    if HALVES == 2:
        x = x + (  # type: ignore[assignment]
            tile_buffer(L, ROWS), tile_buffer(L, ROWS), tile_buffer(L, ROWS), tile_buffer(L, ROWS),
            tile_buffer(L, ROWS), tile_buffer(L, ROWS), tile_buffer(L, ROWS), tile_buffer(L, ROWS),
        )  # fmt: skip
    w = (tile_buffer(L, BLOCK), tile_buffer(L, BLOCK), tile_buffer(L, BLOCK), tile_buffer(L, BLOCK))
    OUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    staging0 = gl.allocate_shared_memory(out.dtype.element_ty, [ROWS, BLOCK], OUT)
    staging1 = gl.allocate_shared_memory(out.dtype.element_ty, [ROWS, BLOCK], OUT)
    full = (allocate_barrier(1), allocate_barrier(1), allocate_barrier(1), allocate_barrier(1))
    empty = (allocate_barrier(2), allocate_barrier(2), allocate_barrier(2), allocate_barrier(2))
    gl.warp_specialize(
        [
            (consumer, (x, w, staging0, full, empty, tiles, scales, out, 0)),
            (consumer, (x, w, staging1, full, empty, tiles, scales, out, 1)),
            (producer, (x_rows, w_rows, x, w, full, empty, tiles)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
