"""Translation validation: run what was matched against what replaced it, on the user's own values.

With ``Config(verify=...)`` the replaced value is kept in the graph and ``fusion_pass::agree`` stands behind both. It
compares them when the graph runs; if they differ by more than the roundings of the source explain, the original value
goes on, then and in every later call, the chain moves from the report's ``fused`` to its ``near_misses``, and one
warning is logged. ``"first"`` compares at the first call only, ``"always"`` at every call.

A comparison reads values on the host, so it is skipped while a CUDA graph is being captured.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading

import torch
import torch.fx as fx

from . import store
from .report import FusedChain, NearMiss, Report

log = logging.getLogger(__name__)

# Relative norm that may lie between two right results: the roundings inside one or the other, with room for their sum.
BUDGET_FP32 = 1e-4
BUDGET_HALF = 4 * 2.0 ** -8
BUDGET_E4M3 = 2.0 ** -4


@dataclasses.dataclass
class Record:
    """What is known of one chain under validation. ``worst``: largest relative error seen; ``agreed``: None until the
    first comparison."""

    chain: FusedChain
    report: Report
    budget: float
    always: bool
    agreed: bool | None = None
    worst: float = 0.0
    comparisons: int = 0


_records: dict[int, Record] = {}
_numbers = itertools.count()
_lock = threading.Lock()


def budget_of(values: list[torch.Tensor], quantised: bool) -> float:
    """The error budget of a chain whose intermediate values are ``values``."""
    if quantised:
        return BUDGET_E4M3
    if any(v.dtype in (torch.bfloat16, torch.float16) for v in values):
        return BUDGET_HALF
    return BUDGET_FP32


def reserve() -> int:
    """A number that identifies a chain in the graph."""
    with _lock:
        return next(_numbers)


def record(number: int, chain: FusedChain, report: Report, budget: float, always: bool) -> None:
    """Register the chain of a reserved number."""
    with _lock:
        _records[number] = Record(chain, report, budget, always)


def records() -> list[Record]:
    """All chains under validation in this process."""
    return list(_records.values())


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference relative to the norm of what was expected, in float64; infinite if only one is finite."""
    a, b = found.detach().to(torch.float32).double(), expected.detach().to(torch.float32).double()
    if not bool((torch.isfinite(a) == torch.isfinite(b)).all()):
        return float("inf")
    a, b = torch.nan_to_num(a), torch.nan_to_num(b)
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


@torch.library.custom_op("fusion_pass::agree", mutates_args=())
def agree(original: torch.Tensor, fused: torch.Tensor, number: int) -> torch.Tensor:
    """``fused`` if it agrees with ``original`` within the chain's budget, else ``original`` (same shape and dtype)."""
    known = _records.get(number)
    if known is None:
        return fused.clone()
    capturing = original.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if not capturing and original.numel() and known.agreed is not False and (known.always or known.agreed is None):
        error = relative_error(fused, original)
        known.comparisons += 1
        known.worst = max(known.worst, error)
        known.agreed = error <= known.budget
        if not known.agreed:
            _reject(known, error)
    # In the strides of the replacement either way: readers were traced with those.
    return torch.empty_like(fused).copy_(original if known.agreed is False else fused)


@agree.register_fake
def _(original: torch.Tensor, fused: torch.Tensor, number: int) -> torch.Tensor:
    return torch.empty_like(fused)


def _reject(known: Record, error: float) -> None:
    reason = (f"validation: the replacement {known.chain.op} differs from the source by {error:.2e} (relative norm, "
              f"budget {known.budget:.2e}); the source's own value is used")
    log.warning("fusion_pass at %s: %s", known.chain.where or "an unknown line", reason)
    for report in {id(r): r for r in (known.report, *store.reports())}.values():
        if any(chain is known.chain for chain in report.fused):
            report.fused[:] = [chain for chain in report.fused if chain is not known.chain]
            report.near_misses.append(NearMiss(role="bgemm", reason=reason, where=known.chain.where))


def insert(old: fx.Node, new: fx.Node, number: int) -> fx.Node:
    """A node that compares ``new`` with ``old`` and gives the one to go on with; stands right behind ``old``."""
    graph = old.graph
    with graph.inserting_after(old):
        node = graph.call_function(torch.ops.fusion_pass.agree.default, (old, new, number))
    node.meta["val"] = torch.empty_like(new.meta["val"])
    return node
