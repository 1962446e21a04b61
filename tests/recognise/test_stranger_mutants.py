"""Semantic mutations (``tests/corpus/mutations.py``) of the strangers' programs: a mutant is refused, or its
replacement has the mutant's own value."""

from __future__ import annotations

import copy
import os
import pathlib
import sys
import zlib

import pytest
import torch
from captured import capture
from test_stranger_parts import PROGRAMS, inputs, names, program

import fusion_pass
from fusion_pass import Config

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "corpus"))
from mutations import copied, mutants  # noqa: E402

MUTANTS = int(os.environ.get("FUSION_PASS_TEST_MUTANTS", "12"))
# The inputs as they are, and so small that floors of quantisation scales decide.
MAGNITUDES = (1.0, 1e-3, 1e-6)
totals = {"mutants": 0, "other value": 0, "refused": 0, "kept": 0}


@pytest.fixture(scope="module", autouse=True)
def report_totals():
    yield
    print("\nmutation test: " + ", ".join(f"{count} {name}" for name, count in totals.items())
          + f"; killed {totals['refused'] + totals['kept']}/{totals['other value']}")


def values(gm, given):
    return [gm(*[i * magnitude if i.is_floating_point() else i.clone() for i in given])[0].double()
            for magnitude in MAGNITUDES]


def distance(found, wanted):
    """The largest relative difference over all magnitudes. Where the source gives not-a-number the ops may give zero (a
    row that attends to nothing)."""
    worst = 0.0
    for x, y in zip(found, wanted):
        if bool(((x.isnan() != y.isnan()) & (x != 0)).any()):
            return float("inf")
        x, y = x.nan_to_num(0, 1e30, -1e30), y.nan_to_num(0, 1e30, -1e30)
        worst = max(worst, float((x - y).norm() / y.norm()) if y.norm() > 0 else float(x.norm()))
    return worst


@pytest.mark.slow
@pytest.mark.parametrize("attention, rotation, quantisation, projection, dtype", PROGRAMS, ids=names)
def test_mutants_keep_their_value(attention, rotation, quantisation, projection, dtype):
    fn = program(attention, rotation, quantisation, projection, torch.float32)
    case = capture(fn, tuple(inputs()))
    gm, given = case.module, case.inputs
    with torch.no_grad():
        original = values(gm, given)
        rewritten = copied(gm)
        assert fusion_pass.rewrite(rewritten, Config(strict=True)).fused
        # A value on a rounding border of E4M3 may fall to either side: one of them is 2e-4 of all.
        tolerance = 3 * distance(values(rewritten, given), original) + (1e-5 if quantisation is None else 1e-3)
        survivors, counted = [], 0
        seed = zlib.crc32("-".join(map(names, (attention, rotation, quantisation, projection))).encode())
        for description, mutant in mutants(gm, MUTANTS, seed):
            try:
                before = values(copy.deepcopy(mutant), given)
            except (RuntimeError, IndexError):
                continue        # no program: an index out of range
            changed = distance(before, original) > 2 * tolerance
            report = fusion_pass.rewrite(mutant, Config(strict=True))
            error = distance(values(mutant, given), before) if report.fused else 0.0
            kept = error <= tolerance
            counted += 1
            totals["mutants"] += 1
            totals["other value"] += changed
            totals["refused" if not report.fused else "kept"] += changed and kept
            if not kept:
                survivors.append(f"{description}: fused {[c.roles for c in report.fused]}, error {error:.2e} "
                                 f"(tolerance {tolerance:.1e})")
        assert not survivors, "\n".join(survivors)
        assert counted >= min(10, MUTANTS)
