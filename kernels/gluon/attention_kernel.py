# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"
"""Persistent warp-specialised attention for Hopper: one latent per key used as K and V, head_dim 512.

Three warpgroups per CTA, one CTA per SM, each walking through the jobs (token, 64 heads, share of the keys):

- `producer` (attention_rows.py) gathers key rows: 64 keys (a tile) in four chunks of 128 columns, two tiles (a pair)
  ahead. Over FP8 pages there are two warpgroups in its place, which decode the rows (attention_pages.py).
- `consumer_left` computes the scores of the first tile of each pair and owns output columns 0..255.
- `consumer_right` computes the scores of the second tile and owns columns 256..511.

Both need both tiles' probabilities: each keeps its own in registers and reads the other's from shared memory. The
running maximum is shared (left's enters right's and comes back), the two partial denominators meet once at the end. The
scores of the two tiles are ordered (barrier `turn`), so that the softmax of one warpgroup hides behind the matrix
products of the other, and each chunk is released as soon as its last product is done.

Chunk order within a tile is 0, 2, 1, 3 (left's first, right's first, left's second, right's second), for the loads and
for the score products alike. A barrier's parity is the running number of pairs (or jobs) of this CTA, modulo 2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from . import cluster
from .attention_epilogue import Output
from .attention_pages import Pages, pages_producer
from .attention_pairs import finish_job
from .attention_rows import producer
from .attention_shared import RELEASE_FIRST, RELEASE_LAST, RELEASE_LOADED, WAIT_FIRST, WAIT_LAST, allocate_shared
from .hopper import (
    COLUMNS,
    EPILOGUE_PARTIAL,
    LAZY,
    OUTPUT,
    PROBABILITIES,
    SCORES,
    START_MAX,
    TILE,
    Jobs,
    Keys,
    exp2_approx,
    pin,
    rescale,
)


@gluon.jit
def softmax_step(s, term, maximum, scale):
    """(new reference point in log2 units, probabilities) of one tile's scores s[64 heads, 64 keys].

    The reference point is the running maximum, or an older one not more than LAZY below it.
    """
    s = s * scale + gl.expand_dims(term, 0)
    new = gl.maximum(maximum, gl.max(s, 1))
    new = gl.where(new > maximum + LAZY, new, maximum)
    return new, exp2_approx(s - gl.expand_dims(new, 1))


@gluon.jit
def key_chunk(sh, CHUNK: gl.constexpr, z):
    """A chunk's buffer [64 keys, 128 columns]."""
    return sh.k.index(z + CHUNK)


@gluon.jit
def scores_chunk(sh, s, z, parity, TILE_OF_PAIR: gl.constexpr, CHUNK: gl.constexpr):
    """Queue q_chunk @ k_chunk^T onto s, once the chunk has arrived; the first chunk of the order overwrites s.

    `z` is an opaque zero: with constant buffer indices the compiler would keep some hundred wgmma descriptors alive
    over the loop and spill a kilobyte of registers per thread.
    """
    mbarrier.wait(sh.full[TILE_OF_PAIR * 4 + CHUNK], parity)
    k = key_chunk(sh, TILE_OF_PAIR * 4 + CHUNK, z).permute((1, 0))
    return warpgroup_mma(sh.q[CHUNK].index(z), k, s, use_acc=CHUNK != 0, is_async=True)


@gluon.jit
def load_term(sh, parity, TILE_OF_PAIR: gl.constexpr):
    """Additive scores of a tile's keys, which the producer leaves in shared memory."""
    mbarrier.wait(sh.terms_ready[TILE_OF_PAIR], parity)
    return sh.terms.index(TILE_OF_PAIR).load(gl.SliceLayout(0, SCORES))


