# SPDX-License-Identifier: Apache-2.0
"""Shared memory and barriers of the Hopper attention."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from .hopper import COLUMNS, TILE, allocate_barrier, allocate_barriers


@aggregate
class Shared:
    """Shared memory and barriers. `full`/`empty` are indexed tile * 4 + chunk."""

    q: gl.tuple  # 4 x [1, 64, 128] bf16
    k: gl.tuple  # 8 x [1, 64, 128] bf16
    p: gl.tuple  # 2 x [2, 64, 64] bf16: probabilities; all of it stages the output
    stats: gl.tuple  # 4 x [64] fp32: maxima of left and right, denominators of left and right
    terms: gl.tuple  # 2 x [64] fp32: additive scores of the pair's tiles, invalid keys included
    full: gl.tuple
    empty: gl.tuple
    terms_ready: gl.tuple
    p_ready: gl.tuple
    sum_ready: gl.tuple
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    turn: gl.shared_memory_descriptor
    k_all: gl.shared_memory_descriptor
    terms_all: gl.shared_memory_descriptor
    ROLLED: gl.constexpr
    ASYNC_ARRIVE: gl.constexpr  # how chunks are released

    @gluon.constexpr_function
    def __init__(
        self,
        q,
        k,
        p,
        stats,
        terms,
        full,
        empty,
        terms_ready,
        p_ready,
        sum_ready,
        q_full,
        q_empty,
        turn,
        k_all,
        terms_all,
        ROLLED,
        ASYNC_ARRIVE,
    ):
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
        self.k_all = k_all
        self.terms_all = terms_all
        self.ROLLED = gl.constexpr(ROLLED)
        self.ASYNC_ARRIVE = gl.constexpr(ASYNC_ARRIVE)


@gluon.jit
def allocate_shared(ASYNC_ARRIVE: gl.constexpr, ROLLED: gl.constexpr, PAGED: gl.constexpr):
    """All of the CTA's shared memory: 64 KiB of q, 128 KiB of keys, 32 KiB of probabilities, statistics, barriers."""
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    q0 = gl.allocate_shared_memory(gl.bfloat16, [1, TILE, COLUMNS], SWIZZLED)
    q1 = gl.allocate_shared_memory(gl.bfloat16, [1, TILE, COLUMNS], SWIZZLED)
    q2 = gl.allocate_shared_memory(gl.bfloat16, [1, TILE, COLUMNS], SWIZZLED)
    q3 = gl.allocate_shared_memory(gl.bfloat16, [1, TILE, COLUMNS], SWIZZLED)
    if ROLLED:
        k_all = gl.allocate_shared_memory(gl.bfloat16, [8, TILE, COLUMNS], SWIZZLED)
        k0 = k_all
        k1 = k_all
        k2 = k_all
        k3 = k_all
        k4 = k_all
        k5 = k_all
        k6 = k_all
        k7 = k_all
    else:
        k0 = gl.allocate_shared_memory(gl.bfloat16, [1, TILE, COLUMNS], SWIZZLED)
        k1 = gl.allocate_shared_memory(gl.bfloat16, [1, TILE, COLUMNS], SWIZZLED)
        k2 = gl.allocate_shared_memory(gl.bfloat16, [1, TILE, COLUMNS], SWIZZLED)
        k3 = gl.allocate_shared_memory(gl.bfloat16, [1, TILE, COLUMNS], SWIZZLED)
        k4 = gl.allocate_shared_memory(gl.bfloat16, [1, TILE, COLUMNS], SWIZZLED)
        k5 = gl.allocate_shared_memory(gl.bfloat16, [1, TILE, COLUMNS], SWIZZLED)
        k6 = gl.allocate_shared_memory(gl.bfloat16, [1, TILE, COLUMNS], SWIZZLED)
        k7 = gl.allocate_shared_memory(gl.bfloat16, [1, TILE, COLUMNS], SWIZZLED)
        k_all = k0
    p0 = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, TILE], SWIZZLED)
    p1 = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, TILE], SWIZZLED)
    s0 = gl.allocate_shared_memory(gl.float32, [TILE], PLAIN)
    s1 = gl.allocate_shared_memory(gl.float32, [TILE], PLAIN)
    s2 = gl.allocate_shared_memory(gl.float32, [TILE], PLAIN)
    s3 = gl.allocate_shared_memory(gl.float32, [TILE], PLAIN)
    if ROLLED:
        t_all = gl.allocate_shared_memory(gl.float32, [2, TILE], PLAIN)
        t0 = t_all.index(0)
        t1 = t_all.index(1)
    else:
        t0 = gl.allocate_shared_memory(gl.float32, [TILE], PLAIN)
        t1 = gl.allocate_shared_memory(gl.float32, [TILE], PLAIN)
        t_all = t0
    threads: gl.constexpr = 128  # every producer thread signals its own copies
    readers: gl.constexpr = threads if ASYNC_ARRIVE else 1
    writers: gl.constexpr = 1 if PAGED else threads
    full = (
        allocate_barrier(writers), allocate_barrier(writers), allocate_barrier(writers), allocate_barrier(writers),
        allocate_barrier(writers), allocate_barrier(writers), allocate_barrier(writers), allocate_barrier(writers),
    )  # fmt: skip
    empty = (
        allocate_barrier(readers), allocate_barrier(readers), allocate_barrier(readers), allocate_barrier(readers),
        allocate_barrier(readers), allocate_barrier(readers), allocate_barrier(readers), allocate_barrier(readers),
    )  # fmt: skip
    terms_ready = (allocate_barrier(1), allocate_barrier(1))
    p_ready = (allocate_barrier(1), allocate_barrier(1))
    sum_ready = (allocate_barrier(1), allocate_barrier(1))
    return Shared(
        (q0, q1, q2, q3), (k0, k1, k2, k3, k4, k5, k6, k7), (p0, p1), (s0, s1, s2, s3), (t0, t1), full, empty,
        terms_ready, p_ready, sum_ready, allocate_barrier(threads), allocate_barrier(2), allocate_barrier(1),
        k_all, t_all, ROLLED, ASYNC_ARRIVE,
    )  # fmt: skip
