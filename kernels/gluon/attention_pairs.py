# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"
"""Two shares of a row's keys that finish the row together, instead of a kernel behind the attention that merges them.

The shares are jobs of two CTAs that run at the same time. Each warpgroup has two chunks of 128 columns. The first
share's finishes its first chunk and sends the other, normalised and in bf16; the second share's does the reverse. So
half of the results go through memory, where a merge behind the kernel reads all of them, and both CTAs work until the
end.

The two CTAs are a cluster: they run at the same time, and tell each other through barriers in shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import cluster
from .hopper import COLUMNS, OUTPUT, SCORES, TILE, exp2_approx, per_row

# An accumulator's chunk [64 rows, 128 columns] as [row, lane of the row's quad, piece, 8 values]: as it lies in the
# registers anyway, up to their numbering, so that each piece leaves and enters as 16 bytes.
PIECES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [8, 0, 0, 0], [0, 0, 1, 0], [0, 0, 2, 0]],
        lane_bases=[[0, 1, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        warp_bases=[[16, 0, 0, 0], [32, 0, 0, 0]],
        block_bases=[],
        shape=[64, 4, 4, 8],
    )
)


@gluon.jit
def in_pieces(x):
    """x[64, 128] in the layout PIECES. Nothing moves between threads."""
    pieces = gl.permute(gl.reshape(x, [TILE, COLUMNS // 8, 4, 2]), (0, 2, 1, 3))
    return gl.convert_layout(gl.reshape(pieces, [TILE, 4, COLUMNS // 32, 8]), PIECES)


@gluon.jit
def from_pieces(x):
    """The inverse of `in_pieces`."""
    columns = gl.permute(gl.reshape(x, [TILE, 4, COLUMNS // 8, 2]), (0, 2, 1, 3))
    return gl.convert_layout(gl.reshape(columns, [TILE, COLUMNS]), OUTPUT)


@gluon.jit
def piece_pointers(out, place):
    """Where chunk number `place` of the workspace is: pieces of neighbouring threads are neighbours."""
    LAYOUT: gl.constexpr = PIECES
    row = gl.arange(0, TILE, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    piece = gl.arange(0, COLUMNS // 32, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))))
    inner = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    offset = gl.expand_dims(gl.expand_dims(gl.expand_dims(row * 32, 1), 2), 3)
    offset += gl.expand_dims(gl.expand_dims(gl.expand_dims(lane * 8, 0), 2), 3)
    offset += gl.expand_dims(gl.expand_dims(gl.expand_dims(piece * (TILE * 32), 0), 1), 3)
    offset += gl.expand_dims(gl.expand_dims(gl.expand_dims(inner, 0), 1), 2)
    return out + place.to(gl.int64) * (TILE * COLUMNS) + offset


@gluon.jit
def add_chunk(x, out, place, weight):
    """x[64, 128] plus weight[64] times chunk number `place` of the workspace."""
    other = gl.load(piece_pointers(out, place))
    return x + from_pieces(other).to(gl.float32) * per_row(weight)


@gluon.jit
def exchange(meeting, oa, ob, sums, m, row, split, HALF_OF_HEAD: gl.constexpr):
    """(one chunk of all keys' columns, denominators, reference points): the first chunk for share 0, else the second.

    row: number of the warpgroup's row; workspace slot 2 * row + share belongs to what that share sends.
    """
    out, lse = meeting
    first = split == 0
    kept = gl.where(first, oa, ob)
    sent = gl.where(first, ob, oa) * per_row(1.0 / gl.maximum(sums, 1e-30))
    own = row * 2 + split
    other = row * 2 + 1 - split
    lane = gl.arange(0, TILE, gl.SliceLayout(1, SCORES))
    gl.store(piece_pointers(out, own), in_pieces(sent.to(gl.bfloat16)))
    gl.store(lse + own * TILE + lane, m + gl.log2(sums))
    cluster.meet(HALF_OF_HEAD)
    theirs = gl.load(lse + other * TILE + lane)
    new = gl.maximum(m, theirs)
    keep = exp2_approx(m - new)
    weight = exp2_approx(theirs - new)
    kept = add_chunk(kept * per_row(keep), out, other, weight)
    return kept, sums * keep + weight, new


@gluon.jit
def finish_job(
    output, meeting, oa, ob, sums, m, sink, rope, staging, jobs, place, HALF_OF_HEAD: gl.constexpr
):  # fmt: skip
    """What follows a job's last key: finish the warpgroup's columns, or if the job is one of a pair, half of them.

    meeting: bf16 values [rows, 2 warpgroups, 2 shares, 64 * 128] as `piece_pointers` orders them and fp32 log-sum-exps
    [rows, 2 warpgroups, 2 shares, 64], of all rows of the launch.
    """
    block, token, split, list_row = place
    if jobs.PAIRED:
        blocks: gl.constexpr = (jobs.HEADS + TILE - 1) // TILE
        row = ((list_row - jobs.first) * blocks + block) * 2 + HALF_OF_HEAD
        x, sums, m = exchange(meeting, oa, ob, sums, m, row, split, HALF_OF_HEAD)
        output.finish_chunk(x, sums, m, sink, rope, staging, block, token, split, HALF_OF_HEAD)
    else:
        output.finish(oa, ob, sums, m, sink, rope, staging, block, token, split, HALF_OF_HEAD)
