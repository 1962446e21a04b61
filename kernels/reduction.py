# SPDX-License-Identifier: Apache-2.0
"""Host policy of the split-KV merge: how many concurrent groups (KvSplit), and the launch layout.

Pure functions of sizes: no tensor, no device access, the same answer inside and outside CUDA graph capture. A caller
under capture passes the *capacity* (the number of partials the buffers hold), not today's count: unused slots carry
maximum -inf and cost nothing but their read.

Two regimes:

* an explicit ``bound`` (``Config.kv_split``, capped by ``FUSION_PASS_KV_SPLIT``) is halved until every group has a
  partial, every group of the CTA's threads holds at least one whole row, and the grid fits 2 x SMs CTAs. CTAs and rows
  are counted in the form the rule was stated for: 512 threads with 8 channels each, of which KvSplit groups share one
  set of rows (the reduction kernel of TensorRT-LLM and FlashInfer).
* no bound: the table measured on this architecture (:mod:`.tuning`), which also gives the layout; the serial loop where
  nothing was measured. That table is free to launch more CTAs than 2 x SMs: the kernel's CTAs are 1 to 8 warps, so what
  is scarce is warps, and the measurement decides.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

KV_SPLITS = (1, 2, 4, 8, 16)

# The form in which an explicit bound counts rows and CTAs.
CTA_THREADS = 512
CHANNELS_PER_THREAD = 8

# A KvSplit is taken over the serial loop only if it was measured faster by more than the spread of a measurement.
NOISE = 0.02

# Modules of .tuning, by (compute capability, SM count).
_TABLES = {((9, 0), 132): "merge_sm90"}


@dataclass(frozen=True)
class KvSplitDecision:
    """What to launch, and why.

    kv_split: concurrent groups (1 = the serial loop). reason: the condition that decided. width: channels of a row per
    CTA. num_warps: warps per CTA. unroll: partials per group in one batch of loads of the run-time loop. unroll_limit:
    partials per group up to which there is no loop: everything is unrolled when the kernel is compiled. pdl: launch
    dependent on the kernel before (where the device can). batch: partials per group in one batch of loads of the
    unrolled form (0: all of them are one batch).
    """

    kv_split: int
    reason: str
    width: int
    num_warps: int
    unroll: int = 8
    unroll_limit: int = 18
    pdl: bool = False
    batch: int = 0


def _width(head_dim: int, limit: int) -> int:
    """Largest power of two that divides ``head_dim`` and does not exceed ``limit``."""
    return min(head_dim & -head_dim, limit)


def default_layout(kv_split: int, *, head_dim: int, element_size: int, reason: str) -> KvSplitDecision:
    """Layout by rule where none was measured: one 16-byte load per lane and row, so that a warp owns its columns, and 8
    to 16 rows per lane in flight (unrolled whole: up to 32), beyond which registers spill."""
    width = _width(head_dim, 256 if kv_split == 1 else 512)
    warps = max(1, width * element_size // 512)
    return KvSplitDecision(
        kv_split, reason, width, warps, max(1, 8 // kv_split), 18 if kv_split == 1 else 32 // kv_split
    )


def _check(num_partials: int, rows: int, head_dim: int, sm_count: int, bound: int | None) -> None:
    for name, value, least in (("num_partials", num_partials, 1), ("rows", rows, 0), ("head_dim", head_dim, 1)):
        if value < least:
            raise ValueError(f"choose_kv_split: expected {name} >= {least}, got {value}")
    if sm_count < 0:
        raise ValueError(f"choose_kv_split: expected sm_count >= 0, got {sm_count}")
    if bound is not None and bound not in KV_SPLITS:
        raise ValueError(f"choose_kv_split: expected bound to be None or one of {KV_SPLITS}, got {bound!r}")


def grid_ctas(kv_split: int, *, rows: int, head_dim: int) -> int:
    """CTAs of a merge in the counting form: one holds CTA_THREADS * CHANNELS_PER_THREAD / KvSplit channels."""
    return math.ceil(rows * head_dim * kv_split / (CTA_THREADS * CHANNELS_PER_THREAD))


def _obstacle(kv_split: int, *, num_partials: int, rows: int, head_dim: int, sm_count: int) -> str | None:
    """Why ``kv_split`` groups are too many, or None."""
    if kv_split == 1:
        return None
    if kv_split > num_partials:
        return f"{kv_split} groups but {num_partials} partial{'s' if num_partials > 1 else ''}"
    threads = CTA_THREADS // kv_split
    if threads * CHANNELS_PER_THREAD < head_dim:
        return f"a group of {threads} threads holds {threads * CHANNELS_PER_THREAD} channels, a row {head_dim}"
    ctas = grid_ctas(kv_split, rows=rows, head_dim=head_dim)
    if ctas > 2 * sm_count:
        return f"a grid of {ctas} CTAs exceeds 2 x {sm_count} SMs"
    return None


def _bounded(num_partials: int, rows: int, head_dim: int, sm_count: int, bound: int) -> tuple[int, str]:
    if bound == 1:
        return 1, "bound 1: serial loop"
    kv_split, last = bound, None
    while why := _obstacle(kv_split, num_partials=num_partials, rows=rows, head_dim=head_dim, sm_count=sm_count):
        kv_split, last = kv_split // 2, why
    if last is None:
        return kv_split, f"bound {bound} fits: partials, rows per group and a grid within 2 x {sm_count} SMs"
    return kv_split, f"bound {bound} halved to {kv_split}: {last}"


def measured_table(sm_count: int, capability: tuple[int, int] | None = None) -> Any:
    """The tuning module of an architecture, or None. Without ``capability``, the SM count alone identifies it."""
    for (known, sms), module in _TABLES.items():
        if sms == sm_count and capability in (None, known):
            try:
                return importlib.import_module(f".tuning.{module}", __package__)
            except ModuleNotFoundError:
                return None
    return None


def _nearest(values: Iterable[int], wanted: int) -> int:
    """Measured size nearest to ``wanted`` by ratio."""
    return min(values, key=lambda value: abs(math.log(value / max(wanted, 1))))


def _measured(
    by_rows: Mapping[int, Any], num_partials: int, rows: int
) -> tuple[int, int, dict[int, tuple[Any, ...]]] | None:
    """(rows, partials, {kv_split: (us, width, warps, unroll, unroll_limit, batch)}) of the nearest measured point."""
    if not by_rows:
        return None
    near_rows = _nearest(by_rows, rows)
    near_partials = _nearest(by_rows[near_rows], num_partials)
    choices = {k: v for k, v in by_rows[near_rows][near_partials].items() if k <= num_partials}
    return near_rows, near_partials, choices


def choose_kv_split(
    *,
    num_partials: int,
    rows: int,
    head_dim: int,
    sm_count: int,
    bound: int | None = None,
    element_size: int = 4,
    epilogue: bool = False,
    capability: tuple[int, int] | None = None,
) -> KvSplitDecision:
    """Groups and layout for merging ``num_partials`` partials of ``rows`` (tokens x heads) rows of ``head_dim``
    channels.

    bound: 1, 2, 4, 8 or 16 = upper bound, halved as the module says; None = the measured table. element_size: bytes per
    element of the partials (4 or 2). epilogue: inverse RoPE and quantisation follow in the same kernel. capability:
    compute capability; None = known by the SM count.

    Raises ValueError for a bound outside the set and for impossible sizes.
    """
    _check(num_partials, rows, head_dim, sm_count, bound)
    table = measured_table(sm_count, capability)
    found = None
    if table is not None and head_dim == table.HEAD_DIM:
        found = _measured(table.measured(element_size, epilogue), num_partials, rows)
    if bound is not None:
        kv_split, reason = _bounded(num_partials, rows, head_dim, sm_count, bound)
        if found and kv_split in found[2]:
            return _from_entry(kv_split, found[2][kv_split], reason, rows, table)
        return default_layout(kv_split, head_dim=head_dim, element_size=element_size, reason=reason)
    if found is None:
        if table is None:
            what = f"{sm_count} SMs"
        elif head_dim != table.HEAD_DIM:
            what = f"head_dim {head_dim}"
        else:
            what = f"{element_size}-byte partials"
        return default_layout(
            1, head_dim=head_dim, element_size=element_size, reason=f"serial loop: nothing was measured for {what}"
        )
    near_rows, near_partials, choices = found
    kv_split = min(choices, key=lambda k: choices[k][0])
    if choices[kv_split][0] > (1 - NOISE) * choices[1][0]:
        kv_split = 1
    where = f"measured on {table.DEVICE} at {near_partials} partials x {near_rows} rows"
    if kv_split == 1:
        best = min(entry[0] for entry in choices.values())
        reason = f"serial loop: {where}, {choices[1][0]:.2f} us, no KvSplit is clearly faster (best {best:.2f})"
    else:
        reason = f"{where} (warps, not CTAs, bound the grid): {choices[kv_split][0]:.2f} us, serial {choices[1][0]:.2f}"
    return _from_entry(kv_split, choices[kv_split], reason, rows, table)


def measured_layouts(by_rows: Mapping[int, Any], num_partials: int, rows: int) -> dict[int, KvSplitDecision]:
    """{KvSplit: its fastest layout} at the measured point nearest to these sizes (for benchmarks)."""
    near = _measured(by_rows, num_partials, rows)
    if near is None:
        return {}
    near_rows, near_partials, choices = near
    where = f"measured at {near_partials} partials x {near_rows} rows"
    return {k: _layout(k, where, entry) for k, entry in choices.items()}


def _from_entry(kv_split: int, entry: tuple[Any, ...], reason: str, rows: int, table: Any) -> KvSplitDecision:
    return replace(_layout(kv_split, reason, entry), pdl=rows <= table.PDL_MAX_ROWS)


def _layout(kv_split: int, reason: str, entry: tuple[Any, ...]) -> KvSplitDecision:
    """A table entry (us, width, warps, unroll, unroll_limit[, batch]) as a decision."""
    _, width, warps, unroll, unroll_limit, *batch = entry
    return KvSplitDecision(kv_split, reason, width, warps, unroll, unroll_limit, batch=batch[0] if batch else 0)


def cap_bound(bound: int | None, cap: int | None) -> int | None:
    """The bound in force under a cap: the smaller of the two, None where neither is given."""
    given = [value for value in (bound, cap) if value is not None]
    return min(given) if given else None


def for_blocks(decision: KvSplitDecision, block: int, head_dim: int, element_size: int) -> KvSplitDecision:
    """``decision`` with a tile that holds whole quantisation blocks (a tile narrower than ``block`` cannot)."""
    if decision.width >= block:
        return decision
    width = _width(head_dim, block)
    return replace(decision, width=width, num_warps=max(1, width * element_size // 512))
