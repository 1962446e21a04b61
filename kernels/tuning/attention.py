# SPDX-License-Identifier: Apache-2.0
"""Tiles of the portable attention kernel, by architecture and element size.

A tile is (heads per program, keys per step, warps, pipeline stages). They are limited by registers (the accumulator is
heads x 512 fp32) and shared memory; every row is compiled without spills by ``tests/kernels/test_compile.py``, which is
also how to check a new row. The sm90 rows were measured on an H200 (64 x 64 with 8 warps is the best tile plain Triton
reaches there); the others are chosen by what fits and have not been run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Tile:
    block_h: int
    block_n: int
    num_warps: int
    stages: int


# (element size in bytes, heads per program) -> tile; architectures share a row where shared memory does.
TILES: dict[str, dict[tuple[int, int], Tile]] = {
    "sm90": {
        (2, 64): Tile(64, 64, 8, 2),
        (2, 32): Tile(32, 64, 8, 2),
        (2, 16): Tile(16, 64, 8, 2),
        (4, 16): Tile(16, 16, 8, 2),
    },
    "sm80": {  # 163 KiB of shared memory
        (2, 64): Tile(64, 32, 8, 2),
        (2, 32): Tile(32, 32, 8, 2),
        (2, 16): Tile(16, 32, 4, 2),
        (4, 16): Tile(16, 16, 8, 2),
    },
    "sm86": {  # 99 KiB: sm_86, sm_89, sm_120, sm_121
        (2, 32): Tile(32, 32, 8, 2),
        (2, 16): Tile(16, 32, 4, 2),
        (4, 16): Tile(16, 16, 8, 2),
    },
    "sm100": {
        (2, 64): Tile(64, 32, 8, 2),
        (2, 32): Tile(32, 32, 8, 2),
        (2, 16): Tile(16, 32, 8, 2),
        (4, 16): Tile(16, 16, 8, 2),
    },
}

# Split-KV: never more partials than this; merging more costs what the split gains.
MAX_SPLITS = 64


def architecture(capability: tuple[int, int]) -> str:
    """Row of the tables for a compute capability. Unknown parts get the smallest shared memory, which fits anywhere."""
    major, minor = capability
    if major == 9:
        return "sm90"
    if major == 10:
        return "sm100"
    if (major, minor) in ((8, 0), (8, 7)):
        return "sm80"
    return "sm86"


def tile(capability: tuple[int, int], heads: int, element_size: int) -> Tile:
    """The tile for ``heads`` heads per token and elements of ``element_size`` bytes."""
    rows = {h: t for (size, h), t in TILES[architecture(capability)].items() if size == element_size}
    wanted = next((h for h in sorted(rows) if h >= heads), max(rows))
    return rows[wanted]


def num_splits(tokens: int, head_blocks: int, tiles: int, sm_count: int) -> int:
    """Splits of the keys so that one wave of programs covers the GPU: sm_count / (tokens * head blocks), at most one
    per tile. ``tiles`` counts the capacity (all columns), so that the choice holds under CUDA-graph capture."""
    programs = max(1, tokens * head_blocks)
    return max(1, min(sm_count // programs, tiles, MAX_SPLITS))


@dataclass(frozen=True)
class Plan:
    """Which tokens of a Hopper attention have their keys cut into shares, for a kernel behind it to merge: the last
    `cut` ones, into `splits` each. Fewer than all: they would be a last wave that leaves most of the GPU idle.

    paired: two shares of every token, which finish their rows themselves instead."""

    cut: int
    splits: int
    paired: bool = False


@dataclass(frozen=True)
class Costs:
    """Microseconds of a split Hopper attention, but for what is the same for every number of shares.

    shares: of a share of 1, 2, .. tiles of 64 keys; tile: of each one more. Tiles are worked on two at a time, so an
    odd one costs nearly as much as two. merge: (up to so many rows = tokens x heads, of one share more in the merge
    behind). tail: of a last wave that is cut, beside its shares: two launches more, and company for the other waves.
    """

    shares: tuple[float, ...]
    tile: float
    merge: tuple[tuple[int, float], ...]
    tail: float

    def share(self, tiles: int) -> float:
        """Of a share of ``tiles`` tiles."""
        known = min(tiles, len(self.shares))
        return self.shares[known - 1] + (tiles - known) * self.tile

    def merging(self, rows: int) -> float:
        """Of one share more in the merge of ``rows`` rows."""
        return next((us for limit, us in self.merge if rows <= limit), rows * MERGE_US_PER_ROW)


# Fitted to chains of 1 to 40 tokens, 18 and 10 tiles, each cut into every number of shares (H200): the plan that they
# give is nowhere more than 0.8 us slower than the best of these. A last wave of 1 to 20 tokens of 128 heads was 5 to 14
# us faster cut (pages: 4 to 15), one of 30 tokens 2 us slower (6), one of 2 to 32 tokens of 64 heads never faster.
ROWS_US = Costs((2.8, 3.5, 6.6, 7.1, 9.2, 10.5), 1.75, ((128, 0.02), (256, 0.1), (512, 0.2)), 13.5)
PAGES_US = Costs((2.9, 4.1, 7.6, 8.1, 11.3, 12.5), 2.1, ((128, 0.02), (384, 0.1), (512, 0.25)), 19.0)
MERGE_US_PER_ROW = 0.0005
# Of two shares that finish their rows themselves, over bf16 rows. Over FP8 pages a merge behind the kernel is faster.
PAIR_US = 1.2


def hopper_plan(tokens: int, heads: int, tiles: int, sm_count: int, cut: bool = True, pages: bool = False) -> Plan:
    """How rows (tokens x blocks of 64 heads) with ``tiles`` tiles of keys each share the multiprocessors; no share is
    empty.

    Up to one wave: the keys of all tokens are cut into the number of shares that is expected to be fastest. More: those
    of the tokens of the last wave are, if `cut` allows it and that is expected to be faster than a wave. pages: the
    keys are rows of an FP8 cache.
    """
    blocks = -(-heads // 64)
    waves, left = divmod(tokens * blocks, sm_count)
    last = tokens if not waves else -(-left // blocks)
    if not last or (waves and not cut):
        return Plan(0, 1)
    rows = last * heads
    us = PAGES_US if pages else ROWS_US
    more = us.tail if waves else 0.0

    def cost(splits: int) -> float:
        return us.share(-(-tiles // splits)) + (splits * us.merging(rows) + more if splits > 1 else 0.0)

    most = max(1, min(tiles, sm_count // (last * blocks)))
    splits = min(range(1, most + 1), key=cost)
    if not pages and not waves and most > 1 and us.share(-(-tiles // 2)) + PAIR_US < cost(splits):
        return Plan(tokens, 2, paired=True)
    splits = -(-tiles // -(-tiles // splits))
    return Plan(last, splits) if splits > 1 else Plan(0, 1)


# Hopper: when the kernel behind the attention may be launched: at its start; when every CTA has loaded its queries, its
# first keys being on their way; when every CTA has multiplied its last tile; at its end.
RELEASE_FIRST, RELEASE_LOADED, RELEASE_LAST, RELEASE_NEVER = 1, 3, 2, 0


@dataclass(frozen=True)
class Merging:
    """The merge behind a split Hopper attention: rows per program and warps, or None for the kernel that gives a row a
    program of its own; and when it is let in."""

    tiling: tuple[int, int] | None
    release: int


# (up to so many rows = tokens x heads, at most so many shares, how), measured on an H200 at 64, 128, 256, 512, 1,024,
# 2,048 and 4,096 rows (between 2,113 and 3,071 as before, not measured); nothing else: _SEPARATE. A merge that waits
# beside the attention fills the multiprocessors that are free early, unevenly, so it is let in late unless there are
# few rows (EARLY) or its programs take a multiprocessor each (32 warps).
MERGING = (
    (128, 18, Merging((1, 4), RELEASE_NEVER)),
    (2047, MAX_SPLITS, Merging(None, RELEASE_NEVER)),
    (2112, 4, Merging((16, 32), RELEASE_LAST)),
    (3071, 4, Merging((4, 4), RELEASE_NEVER)),
    (4224, 4, Merging((32, 32), RELEASE_LAST)),
)
_SEPARATE = Merging(None, RELEASE_NEVER)
# Few rows: the merge is let in before the attention ends, and lets in the product, whose first weights are then loaded
# beside the attention: 1 to 2.5 us of a chain over bf16 rows, up to 1 over FP8 pages, whose producers take longer and
# lose more by the company. (up to so many rows, when)
EARLY = ((64, RELEASE_LOADED), (256, RELEASE_FIRST), (896, RELEASE_LOADED))
EARLY_PAGES = ((64, RELEASE_LAST), (128, RELEASE_FIRST), (896, RELEASE_LAST))
# A last wave's shares: the merge of fewer rows may wait on multiprocessors that the other launch has left; that of more
# was 1 to 4 us slower then.
TAIL_EARLY = 512


def hopper_merging(rows: int, splits: int, tail: bool = False, pages: bool = False) -> Merging:
    """How ``splits`` shares of ``rows`` (tokens x heads) are merged. tail: rows of a last wave; pages: keys in FP8."""
    how = next((how for limit, most, how in MERGING if rows <= limit and splits <= most), _SEPARATE)
    if tail:
        return replace(how, release=RELEASE_FIRST if rows < TAIL_EARLY else RELEASE_NEVER)
    early = next((when for limit, when in (EARLY_PAGES if pages else EARLY) if rows <= limit), how.release)
    return replace(how, release=early)
