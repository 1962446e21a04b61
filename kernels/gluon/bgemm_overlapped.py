# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"
"""Grouped FP8 GEMM for many tokens: tiles of 128 tokens x 128 weight rows, products and promotion overlapped.

As in :mod:`.bgemm_kernel` a producer streams blocks of K and two consumer warpgroups own 64 tokens each. What differs:
a consumer queues the products of the next block, into a second accumulator, before it scales and adds those of the last
one: the tensor cores do not wait for it. An accumulator cannot be in flight from one turn of a loop to the
following (ptxas serialises all products then, warning C7514), so a turn takes UNROLL blocks and only its last promotion
is exposed. A finished tile leaves through shared memory and TMA while the next one is multiplied.
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

TILE = gl.constexpr(128)  # tokens, and weight rows
ACCUMULATOR = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))


@aggregate
class Stages:
    """Stages of operands, as the producer fills them: x and w [STAGES, 128, 128], scales [STAGES, 128], barriers."""

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
def start(ring, t, stage, phase, WHICH: gl.constexpr):
    """Queue the products of the block in `stage`, which overwrite t[64 tokens, 128 rows]."""
    mbarrier.wait(ring.full.index(stage), phase)
    x = ring.x.index(stage).slice(WHICH * ROWS, ROWS)
    return warpgroup_mma(x, ring.w.index(stage).permute((1, 0)), t, use_acc=False, is_async=True)


@gluon.jit
def promote(ring, scales, acc, t, w, block, stage, WHICH: gl.constexpr):
    """acc + t times both scales of the block in `stage`, which is released."""
    x = ring.scales.index(stage).slice(WHICH * ROWS, ROWS).load(gl.SliceLayout(1, ACCUMULATOR))
    factor = scales.product(x, w, block)
    mbarrier.arrive(ring.empty.index(stage))
    return pin(acc + t * gl.expand_dims(factor, 1))


@gluon.jit
def store_tile(acc, staging, out, token, column):
    """Hand acc[64 tokens, 128 rows] to TMA, which writes it to out[token.., column..] later. staging [2, 64, 64]."""
    left, right = gl.split(gl.permute(gl.reshape(acc, [ROWS, 2, 64]), (0, 2, 1)))
    tma.store_wait(0)  # the last tile has left the buffer
    gl.thread_barrier()
    staging.index(0).store(left.to(out.dtype))
    staging.index(1).store(right.to(out.dtype))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(out, [token, column], staging.index(0))
    tma.async_copy_shared_to_global(out, [token, column + 64], staging.index(1))


@gluon.jit
def consumer(ring, staging, tiles, scales, out, WHICH: gl.constexpr, UNROLL: gl.constexpr, PDL: gl.constexpr):
    """Tokens 64 * WHICH to 64 * WHICH + 63 of every tile."""
    if PDL:
        gdc_wait()
    width: gl.constexpr = tiles.ROW_TILES * tiles.WEIGHT_ROWS
    stage = gl.program_id(0) * 0
    phase = stage
    for tile in range(gl.program_id(0), tiles.count, gl.num_programs(0)):
        group, first, row_tile = tiles.place(tile)
        acc = gl.zeros([ROWS, TILE], gl.float32, ACCUMULATOR)
        even = gl.zeros([ROWS, TILE], gl.float32, ACCUMULATOR)
        odd = gl.zeros([ROWS, TILE], gl.float32, ACCUMULATOR)
        for k in range(0, tiles.K_BLOCKS, UNROLL):
            even = start(ring, even, stage, phase, WHICH)
            w_even = scales.load(tiles, group, row_tile, k)
            for i in gl.static_range(0, UNROLL, 2):
                stage_odd, phase_odd = tiles.following(stage, phase)
                odd = start(ring, odd, stage_odd, phase_odd, WHICH)
                w_odd = scales.load(tiles, group, row_tile, k + i + 1)
                even = warpgroup_mma_wait(1, deps=[even])
                acc = promote(ring, scales, acc, even, w_even, k + i, stage, WHICH)
                stage, phase = tiles.following(stage_odd, phase_odd)
                if i + 2 < UNROLL:
                    even = start(ring, even, stage, phase, WHICH)
                    w_even = scales.load(tiles, group, row_tile, k + i + 2)
                    odd = warpgroup_mma_wait(1, deps=[odd])
                else:
                    odd = warpgroup_mma_wait(0, deps=[odd])
                acc = promote(ring, scales, acc, odd, w_odd, k + i + 1, stage_odd, WHICH)
        store_tile(acc, staging, out, first + WHICH * ROWS, group * width + row_tile * tiles.WEIGHT_ROWS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles_count", "tokens", "blocks_t", "padded", "early"])
def overlapped_bgemm_kernel(
    x_rows, w_rows, scale_rows, w_scales, out, tiles_count, tokens, blocks_t, padded, early,
    ROW_TILES: gl.constexpr, K_BLOCKS: gl.constexpr, STAGES: gl.constexpr, UNROLL: gl.constexpr,
    PACKED_X: gl.constexpr, BYTES_W: gl.constexpr, PDL: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Descriptors: x_rows [G*T, K], w_rows [G*R, K], scale_rows of all token scales, flat, out [T, G*R]; K_BLOCKS is a
    multiple of UNROLL, which is even."""
    tiles = Tiles(tiles_count, tokens, blocks_t, ROW_TILES, K_BLOCKS, TILE, TILE, STAGES, 1)
    scales = WeightScales(w_scales, BYTES_W, PACKED_X)
    x = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, TILE, BLOCK], x_rows.layout)
    w = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, TILE, BLOCK], w_rows.layout)
    raw = gl.allocate_shared_memory(scale_rows.dtype, [STAGES, TILE], scale_rows.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    staging0 = gl.allocate_shared_memory(out.dtype, [2, ROWS, 64], out.layout)
    staging1 = gl.allocate_shared_memory(out.dtype, [2, ROWS, 64], out.layout)
    fence_async_shared()
    ring = Stages(x, w, raw, full, empty)
    gl.warp_specialize(
        [
            (consumer, (ring, staging0, tiles, scales, out, 0, UNROLL, PDL)),
            (consumer, (ring, staging1, tiles, scales, out, 1, UNROLL, PDL)),
            (producer, (x_rows, w_rows, scale_rows, ring, tiles, padded, early, PACKED_X, PDL)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
