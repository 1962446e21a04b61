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


# Hopper, microseconds, all from measured chains on an H200.
TILE_US = 1.75  # of a share: one tile of 64 keys
# Of one share more in the merge behind the attention, by tokens x heads; in proportion above the last. That 64 rows
# cost more than 128 is no misprint: 5 shares were 2.6 us faster than 10 there.
SHARE_US = ((64, 0.87), (128, 0.16), (256, 0.3), (512, 0.25))
SHARE_US_PER_ROW = 0.25 / 240
# Of two shares that finish their rows themselves. Not over FP8 pages: 2 us slower there than a merge behind the kernel,
# where 1 to 2.5 us faster over bf16 rows (H200).
PAIR_US = 4.0
# Of a last wave that is cut, beside its shares: two launches more. It separates what was faster cut (2 to 16 rows of 18
# tiles: by 11 to 13 us; 28 rows: by 5) from what was slower (60 rows: by 2; 8 rows of 10 tiles: by up to 1).
TAIL_US = 13.5


def hopper_plan(tokens: int, heads: int, tiles: int, sm_count: int, cut: bool = True, pair: bool = True) -> Plan:
    """How rows (tokens x blocks of 64 heads) with ``tiles`` tiles of keys each share the multiprocessors; no share is
    empty.

    Up to one wave: the keys of all tokens are cut into the number of shares that is expected to be fastest. More: those
    of the tokens of the last wave are, if `cut` allows it and that is expected to be faster than a wave.
    """
    blocks = -(-heads // 64)
    waves, left = divmod(tokens * blocks, sm_count)
    last = tokens if not waves else -(-left // blocks)
    if not last or (waves and not cut):
        return Plan(0, 1)
    rows = last * heads
    per_share = next((us for limit, us in SHARE_US if rows <= limit), rows * SHARE_US_PER_ROW)
    more = TAIL_US if waves else 0.0

    def cost(splits: int) -> float:
        return -(-tiles // splits) * TILE_US + (splits * per_share + more if splits > 1 else 0.0)

    most = max(1, min(tiles, sm_count // (last * blocks)))
    splits = min(range(1, most + 1), key=cost)
    if pair and not waves and most > 1 and -(-tiles // 2) * TILE_US + PAIR_US < cost(splits):
        return Plan(tokens, 2, paired=True)
    splits = -(-tiles // -(-tiles // splits))
    return Plan(last, splits) if splits > 1 else Plan(0, 1)


# Hopper: when the kernel behind the attention may be launched: at its start; when every CTA has multiplied its last
# tile; at its end.
RELEASE_FIRST, RELEASE_LAST, RELEASE_NEVER = 1, 2, 0


@dataclass(frozen=True)
class Merging:
    """The merge behind a split Hopper attention: rows per program and warps, or None for the kernel that gives a row a
    program of its own; and when it is let in."""

    tiling: tuple[int, int] | None
    release: int


# (up to so many rows = tokens x heads, at most so many shares, how), measured on an H200 at 64, 128, 256, 512, 1,024,
# 2,048 and 4,096 rows (between 2,113 and 3,071 as before, not measured); nothing else: _SEPARATE. A merge that waits
# beside the attention fills the multiprocessors that are free early, unevenly, so it is let in late unless it is tiny
# or its programs take a multiprocessor each (32 warps).
MERGING = (
    (128, 18, Merging((1, 4), RELEASE_LAST)),
    (511, MAX_SPLITS, Merging(None, RELEASE_LAST)),
    (2047, MAX_SPLITS, Merging(None, RELEASE_NEVER)),
    (2112, 4, Merging((16, 32), RELEASE_LAST)),
    (3071, 4, Merging((4, 4), RELEASE_NEVER)),
    (4224, 4, Merging((32, 32), RELEASE_LAST)),
)
_SEPARATE = Merging(None, RELEASE_NEVER)
# A last wave's shares: the merge of fewer rows may wait on multiprocessors that the other launch has left; that of more
# was 1 to 4 us slower then.
TAIL_EARLY = 512


def hopper_merging(rows: int, splits: int, tail: bool = False) -> Merging:
    """How ``splits`` shares of ``rows`` (tokens x heads) are merged. tail: rows of a last wave."""
    how = next((how for limit, most, how in MERGING if rows <= limit and splits <= most), _SEPARATE)
    return replace(how, release=RELEASE_FIRST if rows < TAIL_EARLY else RELEASE_NEVER) if tail else how
