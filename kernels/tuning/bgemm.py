# SPDX-License-Identifier: Apache-2.0
"""Tiles of the FP8 BGEMM by architecture, token count and number of weight rows.

A table row: (tokens up to, tile). The sm90 rows were measured on an H200 at K = 4096 with 16 x 1024 weight rows (wide)
and 8 x 1024 (narrow: with half the programs, smaller row tiles and deeper pipelines fill the GPU). The others are
chosen by what fits and have not been run. Token counts inside one row share compiled kernels: their number is bounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Tile:
    block_r: int  # weight rows per program
    block_t: int  # tokens per program
    num_warps: int
    stages: int
    swap: bool  # weight rows are the tensor core's M operand
    tma: bool = False  # tiles through tensor descriptors, where the operands allow it
    prefetch_scales: bool = False  # scales one step ahead in registers instead of through the pipeline


ANY = 1 << 62
# Below this many weight rows in all groups together, half of an H200's multiprocessors would idle with 128-row tiles.
NARROW_ROWS = 132 * 64

TILES: dict[str, list[tuple[int, Tile]]] = {
    "sm90": [
        (8, Tile(64, 16, 4, 6, True)),
        (16, Tile(128, 16, 4, 6, True)),
        (32, Tile(128, 32, 4, 6, True, tma=True)),
        (64, Tile(128, 64, 4, 6, False)),
        (512, Tile(64, 128, 4, 4, True, tma=True, prefetch_scales=True)),
        (ANY, Tile(128, 64, 4, 3, False, tma=True, prefetch_scales=True)),
    ],
    "sm90 narrow": [
        (16, Tile(64, 16, 4, 8, True)),
        (32, Tile(64, 32, 4, 4, True)),
        (128, Tile(64, 64, 4, 6, False, tma=True)),
        (512, Tile(64, 128, 4, 4, True, tma=True, prefetch_scales=True)),
        (ANY, Tile(128, 64, 4, 3, False, tma=True, prefetch_scales=True)),
    ],
    "small": [  # fits 99 KiB of shared memory
        (16, Tile(64, 16, 4, 4, True)),
        (32, Tile(64, 32, 4, 4, True)),
        (ANY, Tile(64, 64, 4, 3, False)),
    ],
    "decoding": [  # no E4M3 arithmetic: operands pass through registers
        (16, Tile(64, 16, 4, 4, True)),
        (32, Tile(64, 32, 4, 3, True)),
        (ANY, Tile(64, 64, 4, 3, False)),
    ],
}


# Batch-invariant calls: one tile shape and one order of operands for every token count, so that each result is the same
# chain of sums. Only how the tiles arrive differs (pipeline depth, descriptors), which no sum can see. Tiles of 64
# tokens lose about 3 us per call at one token on an H200 and nothing at 64 and from 1,024 on.
INVARIANT: dict[str, list[tuple[int, Tile]]] = {
    "sm90": [
        (64, Tile(128, 64, 4, 6, False)),
        (ANY, Tile(128, 64, 4, 3, False, tma=True, prefetch_scales=True)),
    ],
    "sm90 narrow": [
        (128, Tile(64, 64, 4, 6, False)),
        (ANY, Tile(64, 64, 4, 4, False, tma=True, prefetch_scales=True)),
    ],
    "small": [(ANY, Tile(64, 64, 4, 3, False))],
    "decoding": [(ANY, Tile(64, 64, 4, 3, False))],
}


def tile(capability: tuple[int, int], tokens: int, weight_rows: int, native: bool) -> Tile:
    """The tile for ``tokens`` tokens and ``weight_rows`` = G * R; ``native``: whether E4M3 products are available."""
    return _row(TILES, capability, tokens, weight_rows, native)


def invariant_tile(capability: tuple[int, int], tokens: int, weight_rows: int, native: bool) -> Tile:
    """The tile of a batch-invariant call; arguments as of :func:`tile`."""
    return _row(INVARIANT, capability, tokens, weight_rows, native)


def _row(
    tables: Mapping[str, Sequence[tuple[float, Tile]]],
    capability: tuple[int, int],
    tokens: int,
    weight_rows: int,
    native: bool,
) -> Tile:
    table = "small"
    if not native:
        table = "decoding"
    elif capability[0] == 9:
        table = "sm90 narrow" if weight_rows <= NARROW_ROWS else "sm90"
    return next(t for limit, t in tables[table] if tokens <= limit)


@dataclass(frozen=True)
class Form:
    """Tile of the warp-specialised Hopper kernels: 16, 32 (swap) or 64, 128, 256 tokens x 64 or 128 weight rows.

    Stages of `blocks` blocks of K; shared memory holds stages * blocks * (tokens * 132 + weight_rows * 128) bytes and
    16 KiB more (`overlapped`: 32 KiB), of 227 KiB. Tiles of 64 weight rows take at most 64 tokens and an even `blocks`.
    `overlapped`: the kernel of bgemm_overlapped.py, tiles of 128 x 128 with one block per stage only. `prefetch`: bytes
    of each row of a CTA's first tile (at most 512) that go into the L2 cache while the kernel before still runs.
    `early`: stages (at most `stages`) whose weight is loaded then, where it is known to be ready.
    """

    tokens: int
    weight_rows: int
    stages: int
    blocks: int
    swap: bool = False
    overlapped: bool = False
    prefetch: int = 0
    early: int = 0


# Few tokens: the weight's stream is the limit. (tokens up to, wide form, form for at most NARROW_ROWS weight rows) Not
# the deepest rings that fit: from 32 tokens on 0.4 to 0.7 us were lost with one stage more. Nor is all of a ring loaded
# early where the kernel in front is soon done: the activations would queue behind it.
_SIXTEEN = Form(16, 128, 4, 2, swap=True, prefetch=512, early=2)
_SIXTEEN_ALL_EARLY = replace(_SIXTEEN, early=4)
_THIRTY_TWO = Form(32, 128, 3, 2, swap=True, prefetch=512, early=2)
HOPPER_STREAMING: list[tuple[int, Form, Form]] = [
    (4, _SIXTEEN_ALL_EARLY, _SIXTEEN_ALL_EARLY),
    (16, _SIXTEEN, _SIXTEEN),
    (32, _THIRTY_TWO, _THIRTY_TWO),
    (64, Form(64, 128, 3, 2, early=2), Form(64, 64, 4, 2, early=2)),
    (128, Form(128, 128, 5, 1, early=5), Form(64, 128, 3, 2, early=2)),
]
# More tokens: microseconds before the first wave of tiles and per wave, at K = 4096 on an H200.
HOPPER_WAVES: list[tuple[Form, float, float]] = [
    (Form(64, 128, 4, 2, early=2), 0.0, 12.5),
    (Form(128, 128, 5, 1, overlapped=True, early=5), 4.5, 13.6),
    (Form(256, 128, 4, 1, early=4), 2.0, 29.0),
]
# Fewest tokens at which DeepGEMM is used where it is installed and asked for (gluon/deepgemm.py).
DEEPGEMM_TOKENS = 192


def hopper_form(tokens: int, weight_rows: int, sm_count: int) -> Form:
    """The form for ``tokens`` tokens and ``weight_rows`` = G * R."""
    for limit, wide, narrow in HOPPER_STREAMING:
        if tokens <= limit:
            return narrow if weight_rows <= NARROW_ROWS else wide

    def cost(form: Form, first: float, wave: float) -> float:
        tiles = weight_rows // form.weight_rows * -(-tokens // form.tokens)
        return first + -(-tiles // sm_count) * wave

    return min(HOPPER_WAVES, key=lambda row: cost(*row))[0]
