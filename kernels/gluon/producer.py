# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"
"""What both producers of the Hopper attention do: the copy of a job's queries."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from .hopper import COLUMNS, HEAD_DIM, TILE

@gluon.jit
def load_q(sh, jobs, keys, q, q_strides, block, token, turn, BATCHED: gl.constexpr, WARPS: gl.constexpr):
    """Copy the job's queries once the last job's are no longer needed."""
    ROWS_OF_16_BYTES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
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