@gluon.jit
def left_second(sh, last, parity, z, s, term, m0, l, oa, ob, tb, OUTSTANDING: gl.constexpr):
    """The pair's second tile for consumer_left, whose products with the first (`tb`) are on their way."""
    mbarrier.wait(sh.p_ready[1], parity)
    m = sh.stats[1].load(gl.SliceLayout(1, SCORES))
    factor = exp2_approx(m0 - m)
    l = l * factor
    oa = rescale(oa, factor)
    ta = warpgroup_mma(sh.p[1].index(z), key_chunk(sh, 4, z), oa, is_async=True)
    ob = warpgroup_mma_wait(1, deps=[tb])
    mbarrier.arrive(sh.empty[1])
    ob = rescale(ob, factor)
    tb = warpgroup_mma(sh.p[1].index(z), key_chunk(sh, 5, z), ob, is_async=True)
    oa = warpgroup_mma_wait(1, deps=[ta])
    mbarrier.arrive(sh.empty[4])
    if not last:
        t = gl.zeros([TILE, TILE], gl.float32, SCORES)
        t = scores_chunk(sh, t, z, parity ^ 1, 0, 0)
        ob = warpgroup_mma_wait(1, deps=[tb])
        mbarrier.arrive(sh.empty[5])
        t = scores_chunk(sh, t, z, parity ^ 1, 0, 2)
        t = scores_chunk(sh, t, z, parity ^ 1, 0, 1)
        t = scores_chunk(sh, t, z, parity ^ 1, 0, 3)
        term = load_term(sh, parity ^ 1, 0)
        mbarrier.wait(sh.empty[3], parity)  # the other warpgroup has read this one's probabilities
        t = warpgroup_mma_wait(OUTSTANDING, deps=[t])
        mbarrier.arrive(sh.turn)
        s = warpgroup_mma_wait(0, deps=[t])
    else:
        ob = warpgroup_mma_wait(0, deps=[tb])
        mbarrier.arrive(sh.empty[5])
    return s, term, m, l, oa, ob


@gluon.jit
def left_pair(sh, j, last, absent, parity, s, term, m, l, oa, ob, scale, OUTSTANDING: gl.constexpr):
    """One pair of tiles for consumer_left: enters with its scores complete and, unless last, leaves with the next.

    absent: the pair is the job's last and has no second tile. Every barrier counts it all the same.
    """
    z = j >> 30
    m0, p = softmax_step(s, term, m, scale)
    factor = exp2_approx(m - m0)
    pb = p.to(gl.bfloat16)
    sh.p[0].index(0).store(pb)
    sh.stats[0].store(m0)
    fence_async_shared()
    mbarrier.arrive(sh.p_ready[0])
    l = l * factor + gl.sum(p, 1)
    operand = gl.convert_layout(pb, PROBABILITIES)
    oa = rescale(oa, factor)
    ta = warpgroup_mma(operand, key_chunk(sh, 0, z), oa, is_async=True)
    ob = rescale(ob, factor)
    tb = warpgroup_mma(operand, key_chunk(sh, 1, z), ob, is_async=True)
    oa = warpgroup_mma_wait(1, deps=[ta])
    mbarrier.arrive(sh.empty[0])
    if absent:
        ob = warpgroup_mma_wait(0, deps=[tb])
        mbarrier.arrive(sh.empty[1])
        mbarrier.wait(sh.full[4], parity)
        mbarrier.wait(sh.full[5], parity)
        mbarrier.wait(sh.p_ready[1], parity)
        mbarrier.arrive(sh.empty[4])
        mbarrier.arrive(sh.empty[5])
        m = m0
    else:
        s, term, m, l, oa, ob = left_second(sh, last, parity, z, s, term, m0, l, oa, ob, tb, OUTSTANDING)
    return s, term, m, l, oa, ob


