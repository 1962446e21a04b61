# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"
"""Two shares of a row's keys that finish the row together, instead of a kernel behind the attention that merges them.

The shares are jobs of two CTAs that run at the same time. Each warpgroup has two chunks of 128 columns. The first
share's finishes its first chunk and sends the other, normalised and in bf16; the second share's does the reverse. So
half of the results go through memory, where a merge behind the kernel reads all of them, and both CTAs work until the
end.

Nobody waits in vain: the two CTAs of a pair are neighbours in the order in which CTAs start, every CTA has one job (the
launcher sees to it), so that of all the pairs of a launch at most one is incomplete at any time, and that one waits for
no more than a multiprocessor that becomes free.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .hopper import COLUMNS, OUTPUT, SCORES, TILE, exp2_approx, per_row

# What a raised flag holds. The word is not cleared before the launch (that would be one more launch): whoever
# has seen it lowers it again, and memory that happens to hold this value is taken to be as impossible as 2**-64.
RAISED = gl.constexpr(0x5B7C19E3A4D2086F)

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
def raise_flag(flag):
    """Write RAISED once everything that this warpgroup has written is visible to the GPU."""
    gl.thread_barrier()
    gl.atomic_xchg(flag, RAISED, sem="acq_rel", scope="gpu")


@gluon.jit
def take_flag(flag):
    """Return once the flag is raised, and lower it; what was written before is visible to the warpgroup then."""
    raised = gl.to_tensor(RAISED)
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u64 word; WAIT: ld.acquire.gpu.global.u64 word, [$1]; setp.ne.u64 p, word, $2; "
        "@p nanosleep.u32 20; @p bra WAIT; mov.u32 $0, 0; }",
        "=r,l,l",
        [flag, raised],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    gl.thread_barrier()
    gl.store(flag, raised * 0)


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
def exchange(meeting, oa, ob, sums, m, row, split):
    """(one chunk of all keys' columns, denominators, reference points): the first chunk for share 0, else the second.

    row: number of the warpgroup's row; workspace slot and flag 2 * row + share belong to what that share sends.
    """
    out, lse, flags = meeting
    first = split == 0
    kept = gl.where(first, oa, ob)
    sent = gl.where(first, ob, oa) * per_row(1.0 / gl.maximum(sums, 1e-30))
    own = row * 2 + split
    other = row * 2 + 1 - split
    lane = gl.arange(0, TILE, gl.SliceLayout(1, SCORES))
    gl.store(piece_pointers(out, own), in_pieces(sent.to(gl.bfloat16)))
    gl.store(lse + own * TILE + lane, m + gl.log2(sums))
    raise_flag(flags + own)
    take_flag(flags + other)
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

    meeting: bf16 values [rows, 2 warpgroups, 2 shares, 64 * 128] as `piece_pointers` orders them, fp32 log-sum-exps
    [rows, 2 warpgroups, 2 shares, 64] and flags int64 [rows, 2 warpgroups, 2 shares], of all rows of the launch.
    """
    block, token, split, list_row = place
    if jobs.PAIRED:
        blocks: gl.constexpr = (jobs.HEADS + TILE - 1) // TILE
        row = ((list_row - jobs.first) * blocks + block) * 2 + HALF_OF_HEAD
        x, sums, m = exchange(meeting, oa, ob, sums, m, row, split)
        output.finish_chunk(x, sums, m, sink, rope, staging, block, token, split, HALF_OF_HEAD)
    else:
        output.finish(oa, ob, sums, m, sink, rope, staging, block, token, split, HALF_OF_HEAD)
