# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"
"""The producer of the Hopper attention that copies bf16 rows with cp.async."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from . import cluster
from .attention_shared import ROWS_OF_16_BYTES, load_q
from .hopper import COLUMNS, TILE, pin_int


@gluon.jit
def gather_chunk(sh, pointers, valid, parity, half, CHUNK: gl.constexpr):
    """Refill one chunk of tile `half` of the pair once it is free. Invalid keys get zeros and read nothing, so that no
    pool's content can leak."""
    mbarrier.wait(sh.empty[CHUNK], parity, pred=half == 0)
    mbarrier.wait(sh.empty[4 + CHUNK], parity, pred=half != 0)
    async_copy.async_copy_global_to_shared(sh.k.index(half * 4 + CHUNK), pointers + COLUMNS * CHUNK, mask=valid)
    if half == 0:
        async_copy.mbarrier_arrive(sh.full[CHUNK], increment_count=False)
    else:
        async_copy.mbarrier_arrive(sh.full[4 + CHUNK], increment_count=False)


@gluon.jit
def producer(sh, keys, jobs, q, q_strides, BATCHED: gl.constexpr):
    """Load q and the key rows of every job, as far ahead as the buffers allow."""
    if jobs.PAIRED:
        cluster.announce()
    lane = gl.arange(0, TILE, gl.SliceLayout(1, ROWS_OF_16_BYTES))
    column = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, ROWS_OF_16_BYTES)), 0)
    done = 0
    turn = 0
    for job in range(gl.program_id(0), jobs.count, gl.num_programs(0)):
        block, split, list_row, token = jobs.place(job)
        first, count0, count1 = keys.counts(token, list_row)
        low, end, pairs = jobs.share(split, count0, count1)
        index = keys.load_tile(low, end, lane, list_row, first, count0, count1)
        load_q(sh, jobs, keys, q, q_strides, block, token, turn, BATCHED)
        for j in range(0, pairs):
            parity = (done & 1) ^ 1
            for half in range(2):
                tile = low + 2 * j + half
                index = pin_int(index)
                valid = keys.valid(index, tile, count0)
                term = keys.term(valid, tile, lane, list_row, count0)
                pointers = gl.expand_dims(keys.locate(index, tile, count0), 1) + column
                mask = gl.expand_dims(valid, 1)
                index = keys.load_tile(tile + 1, end, lane, list_row, first, count0, count1)
                gather_chunk(sh, pointers, mask, parity, half, 0)
                sh.terms.index(half).store(term)
                mbarrier.arrive(sh.terms_ready[0], pred=half == 0)
                mbarrier.arrive(sh.terms_ready[1], pred=half != 0)
                gather_chunk(sh, pointers, mask, parity, half, 2)
                gather_chunk(sh, pointers, mask, parity, half, 1)
                gather_chunk(sh, pointers, mask, parity, half, 3)
            done += 1
        turn += 1
