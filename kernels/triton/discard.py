# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"
"""Dropping what a kernel has read for the last time from the L2 cache, before it is written back to memory.

The partials of split attention are written, read once by the merge, and dead. They lie in the L2 cache as modified
lines, and whatever streams through the cache next, the product's weight in the chain, has to push them out to memory:
up to 8 MB, 2 us of an H200's memory bandwidth. ``discard.global.L2`` leaves a line's content undefined and spares that
write.
"""

import torch
import triton
import triton.language as tl

from .interpreter import interpreted

LINE_BYTES = 128


def discarding(partials: torch.Tensor, num_warps: int) -> int:
    """Threads of a program that may discard ``partials`` [P, T, H, D]: an allocation of its own, which starts with a
    line. 0 where rows are not whole lines, or where there is no cache. Slices of rows have 64 channels or more."""
    if interpreted() or partials.shape[-1] * partials.element_size() % LINE_BYTES:
        return 0
    return 32 * num_warps


@triton.jit
def discard_partials(
    partials_ptr,
    row0,
    num_rows,
    d0,
    num_partials,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    LANES: tl.constexpr,
):
    """Discard channels d0 .. d0 + WIDTH of rows row0 .. row0 + ROWS (below num_rows) of every partial.

    partials [num_partials, num_rows, D], rows and the slice in whole lines of 128 bytes, which no other program may
    read. All loads of the program must come before: the barrier makes them complete in every warp. LANES: threads.
    """
    PER_LINE: tl.constexpr = 1024 // partials_ptr.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = WIDTH // PER_LINE
    PER_SLOT: tl.constexpr = ROWS * LINES
    SLOTS: tl.constexpr = LANES // PER_SLOT if LANES > PER_SLOT else 1
    lane = tl.arange(0, PER_SLOT * SLOTS)
    row = row0 + lane % PER_SLOT // LINES
    channel = d0 + lane % LINES * PER_LINE
    tl.debug_barrier()
    for first in tl.range(0, num_partials, SLOTS):
        slot = first + lane // PER_SLOT
        address = partials_ptr + (slot * num_rows + row).to(tl.int64) * D + channel
        inside = (slot < num_partials) & (row < num_rows)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p discard.global.L2 [$1], 128; mov.b32 $0, 0; }",
            "=r,l,r",
            [address.to(tl.int64), inside.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
