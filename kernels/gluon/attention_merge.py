# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"
"""Merging a token's few shares inside the attention kernel, instead of a kernel of its own behind it.

The last share's CTA keeps its accumulators. The others write theirs, normalised and in bf16, and raise a flag; the last
one waits for the flag, adds them in the order of the shares (so that results do not depend on who was first) and
finishes the row. Left and right warpgroups do this for their own columns, each with its own flag and its own copy of
the log-sum-exp.

Nobody waits in vain: jobs of earlier shares have smaller numbers, one CTA each (the launcher sees to it), and CTAs
start in that order. The flags are zero when the kernel starts.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .hopper import COLUMNS, OUTPUT, SCORES, TILE, exp2_approx, per_row, pin_int

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
    """Add 1 once everything that this warpgroup has written is visible to the GPU."""
    gl.thread_barrier()
    gl.atomic_add(flag, 1, sem="acq_rel", scope="gpu")


@gluon.jit
def wait_for_flag(flag, value):
    """Return once the flag has reached `value`; what was written before is visible to the warpgroup then.

    With pauses: the word is far away, and several hundred threads asking for it delay the one who writes it.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; WAIT: ld.acquire.gpu.global.u32 $0, [$1]; setp.lt.u32 p, $0, $2; @p nanosleep.u32 100; "
        "@p bra WAIT; }",
        "=&r,l,r",
        [flag, value],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    gl.thread_barrier()


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
def hand_over(shares, flag, oa, ob, sums, m, place):
    """Write a share's columns and log-sum-exp (log2 units) and raise the flag."""
    out, lse = shares
    inverse = per_row(1.0 / gl.maximum(sums, 1e-30))
    gl.store(piece_pointers(out, place * 2), in_pieces((oa * inverse).to(gl.bfloat16)))
    gl.store(piece_pointers(out, place * 2 + 1), in_pieces((ob * inverse).to(gl.bfloat16)))
    row = gl.arange(0, TILE, gl.SliceLayout(1, SCORES))
    gl.store(lse + place * TILE + row, m + gl.log2(sums))
    raise_flag(flag)


@gluon.jit
def add_chunk(x, out, place, weight):
    """x[64, 128] plus weight[64] times chunk number `place` of the workspace."""
    other = gl.load(piece_pointers(out, place))
    return x + from_pieces(other).to(gl.float32) * per_row(weight)


@gluon.jit
def take_in(shares, flag, oa, ob, sums, m, place, step, splits):
    """(accumulators, denominators, reference points) of all shares: the own ones plus what `hand_over` left."""
    out, lse = shares
    wait_for_flag(flag, splits - 1)
    place = pin_int(place)  # or what follows from it is computed before the loops over the keys, and spilled there
    row = gl.arange(0, TILE, gl.SliceLayout(1, SCORES))
    for _ in range(0, splits - 1):
        other = gl.load(lse + place * TILE + row)
        new = gl.maximum(m, other)
        keep = exp2_approx(m - new)
        weight = exp2_approx(other - new)
        oa = add_chunk(oa * per_row(keep), out, place * 2, weight)
        ob = add_chunk(ob * per_row(keep), out, place * 2 + 1, weight)
        sums = sums * keep + weight
        m = new
        place += step
    return oa, ob, sums, m


@gluon.jit
def finish_job(
    output, shares, flags, jobs, oa, ob, sums, m, sink, rope, staging, place,
    HALF_OF_HEAD: gl.constexpr, MERGE: gl.constexpr,
):  # fmt: skip
    """What follows a job's last key: finish the row, or (MERGE) hand a share over, or take the others in before.

    shares: bf16 values [P - 1, rows that are not whole, 2 halves, 2 chunks, 64 * 128] as `piece_pointers` orders them,
    and fp32 log-sum-exps [P - 1, rows, 2 halves, 64].
    """
    block, list_row, token, split, splits = place
    if MERGE:
        blocks: gl.constexpr = (jobs.HEADS + TILE - 1) // TILE
        row = (list_row * blocks + block - jobs.whole) * 2 + HALF_OF_HEAD
        step = (jobs.tokens * blocks - jobs.whole) * 2
        if split + 1 < splits:
            hand_over(shares, flags + row, oa, ob, sums, m, split * step + row)
        else:
            if splits > 1:
                oa, ob, sums, m = take_in(shares, flags + row, oa, ob, sums, m, row, step, splits)
            output.finish(oa, ob, sums, m, sink, rope, staging, block, token, split, HALF_OF_HEAD)
    else:
        output.finish(oa, ob, sums, m, sink, rope, staging, block, token, split, HALF_OF_HEAD)
