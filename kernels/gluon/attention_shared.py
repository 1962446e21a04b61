# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"
"""Shared memory and barriers of the Hopper attention, and the copy of a job's queries into it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier
from triton.language.core import _aggregate as aggregate

from .hopper import COLUMNS, HEAD_DIM, TILE, allocate_barrier

# How the producer's threads share a chunk: four rows each keep the loop small, which is what its speed depends on (the
# three warpgroups share one instruction cache).
ROWS_OF_16_BYTES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))

# When a launch waits for the kernel before it, and when it lets the next one be launched (0: not before its end).
WAIT_FIRST = gl.constexpr(1)
WAIT_LAST = gl.constexpr(2)
RELEASE_FIRST = gl.constexpr(1)
RELEASE_LAST = gl.constexpr(2)
RELEASE_LOADED = gl.constexpr(3)


@aggregate
class Shared:
    """Shared memory and barriers. `k` and the barriers `full` and `empty` are indexed tile * 4 + chunk.

    Barriers are allocations of their own: an array of them would cost a barrier of the whole warpgroup per use.
    """

    q: gl.tuple  # 4 x [1, 64, 128] bf16
    k: gl.shared_memory_descriptor  # [8, 64, 128] bf16
    p: gl.tuple  # 2 x [2, 64, 64] bf16: probabilities; all of it stages the output
    stats: gl.tuple  # 4 x [64] fp32: maxima of left and right, denominators of left and right
    terms: gl.shared_memory_descriptor  # [2, 64] fp32: additive scores of the pair's tiles, invalid keys included
    full: gl.tuple
    empty: gl.tuple
    terms_ready: gl.tuple
    p_ready: gl.tuple
    sum_ready: gl.tuple
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    turn: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(
        self, q, k, p, stats, terms, full, empty, terms_ready, p_ready, sum_ready, q_full, q_empty, turn
    ):  # fmt: skip
        self.q = q
        self.k = k
        self.p = p
        self.stats = stats
        self.terms = terms
        self.full = full
        self.empty = empty
        self.terms_ready = terms_ready
        self.p_ready = p_ready
        self.sum_ready = sum_ready
        self.q_full = q_full
        self.q_empty = q_empty
        self.turn = turn


@gluon.jit
def allocate_shared(PAGED: gl.constexpr):
    """All of the CTA's shared memory: 64 KiB of q, 128 KiB of keys, 32 KiB of probabilities, statistics, barriers.

    PAGED: the producers store keys themselves and signal once for all of their threads.
    """
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    q0 = gl.allocate_shared_memory(gl.bfloat16, [1, TILE, COLUMNS], SWIZZLED)
    q1 = gl.allocate_shared_memory(gl.bfloat16, [1, TILE, COLUMNS], SWIZZLED)
    q2 = gl.allocate_shared_memory(gl.bfloat16, [1, TILE, COLUMNS], SWIZZLED)
    q3 = gl.allocate_shared_memory(gl.bfloat16, [1, TILE, COLUMNS], SWIZZLED)
    k = gl.allocate_shared_memory(gl.bfloat16, [8, TILE, COLUMNS], SWIZZLED)
    p0 = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, TILE], SWIZZLED)
    p1 = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, TILE], SWIZZLED)
    s0 = gl.allocate_shared_memory(gl.float32, [TILE], PLAIN)
    s1 = gl.allocate_shared_memory(gl.float32, [TILE], PLAIN)
    s2 = gl.allocate_shared_memory(gl.float32, [TILE], PLAIN)
    s3 = gl.allocate_shared_memory(gl.float32, [TILE], PLAIN)
    terms = gl.allocate_shared_memory(gl.float32, [2, TILE], PLAIN)
    threads: gl.constexpr = 128  # every producer thread signals its own copies
    writers: gl.constexpr = 1 if PAGED else threads
    full = (
        allocate_barrier(writers), allocate_barrier(writers), allocate_barrier(writers), allocate_barrier(writers),
        allocate_barrier(writers), allocate_barrier(writers), allocate_barrier(writers), allocate_barrier(writers),
    )  # fmt: skip
    empty = (
        allocate_barrier(1), allocate_barrier(1), allocate_barrier(1), allocate_barrier(1),
        allocate_barrier(1), allocate_barrier(1), allocate_barrier(1), allocate_barrier(1),
    )  # fmt: skip
    terms_ready = (allocate_barrier(1), allocate_barrier(1))
    p_ready = (allocate_barrier(1), allocate_barrier(1))
    sum_ready = (allocate_barrier(1), allocate_barrier(1))
    return Shared(
        (q0, q1, q2, q3), k, (p0, p1), (s0, s1, s2, s3), terms, full, empty, terms_ready, p_ready, sum_ready,
        allocate_barrier(threads), allocate_barrier(2), allocate_barrier(1),
    )  # fmt: skip


@gluon.jit
def load_q(sh, jobs, keys, q, q_strides, block, token, turn, BATCHED: gl.constexpr):
    """Copy the job's queries once the last job's are no longer needed."""
    lane = gl.arange(0, TILE, gl.SliceLayout(1, ROWS_OF_16_BYTES))
    column = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, ROWS_OF_16_BYTES)), 0)
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
