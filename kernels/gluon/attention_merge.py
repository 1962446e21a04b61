# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"
"""Merging a token's few shares inside the attention kernel, instead of a kernel of its own behind it.

The last share's CTA keeps its accumulators. The others write theirs, normalised and in bf16, and raise a flag; the last
one waits for the flag, adds them in the order of the shares (so that results do not depend on who was first) and
finishes the row. Left and right warpgroups do this for their own columns, each with its own flag and its own copy of
the log-sum-exp.

Nobody waits in vain: jobs of earlier shares have smaller numbers, one CTA each (the launcher sees to it), and CTAs
start in that order. A flag is back at zero when the kernel ends, and must be zero when it starts: see flags.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .hopper import COLUMNS, LOG2E, OUTPUT, SCORES, TILE, exp2_approx, per_row


@gluon.jit
def raise_flag(flag):
    """Add 1 once everything that this warpgroup has written is visible to the GPU."""
    gl.thread_barrier()
    gl.atomic_add(flag, 1, sem="acq_rel", scope="gpu")


@gluon.jit
def wait_for_flag(flag, value):
    """Return once the flag has reached `value`; what was written before is visible then."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; WAIT: ld.acquire.gpu.global.u32 $0, [$1]; setp.lt.u32 p, $0, $2; @p bra WAIT; }",
        "=r,l,r",
        [flag, value],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def hand_over(partial, flag, oa, ob, sums, m, sink, staging, block, token, split, splits, HALF_OF_HEAD: gl.constexpr):
    """Write this share's columns and raise the flag. `partial`: an Output of shares; its lse is [2, P, T, H]."""
    copy = split + HALF_OF_HEAD * splits
    inverse = per_row(partial.denominator(sums, m, sink, block, token, copy, True))
    partial.chunk(oa * inverse, staging, block, token, split, HALF_OF_HEAD * 2)
    partial.chunk(ob * inverse, staging, block, token, split, HALF_OF_HEAD * 2 + 1)
    raise_flag(flag)


@gluon.jit
def add_chunk(partial, x, weight, head, token, split, CHUNK: gl.constexpr):
    """x[64, 128] plus weight[64] times a chunk of another share."""
    columns = CHUNK * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, OUTPUT))
    pointer = partial.out + gl.expand_dims(partial.row_offset(head, token, split), 1) + gl.expand_dims(columns, 0)
    other = gl.load(pointer, mask=gl.expand_dims(head < partial.HEADS, 1), other=0.0)
    return x + other.to(gl.float32) * per_row(weight)


@gluon.jit
def take_in(partial, flag, oa, ob, sums, m, block, token, splits, HALF_OF_HEAD: gl.constexpr):
    """(accumulators, denominators, reference points) of all shares: the own ones plus what `hand_over` left."""
    wait_for_flag(flag, splits - 1)
    head = block * TILE + gl.arange(0, TILE, gl.SliceLayout(1, SCORES))
    row = block * TILE + gl.arange(0, TILE, gl.SliceLayout(1, OUTPUT))
    for split in range(0, splits - 1):
        copy = split + HALF_OF_HEAD * splits
        pointer = partial.lse + (copy.to(gl.int64) * partial.total + token) * partial.HEADS + head
        other = gl.load(pointer, mask=head < partial.HEADS, other=float("-inf")) * LOG2E
        new = gl.maximum(m, other)
        keep = exp2_approx(m - new)
        weight = exp2_approx(other - new)
        oa = add_chunk(partial, oa * per_row(keep), weight, row, token, split, HALF_OF_HEAD * 2)
        ob = add_chunk(partial, ob * per_row(keep), weight, row, token, split, HALF_OF_HEAD * 2 + 1)
        sums = sums * keep + weight
        m = new
    gl.thread_barrier()  # every thread has seen the flag
    gl.store(flag, 0)
    return oa, ob, sums, m


@gluon.jit
def finish_job(
    output, partial, flags, jobs, oa, ob, sums, m, sink, rope, staging, place,
    HALF_OF_HEAD: gl.constexpr, MERGE: gl.constexpr,
):  # fmt: skip
    """What follows a job's last key: finish the row, or (MERGE) hand a share over, or take the others in before."""
    block, list_row, token, split, splits = place
    if MERGE:
        blocks: gl.constexpr = (jobs.HEADS + TILE - 1) // TILE
        row = list_row - jobs.whole // blocks  # the workspace has room for the rows that are not whole
        flag = flags + (row * blocks + block) * 2 + HALF_OF_HEAD
        if split + 1 < splits:
            hand_over(partial, flag, oa, ob, sums, m, sink, staging, block, row, split, splits, HALF_OF_HEAD)
        else:
            if splits > 1:
                oa, ob, sums, m = take_in(partial, flag, oa, ob, sums, m, block, row, splits, HALF_OF_HEAD)
            output.finish(oa, ob, sums, m, sink, rope, staging, block, token, split, HALF_OF_HEAD)
    else:
        output.finish(oa, ob, sums, m, sink, rope, staging, block, token, split, HALF_OF_HEAD)
