# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="import-untyped"
"""Grouped FP8 GEMM for many tokens: tiles of 128 tokens x 256 weight rows, 64 tokens per consumer warpgroup.

What limits tiles of this size is shared memory: its 128 bytes per cycle carry the operands of every matrix product and
what TMA writes. With both operands there, two products of [64 tokens, 128 rows, 128 of K] read the tokens twice. Here a
warpgroup takes its tokens into registers once per block of K and multiplies them with both halves of the weight rows:
80 KiB read and 48 KiB written per block, 1,024 cycles, which is what the products themselves take; tiles of 256 tokens
x 128 rows read 96 KiB.

A finished tile leaves through shared memory and TMA, while the next one is multiplied.
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
from triton.language.extra.cuda import gdc_wait

from .bgemm_kernel import BLOCK, ROWS, Tiles, WeightScales, producer
from .hopper import pin

ACCUMULATOR = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))
OPERAND = gl.constexpr(gl.DotOperandLayout(0, ACCUMULATOR.value, 4))


@aggregate
class WideRing:
    """Stages of operands, as the producer fills them: x [STAGES, 128, 128], w [STAGES, 256, 128], scales, barriers."""

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
def store_half(acc, staging, out, token, column):
    """Hand acc [64 tokens, 128 rows] to TMA, which writes it to out[token.., column..] later. staging [2, 64, 64]."""
    left, right = gl.split(gl.permute(gl.reshape(acc, [ROWS, 2, 64]), (0, 2, 1)))
    tma.store_wait(0)  # the buffer's last content has left
    gl.thread_barrier()
    staging.index(0).store(left.to(out.dtype))
    staging.index(1).store(right.to(out.dtype))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(out, [token, column], staging.index(0))
    tma.async_copy_shared_to_global(out, [token, column + 64], staging.index(1))


@gluon.jit
def wide_consumer(ring, staging, tiles, scales, out, WHICH: gl.constexpr, PDL: gl.constexpr):
    """Tokens 64 * WHICH to 64 * WHICH + 63 of every tile."""
    if PDL:
        gdc_wait()
    SCALES: gl.constexpr = gl.SliceLayout(1, ACCUMULATOR)
    width: gl.constexpr = tiles.ROW_TILES * tiles.WEIGHT_ROWS
    stage = gl.program_id(0) * 0
    phase = stage
    for tile in range(gl.program_id(0), tiles.count, gl.num_programs(0)):
        group, first, row_tile = tiles.place(tile)
        acc0 = gl.zeros([ROWS, 128], gl.float32, ACCUMULATOR)
        acc1 = gl.zeros([ROWS, 128], gl.float32, ACCUMULATOR)
        t = gl.zeros([ROWS, 128], gl.float32, ACCUMULATOR)
        w0 = scales.load_half(tiles, group, row_tile, 0, 0)
        w1 = scales.load_half(tiles, group, row_tile, 1, 0)
        for k in range(0, tiles.K_BLOCKS):
            mbarrier.wait(ring.full.index(stage), phase)
            x = ring.x.index(stage).slice(WHICH * ROWS, ROWS).load(OPERAND)
            w = ring.w.index(stage)
            t = warpgroup_mma(x, w.slice(0, 128).permute((1, 0)), t, use_acc=False, is_async=True)
            following = gl.minimum(k + 1, tiles.K_BLOCKS - 1)
            next0 = scales.load_half(tiles, group, row_tile, 0, following)
            next1 = scales.load_half(tiles, group, row_tile, 1, following)
            token_scale = ring.scales.index(stage).slice(WHICH * ROWS, ROWS).load(SCALES)
            factor = gl.expand_dims(scales.product(token_scale, w0, k), 1)
            t = warpgroup_mma_wait(0, deps=[t])
            acc0 = pin(acc0 + t * factor)
            t = warpgroup_mma(x, w.slice(128, 128).permute((1, 0)), t, use_acc=False, is_async=True)
            factor = gl.expand_dims(scales.product(token_scale, w1, k), 1)
            t = warpgroup_mma_wait(0, deps=[t])
            mbarrier.arrive(ring.empty.index(stage))
            acc1 = pin(acc1 + t * factor)
            w0 = next0
            w1 = next1
            stage, phase = tiles.following(stage, phase)
        column = group * width + row_tile * tiles.WEIGHT_ROWS
        store_half(acc0, staging, out, first + WHICH * ROWS, column)
        store_half(acc1, staging, out, first + WHICH * ROWS, column + 128)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles_count", "tokens", "blocks_t", "padded"])
def wide_bgemm_kernel(
    x_rows, w_rows, scale_rows, w_scales, out, tiles_count, tokens, blocks_t, padded,
    ROW_TILES: gl.constexpr, K_BLOCKS: gl.constexpr, STAGES: gl.constexpr, PACKED_X: gl.constexpr,
    BYTES_W: gl.constexpr, PDL: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """x_rows: descriptor of [G*T, K]; w_rows: of [G*R, K]; scale_rows: of all token scales, flat; out: of [T, G*R]."""
    TOKENS: gl.constexpr = 128
    WEIGHT_ROWS: gl.constexpr = 256
    tiles = Tiles(tiles_count, tokens, blocks_t, ROW_TILES, K_BLOCKS, TOKENS, WEIGHT_ROWS, STAGES, 1)
    scales = WeightScales(w_scales, BYTES_W, PACKED_X)
    x = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, TOKENS, BLOCK], x_rows.layout)
    w = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, WEIGHT_ROWS, BLOCK], w_rows.layout)
    raw = gl.allocate_shared_memory(scale_rows.dtype, [STAGES, TOKENS], scale_rows.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    staging0 = gl.allocate_shared_memory(out.dtype, [2, ROWS, 64], out.layout)
    staging1 = gl.allocate_shared_memory(out.dtype, [2, ROWS, 64], out.layout)
    fence_async_shared()
    ring = WideRing(x, w, raw, full, empty)
    gl.warp_specialize(
        [
            (wide_consumer, (ring, staging0, tiles, scales, out, 0, PDL)),
            (wide_consumer, (ring, staging1, tiles, scales, out, 1, PDL)),
            (producer, (x_rows, w_rows, scale_rows, ring, tiles, padded, PACKED_X, PDL, False)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