@gluon.jit
def consumer_left(sh, keys, jobs, output, meeting, scale, OUTSTANDING: gl.constexpr):
    """Scores of each pair's first tile; output columns 0..255."""
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    if jobs.PAIRED:
        cluster.announce()
    done = 0  # pairs finished by this CTA
    turn = 0  # jobs finished by this CTA
    for job in range(gl.program_id(0), jobs.count, gl.num_programs(0)):
        block, split, list_row, token = jobs.place(job)
        first, count0, count1 = keys.counts(token, list_row)
        low, end, pairs = jobs.share(split, count0, count1)
        odd = end - low < 2 * pairs  # the last pair has no second tile
        z = job >> 30
        parity = done & 1
        m = gl.full([TILE], START_MAX, gl.float32, ROWS)
        l = gl.zeros([TILE], gl.float32, ROWS)
        oa = gl.zeros([TILE, COLUMNS], gl.float32, OUTPUT)
        ob = gl.zeros([TILE, COLUMNS], gl.float32, OUTPUT)
        mbarrier.wait(sh.q_full, turn & 1)
        t = gl.zeros([TILE, TILE], gl.float32, SCORES)
        t = scores_chunk(sh, t, z, parity, 0, 0)
        t = scores_chunk(sh, t, z, parity, 0, 2)
        t = scores_chunk(sh, t, z, parity, 0, 1)
        t = scores_chunk(sh, t, z, parity, 0, 3)
        term = load_term(sh, parity, 0)
        mbarrier.arrive(sh.turn)
        s = warpgroup_mma_wait(0, deps=[t])
        for j in range(0, pairs):
            parity = (done + j) & 1
            last = j + 1 == pairs
            absent = last & odd
            mbarrier.arrive(sh.q_empty, pred=last)
            s, term, m, l, oa, ob = left_pair(sh, j, last, absent, parity, s, term, m, l, oa, ob, scale, OUTSTANDING)
        sink = output.load_sink(block)
        sh.stats[2].store(l)
        mbarrier.arrive(sh.sum_ready[0])
        mbarrier.wait(sh.sum_ready[1], turn & 1)
        sums = l + sh.stats[3].load(ROWS)
        mbarrier.wait(sh.empty[3], parity)  # the staging buffer (own probabilities) is free
        finish_job(output, meeting, oa, ob, sums, m, sink, (), sh.p[0], jobs, (block, token, split, list_row), 0)
        done += pairs
        turn += 1


@gluon.jit
def right_pair(sh, j, last, parity, m, l, oa, ob, scale):
    """One pair of tiles for consumer_right."""
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    z = j >> 30
    t = gl.zeros([TILE, TILE], gl.float32, SCORES)
    t = scores_chunk(sh, t, z, parity, 1, 0)
    t = scores_chunk(sh, t, z, parity, 1, 2)
    t = scores_chunk(sh, t, z, parity, 1, 1)
    t = scores_chunk(sh, t, z, parity, 1, 3)
    term = load_term(sh, parity, 1)
    # the other warpgroup's tile, queued behind the own scores
    mbarrier.wait(sh.p_ready[0], parity)
    m0 = sh.stats[0].load(ROWS)
    before = exp2_approx(m - m0)
    oa = rescale(oa, before)
    ob = rescale(ob, before)
    ta = warpgroup_mma(sh.p[0].index(z), key_chunk(sh, 2, z), oa, is_async=True)
    tb = warpgroup_mma(sh.p[0].index(z), key_chunk(sh, 3, z), ob, is_async=True)
    s = warpgroup_mma_wait(2, deps=[t])
    mbarrier.arrive(sh.q_empty, pred=last)
    m, p = softmax_step(s, term, m0, scale)
    after = exp2_approx(m0 - m)
    pb = p.to(gl.bfloat16)
    mbarrier.wait(sh.empty[5], parity ^ 1)  # the other warpgroup has read the last pair's probabilities
    sh.p[1].index(0).store(pb)
    sh.stats[1].store(m)
    fence_async_shared()
    mbarrier.arrive(sh.p_ready[1])
    l = l * (before * after) + gl.sum(p, 1)
    operand = gl.convert_layout(pb, PROBABILITIES)
    oa = warpgroup_mma_wait(1, deps=[ta])
    mbarrier.arrive(sh.empty[2])
    oa = rescale(oa, after)
    ta = warpgroup_mma(operand, key_chunk(sh, 6, z), oa, is_async=True)
    ob = warpgroup_mma_wait(1, deps=[tb])
    mbarrier.arrive(sh.empty[3])
    ob = rescale(ob, after)
    tb = warpgroup_mma(operand, key_chunk(sh, 7, z), ob, is_async=True)
    oa = warpgroup_mma_wait(1, deps=[ta])
    mbarrier.arrive(sh.empty[6])
    ob = warpgroup_mma_wait(0, deps=[tb])
    mbarrier.arrive(sh.empty[7])
    return m, l, pin(oa), pin(ob)


