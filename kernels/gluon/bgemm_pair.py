# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="import-untyped"
"""Grouped FP8 GEMM, tiles of 128 x 128, products of one block of K under way while the last one is promoted."""

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
from triton.language.extra.cuda import gdc_wait

from .bgemm_kernel import BLOCK, ROWS, Tiles, WeightScales, producer
from .hopper import pin

ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))


@aggregate
class PairRing:
    x: gl.shared_memory_descriptor
    w: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, x, w, scales, full, empty):
        self.x = x
        self.w = w
        self.scales = scales
        self.full = full
        self.empty = empty


@gluon.jit
def store_tile(acc, staging, out, token, column):
    left, right = gl.split(gl.permute(gl.reshape(acc, [ROWS, 2, 64]), (0, 2, 1)))
    tma.store_wait(0)
    gl.thread_barrier()
    staging.index(0).store(left.to(out.dtype))
    staging.index(1).store(right.to(out.dtype))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(out, [token, column], staging.index(0))
    tma.async_copy_shared_to_global(out, [token, column + 64], staging.index(1))


@gluon.jit
def start(ring, t, stage, phase, WHICH: gl.constexpr):
    """Queue the products of the block in `stage`."""
    mbarrier.wait(ring.full.index(stage), phase)
    x = ring.x.index(stage).slice(WHICH * ROWS, ROWS)
    return warpgroup_mma(x, ring.w.index(stage).permute((1, 0)), t, use_acc=False, is_async=True)


@gluon.jit
def promote(ring, scales, acc, t, w, k, stage, WHICH: gl.constexpr):
    factor = scales.product(ring.scales.index(stage).slice(WHICH * ROWS, ROWS).load(gl.SliceLayout(1, ACC)), w, k)
    mbarrier.arrive(ring.empty.index(stage))
    return pin(acc + t * gl.expand_dims(factor, 1))


@gluon.jit
def pair_consumer(
    ring, staging, tiles, scales, out, WHICH: gl.constexpr, PDL: gl.constexpr, UNROLL: gl.constexpr,
    FLIGHT: gl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
    width: gl.constexpr = tiles.ROW_TILES * tiles.WEIGHT_ROWS
    stage = gl.program_id(0) * 0
    phase = stage
    for tile in range(gl.program_id(0), tiles.count, gl.num_programs(0)):
        group, first, row_tile = tiles.place(tile)
        acc = gl.zeros([ROWS, 128], gl.float32, ACC)
        t = gl.zeros([ROWS, 128], gl.float32, ACC)
        u = gl.zeros([ROWS, 128], gl.float32, ACC)
        if FLIGHT:
            t = start(ring, t, stage, phase, WHICH)
            w = scales.load(tiles, group, row_tile, 0)
            for k in range(0, tiles.K_BLOCKS - 2, 2):
                stage1, phase1 = tiles.following(stage, phase)
                u = start(ring, u, stage1, phase1, WHICH)
                w1 = scales.load(tiles, group, row_tile, k + 1)
                t = warpgroup_mma_wait(1, deps=[t])
                acc = promote(ring, scales, acc, t, w, k, stage, WHICH)
                stage, phase = tiles.following(stage1, phase1)
                t = start(ring, t, stage, phase, WHICH)
                w = scales.load(tiles, group, row_tile, k + 2)
                u = warpgroup_mma_wait(1, deps=[u])
                acc = promote(ring, scales, acc, u, w1, k + 1, stage1, WHICH)
            stage1, phase1 = tiles.following(stage, phase)
            u = start(ring, u, stage1, phase1, WHICH)
            w1 = scales.load(tiles, group, row_tile, tiles.K_BLOCKS - 1)
            t = warpgroup_mma_wait(1, deps=[t])
            acc = promote(ring, scales, acc, t, w, tiles.K_BLOCKS - 2, stage, WHICH)
            u = warpgroup_mma_wait(0, deps=[u])
            acc = promote(ring, scales, acc, u, w1, tiles.K_BLOCKS - 1, stage1, WHICH)
            stage, phase = tiles.following(stage1, phase1)
        else:
            for k in range(0, tiles.K_BLOCKS, UNROLL):
                t = start(ring, t, stage, phase, WHICH)
                w = scales.load(tiles, group, row_tile, k)
                for i in gl.static_range(0, UNROLL, 2):
                    stage1, phase1 = tiles.following(stage, phase)
                    u = start(ring, u, stage1, phase1, WHICH)
                    w1 = scales.load(tiles, group, row_tile, k + i + 1)
                    t = warpgroup_mma_wait(1, deps=[t])
                    acc = promote(ring, scales, acc, t, w, k + i, stage, WHICH)
                    stage, phase = tiles.following(stage1, phase1)
                    if i + 2 < UNROLL:
                        t = start(ring, t, stage, phase, WHICH)
                        w = scales.load(tiles, group, row_tile, k + i + 2)
                        u = warpgroup_mma_wait(1, deps=[u])
                    else:
                        u = warpgroup_mma_wait(0, deps=[u])
                    acc = promote(ring, scales, acc, u, w1, k + i + 1, stage1, WHICH)
        store_tile(acc, staging, out, first + WHICH * ROWS, group * width + row_tile * tiles.WEIGHT_ROWS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles_count", "tokens", "blocks_t", "padded"])
def pair_bgemm_kernel(
    x_rows, w_rows, scale_rows, w_scales, out, tiles_count, tokens, blocks_t, padded,
    ROW_TILES: gl.constexpr, K_BLOCKS: gl.constexpr, STAGES: gl.constexpr, PACKED_X: gl.constexpr,
    BYTES_W: gl.constexpr, PDL: gl.constexpr, UNROLL: gl.constexpr, FLIGHT: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    tiles = Tiles(tiles_count, tokens, blocks_t, ROW_TILES, K_BLOCKS, 128, 128, STAGES, 1)
    scales = WeightScales(w_scales, BYTES_W, PACKED_X)
    x = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, BLOCK], x_rows.layout)
    w = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, BLOCK], w_rows.layout)
    raw = gl.allocate_shared_memory(scale_rows.dtype, [STAGES, 128], scale_rows.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    staging0 = gl.allocate_shared_memory(out.dtype, [2, ROWS, 64], out.layout)
    staging1 = gl.allocate_shared_memory(out.dtype, [2, ROWS, 64], out.layout)
    fence_async_shared()
    ring = PairRing(x, w, raw, full, empty)
    gl.warp_specialize(
        [
            (pair_consumer, (ring, staging0, tiles, scales, out, 0, PDL, UNROLL, FLIGHT)),
            (pair_consumer, (ring, staging1, tiles, scales, out, 1, PDL, UNROLL, FLIGHT)),
            (producer, (x_rows, w_rows, scale_rows, ring, tiles, padded, PACKED_X, PDL)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
