"""Semantic mutations of every positive: a mutant is refused, or its replacement has the mutant's own value."""

import copy
import os
import zlib

import pytest
import torch
from compiling import FLEX, POSITIVES, case
from mutations import copied, mutants
from run_all import close, flat
from torch._dynamo.backends.common import aot_autograd

import fusion_pass
from fusion_pass import Config

# Mutants of every positive; FUSION_PASS_TEST_MUTANTS=50 for a long run.
MUTANTS = int(os.environ.get("FUSION_PASS_TEST_MUTANTS", "12"))
# The inputs as they are, and so small that floors and clamps of quantisation scales decide.
MAGNITUDES = (1.0, 1e-3, 1e-6)
# These round the result to 8-bit integers or to bf16 afterwards, where the last bit of anything may flip a step.
ROUNDED = {"pos_58": 5e-3}
totals = {"mutants": 0, "other value": 0, "refused": 0, "kept": 0}


def traced(fn, args):
    """The functional ATen graph of ``fn`` and its inputs."""
    found = []

    def keep(gm, _fake_inputs):
        def run(boxed):
            inputs = list(boxed)
            boxed.clear()
            found.append((gm, [i.clone() for i in inputs]))
            return gm(*inputs)

        run._boxed_call = True
        return run

    torch._dynamo.reset()
    torch.compile(fn, backend=aot_autograd(fw_compiler=keep, inference_compiler=keep), fullgraph=True)(*args)
    (gm, inputs), = found
    return gm, inputs


def scaled(inputs, magnitude):
    return [i * magnitude if i.is_floating_point() and i.dtype.itemsize > 1 else i.clone() for i in inputs]


def values(gm, inputs):
    torch.manual_seed(1)
    return [flat(gm(*scaled(inputs, magnitude))) for magnitude in MAGNITUDES]


def distance(a, b):
    """The largest relative difference of ``a`` from ``b`` over all inputs. Not-a-number must stand in the same places,
    except that the ops give zeros for a row that attends to nothing, where a softmax gives not-a-number."""
    worst = 0.0
    for xs, ys in zip(a, b):
        for x, y in zip(xs, ys):
            if bool(((x.isnan() != y.isnan()) & (x != 0)).any()):
                return float("inf")
            x, y = x.double().nan_to_num(0, 1e30, -1e30), y.double().nan_to_num(0, 1e30, -1e30)
            worst = max(worst, close(x, y) if y.abs().max() > 0 else float(x.abs().max()))
    return worst


@pytest.fixture(scope="module", autouse=True)
def report_totals():
    yield
    print("\nmutation test: " + ", ".join(f"{count} {name}" for name, count in totals.items())
          + f"; killed {totals['refused'] + totals['kept']}/{totals['other value']}")


# Half a minute each: loops that are traced into hundreds of operators.
LONG = ("pos_15_vllm_per_block_loop_reference", "pos_51_scaled_mm_per_group_and_kblock")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in LONG else ()) for n in POSITIVES if n not in FLEX])
def test_mutants_keep_their_value(name):
    with torch.no_grad():
        _, fn, args = case(name, tokens=5, dtype=torch.float32)
        gm, inputs = traced(fn, args)
        original = values(gm, inputs)
        rewritten = copied(gm)
        report = fusion_pass.rewrite(rewritten, Config(strict=True))
        assert report.fused
        noise = distance(values(rewritten, inputs), original)
        tolerance = 3 * noise + ROUNDED.get(name[:6], 1e-5)
        survivors, counted = [], 0
        for description, mutant in mutants(gm, MUTANTS, zlib.crc32(name.encode())):
            try:
                before = values(copy.deepcopy(mutant), inputs)
            except (RuntimeError, IndexError):
                continue        # no program: an index out of range, an operator that this dtype has not
            changed = distance(before, original) > 2 * tolerance
            report = fusion_pass.rewrite(mutant, Config(strict=True))
            kept = not report.fused or distance(values(mutant, inputs), before) <= tolerance
            counted += 1
            totals["mutants"] += 1
            totals["other value"] += changed
            totals["refused" if not report.fused else "kept"] += changed and kept
            if not kept:
                error = distance(values(mutant, inputs), before)
                survivors.append(f"{description}: fused {[c.roles for c in report.fused]}, error {error:.2e} "
                                 f"(tolerance {tolerance:.1e})")
        assert not survivors, "\n".join(survivors)
        assert counted >= min(10, MUTANTS)