@gluon.jit
def right_first(sh, j, parity, m, l, oa, ob):
    """A pair without a second tile for consumer_right, always a job's last: only the other warpgroup's tile."""
    z = j >> 30
    mbarrier.arrive(sh.q_empty)
    mbarrier.wait(sh.p_ready[0], parity)
    m0 = sh.stats[0].load(gl.SliceLayout(1, SCORES))
    before = exp2_approx(m - m0)
    l = l * before
    oa = rescale(oa, before)
    ob = rescale(ob, before)
    ta = warpgroup_mma(sh.p[0].index(z), key_chunk(sh, 2, z), oa, is_async=True)
    tb = warpgroup_mma(sh.p[0].index(z), key_chunk(sh, 3, z), ob, is_async=True)
    mbarrier.arrive(sh.p_ready[1])
    mbarrier.wait(sh.full[6], parity)
    mbarrier.wait(sh.full[7], parity)
    mbarrier.arrive(sh.empty[6])
    mbarrier.arrive(sh.empty[7])
    oa = warpgroup_mma_wait(1, deps=[ta])
    mbarrier.arrive(sh.empty[2])
    ob = warpgroup_mma_wait(0, deps=[tb])
    mbarrier.arrive(sh.empty[3])
    return m0, l, pin(oa), pin(ob)


@gluon.jit
def consumer_right(sh, keys, jobs, output, meeting, scale, release):
    """Scores of each pair's second tile; output columns 256..511."""
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    if jobs.PAIRED:
        cluster.announce()
    done = 0
    turn = 0
    for job in range(gl.program_id(0), jobs.count, gl.num_programs(0)):
        block, split, list_row, token = jobs.place(job)
        first, count0, count1 = keys.counts(token, list_row)
        low, end, pairs = jobs.share(split, count0, count1)
        odd = end - low < 2 * pairs
        m = gl.full([TILE], START_MAX, gl.float32, ROWS)
        l = gl.zeros([TILE], gl.float32, ROWS)
        oa = gl.zeros([TILE, COLUMNS], gl.float32, OUTPUT)
        ob = gl.zeros([TILE, COLUMNS], gl.float32, OUTPUT)
        for j in range(0, pairs):
            parity = (done + j) & 1
            last = j + 1 == pairs
            mbarrier.wait(sh.q_full, turn & 1)
            if release == RELEASE_LOADED:  # more than once does no harm
                gdc_launch_dependents()
            mbarrier.wait(sh.turn, parity)
            if last & odd:
                m, l, oa, ob = right_first(sh, j, parity, m, l, oa, ob)
            else:
                m, l, oa, ob = right_pair(sh, j, last, parity, m, l, oa, ob, scale)
        if release == RELEASE_LAST:
            gdc_launch_dependents()
        sink = output.load_sink(block)
        rope = output.load_rope(token)
        sh.stats[3].store(l)
        mbarrier.arrive(sh.sum_ready[1])
        mbarrier.wait(sh.sum_ready[0], turn & 1)
        sums = l + sh.stats[2].load(ROWS)
        mbarrier.wait(sh.empty[5], (done + pairs - 1) & 1)
        finish_job(output, meeting, oa, ob, sums, m, sink, rope, sh.p[1], jobs, (block, token, split, list_row), 1)
        done += pairs
        turn += 1


RUNTIME_INTEGERS = [
    "jobs_count", "tokens", "first", "token0", "splits", "rows0", "rows1", "index_stride0",
    "index_stride1", "width0", "width1", "page_stride0", "page_stride1", "queries", "window", "causal",
    "q_batch_stride", "q_token_stride",
    "q_head_stride", "rope_period", "total", "origin", "padded", "wait", "release", "scale", "floor",
]  # fmt: skip


