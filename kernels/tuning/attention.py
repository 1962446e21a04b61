# SPDX-License-Identifier: Apache-2.0
"""Tiles of the portable attention kernel, by architecture and element size.

A tile is (heads per program, keys per step, warps, pipeline stages). They are limited by registers (the accumulator is
heads x 512 fp32) and shared memory; every row is compiled without spills by ``tests/kernels/test_compile.py``, which is
also how to check a new row. The sm90 rows were measured on an H200 (64 x 64 with 8 warps is the best tile plain Triton
reaches there); the others are chosen by what fits and have not been run.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    """Which rows (tokens x blocks of 64 heads) of a Hopper attention are cut into shares of their keys.

    The first `whole` rows are not; `merged`: the kernel merges the shares itself, else a kernel behind it does.
    """

    whole: int
    splits: int
    merged: bool


# Hopper: microseconds on an H200 of one tile of 64 keys, and of merging shares inside the kernel: once, and per share
# that the last one takes in. Most shares merged that way: above, a kernel with all multiprocessors is faster.
TILE_US = 1.65
MERGE_US = (2.0, 0.8)
MERGED_SHARES = 3


def hopper_plan(rows: int, tiles: int, sm_count: int, cut: bool) -> Plan:
    """How `rows` rows with `tiles` tiles of keys each share the multiprocessors; no share is empty.

    Up to one wave: every row in as many shares as there is room for. More: the rows of the last wave are cut if it is
    at most half full, `cut` allows it, and that is expected to be faster.
    """
    if rows <= sm_count:
        splits = max(1, min(tiles, sm_count // rows))
        splits = -(-tiles // -(-tiles // splits))
        return Plan(0, splits, 1 < splits <= MERGED_SHARES)
    left = rows % sm_count
    if not cut or not left:
        return Plan(rows, 1, False)

    def cost(splits: int) -> float:
        return -(-tiles // splits) * TILE_US + (MERGE_US[0] + (splits - 1) * MERGE_US[1] if splits > 1 else 0.0)

    splits = min(range(1, min(tiles, sm_count // left) + 1), key=cost)
    splits = -(-tiles // -(-tiles // splits))
    return Plan(rows - left, splits, True) if splits > 1 else Plan(rows, 1, False)


# Hopper: rows (tokens x heads) of a split call between which the next kernel must not be let in before the attention is
# done: its waiting programs fill the multiprocessors that the attention leaves free, and what follows starts late.
# Measured on an H200 at 128 heads: 1 us lost at 8 tokens, nothing either way at 4 and 16, up to 2 us won elsewhere.
LATE_RELEASE = (512, 1024)


def release_early(rows: int, splits: int) -> bool:
    """Whether the kernel behind the Hopper attention may be launched while that still runs."""
    return splits == 1 or not LATE_RELEASE[0] <= rows <= LATE_RELEASE[1]


def merge_tiling(rows: int, partials: int) -> tuple[int, int, bool] | None:
    """(rows per program, warps, dependent launch) of the merge behind a split Hopper attention; None: one row each."""
    if rows < 512 or partials > 10:
        return None
    return 8, 4, True