@gluon.jit(do_not_specialize=RUNTIME_INTEGERS)
def attention_kernel(
    q, kv0, kv1, index0, index1, length0, length1, bias, sink, cos, sin, out, scales, lse, shares, share_lse,
    scale, floor, jobs_count, tokens, first, token0, splits, rows0, rows1, index_stride0, index_stride1,
    width0, width1, page_stride0, page_stride1, queries, window, causal, q_batch_stride, q_token_stride, q_head_stride,
    rope_period, total, origin, padded, wait, release,
    HEADS: gl.constexpr, PER_GROUP: gl.constexpr, HALF: gl.constexpr, FORM: gl.constexpr, POOLS: gl.constexpr,
    HAS_LENGTH0: gl.constexpr, HAS_LENGTH1: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_SINK: gl.constexpr,
    BATCHED_KV: gl.constexpr, STRIDE0: gl.constexpr, STRIDE1: gl.constexpr, EPILOGUE: gl.constexpr,
    BLOCK: gl.constexpr, POWER_OF_TWO: gl.constexpr, PACKED: gl.constexpr, BATCHED: gl.constexpr,
    ROPE_SHARED: gl.constexpr, PAGED: gl.constexpr, AHEAD: gl.constexpr, PAIRED: gl.constexpr,
    OUTSTANDING: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """See the module; `launch` in attention.py documents and checks the arguments. `scale` includes log2(e)."""
    keys = Keys(
        kv0, kv1, rows0, rows1, index0, index1, index_stride0, index_stride1, width0, width1,
        length0, length1, bias, queries, window, causal, FORM, POOLS, HAS_LENGTH0, HAS_LENGTH1, HAS_BIAS, BATCHED_KV,
        STRIDE0, STRIDE1,
    )  # fmt: skip
    SPLIT: gl.constexpr = PAIRED or EPILOGUE == EPILOGUE_PARTIAL
    jobs = Jobs(jobs_count, tokens, first, token0, splits, HEADS, SPLIT, PAIRED)
    output = Output(
        out, scales, lse, sink, cos, sin, rope_period, total, origin, padded, floor,
        HEADS, PER_GROUP, HALF, EPILOGUE, BLOCK, POWER_OF_TWO, PACKED, HAS_SINK, ROPE_SHARED,
    )  # fmt: skip
    meeting = (shares, share_lse)
    if wait == WAIT_FIRST:
        gdc_wait()
    if release == RELEASE_FIRST:
        gdc_launch_dependents()
    sh = allocate_shared(PAGED)
    if PAIRED:
        cluster.init_barrier(0, 4)
        cluster.init_barrier(1, 4)
    q_strides = (q_batch_stride, q_token_stride, q_head_stride)
    if PAGED:
        pages = Pages(
            kv0.to(gl.pointer_type(gl.int32), bitcast=True), kv1.to(gl.pointer_type(gl.int32), bitcast=True),
            page_stride0, page_stride1, STRIDE0, STRIDE1,
        )  # fmt: skip
        gl.warp_specialize(
            [
                (consumer_right, (sh, keys, jobs, output, meeting, scale, release)),
                (consumer_left, (sh, keys, jobs, output, meeting, scale, OUTSTANDING)),
                (pages_producer, (sh, keys, pages, jobs, q, q_strides, BATCHED, AHEAD, 0)),
                (pages_producer, (sh, keys, pages, jobs, q, q_strides, BATCHED, AHEAD, 1)),
            ],
            [4, 4, 4],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consumer_right, (sh, keys, jobs, output, meeting, scale, release)),
                (consumer_left, (sh, keys, jobs, output, meeting, scale, OUTSTANDING)),
                (producer, (sh, keys, jobs, q, q_strides, BATCHED)),
            ],
            [4, 4],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    if wait == WAIT_LAST:  # or this kernel could be done, and let others go on, before the one that it runs beside is
        gdc_wait()
